"""The command line: parses it, and imports only what the command needs."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from zerotop.commands.common.errors import FAILED, USAGE, Problem, describe_error
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.terminal import has_terminal

_EXIT_INTERRUPTED = 130


_SESSION_HELP = "its name, its beginning, or its path"
_EPILOG = """
Without a COMMAND the list of all recordings opens. SESSION is the name that `zerotop sessions` lists, its beginning, or a
path. In brackets stands what holds where an option is not given. `zerotop COMMAND --help` tells more of each.
"""


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerotop",
        description="Watch, explain, replay and export DeepSpeed training from the terminal.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action=_VersionAction, help="show the version and exit")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    _add_start_commands(commands)
    _add_attach(commands)
    _add_read_commands(commands)
    _add_microscope(commands)
    compare = _add_command(
        commands, "compare", "look at two or more recordings side by side", "zerotop compare brisk-otter calm-heron --json"
    )
    compare.add_argument("sessions", nargs="+", metavar="SESSION", help="a name, its beginning, or a path")
    compare.add_argument("--json", action="store_true", help="for programs: sizes in bytes, times in seconds")
    _add_export(commands)
    pack = _add_command(
        commands, "pack", "make one small file of a session, to keep or send", "zerotop pack brisk-otter -o otter.zerotop"
    )
    pack.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    pack.add_argument("-o", "--output", metavar="FILE", help="[SESSION.zerotop in this directory]")
    _add_serve(commands)
    doctor = _add_command(commands, "doctor", "say what this machine lets us see, and how to see more", "zerotop doctor")
    doctor.add_argument("--json", action="store_true", help="for programs")
    return parser


class _VersionAction(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        from importlib import metadata

        print(f"zerotop {metadata.version('zerotop')}")
        parser.exit()


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, *examples: str, **options: Any
) -> argparse.ArgumentParser:
    """A command: what it does is a clause in the list of all, and a sentence in its own help."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join(("for example:", *(f"  {example}" for example in examples))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def _add_start_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = _add_command(commands, "demo", "watch a real two-rank fine-tune", "zerotop demo", "zerotop demo --recorded")
    demo.add_argument("--steps", type=_parse_count, default=24, help="optimizer steps to train [24]")
    demo.add_argument("--recorded", action="store_true", help="replay one of an 8 B model on 4 GPUs: nothing is trained")
    run = _add_command(
        commands,
        "run",
        "start a job and watch it",
        "zerotop run -- deepspeed --num_gpus 8 train.py --deepspeed_config ds.json",
        "zerotop run --headless -- torchrun --nproc-per-node 8 train.py",
        usage="%(prog)s [-h] [--session DIR] [--headless] [--no-phase-peaks] -- COMMAND",
    )
    run.add_argument("--session", metavar="DIR", help="record here [a new folder in the state directory]")
    run.add_argument("--headless", action="store_true", help="no screen: the job's output passes through")
    run.add_argument("--no-phase-peaks", action="store_true", help="leave the peak counters of PyTorch's allocator alone")


def _add_read_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = _add_command(commands, "sessions", "list what was recorded", "zerotop sessions")
    listing.add_argument("--json", action="store_true", help="for programs")
    replay = _add_command(
        commands, "replay", "look at a recording", "zerotop replay brisk-otter", "zerotop replay otter.zerotop --speed 4"
    )
    replay.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    replay.add_argument("--speed", type=float, default=1.0, help="from 0.25 to 1000 [1]")
    notes = _add_command(
        commands, "annotations", "say what happened in a recording, and why", "zerotop annotations brisk-otter"
    )
    notes.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    notes.add_argument("--json", action="store_true", help="for programs")
    memory = _add_command(
        commands,
        "memory",
        "say where a recording's memory was, and what was expected",
        "zerotop memory brisk-otter --at 24",
    )
    memory.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    memory.add_argument("--at", type=int, metavar="STEP", help="at the end of this step [the last, or the failure]")
    memory.add_argument("--json", action="store_true", help="for programs: sizes in bytes")


def _add_microscope(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    microscope = _add_command(
        commands,
        "microscope",
        "see every allocation of a running job's next steps",
        "zerotop microscope brisk-otter --steps 2",
    )
    microscope.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    microscope.add_argument("--steps", type=_parse_count, default=1, help="optimizer steps to look at [1]")
    microscope.add_argument("--stacks", action="store_true", help="with Python stacks, which is slow, for memory_viz")
    microscope.add_argument("--wait", type=_parse_count, default=120, metavar="SECONDS", help="for the steps to end [120]")
    microscope.add_argument("--json", action="store_true", help="for programs")


def _add_attach(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    attach = _add_command(
        commands,
        "attach",
        "list the jobs that run here, or watch one, whoever started it",
        "zerotop attach",
        "zerotop attach 4711 --enter",
        "zerotop attach 4711 --hosts worker-2,worker-3 --session /shared/job",
    )
    attach.add_argument("session", nargs="?", metavar="PID|SESSION", help="a process of the job, or a session")
    attach.add_argument("--enter", action="store_true", help="put the probe into its ranks, to see phases and memory")
    attach.add_argument("--headless", action="store_true", help="no screen: record until it ends")
    attach.add_argument("--json", action="store_true", help="the list, for programs")
    attach.add_argument("--session", dest="folder", metavar="DIR", help="record here [a new folder in the state directory]")
    _add_host_options(attach, "the job's other nodes too: HOST,HOST or @HOSTFILE, or job for those its launcher was told")
    attach.add_argument("--there", metavar="REQUEST", help=argparse.SUPPRESS)
    detach = _add_command(
        commands, "detach", "take the probe out of a job, and end what attach records", "zerotop detach 4711"
    )
    detach.add_argument("session", metavar="PID|SESSION", help="a process of the job, or a session")
    _add_host_options(detach, "on these nodes [all that attach has reached from here]")


def _add_host_options(command: argparse.ArgumentParser, meaning: str) -> None:
    command.add_argument("--hosts", metavar="HOSTS", help=meaning)
    command.add_argument("--ssh", metavar="COMMAND", help="how to reach them [$ZEROTOP_SSH, else ssh]")


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = _add_command(
        commands, "serve", "show the same in a browser", "zerotop serve", "zerotop serve brisk-otter --port 0"
    )
    serve.add_argument("session", nargs="?", metavar="SESSION", help="only this one [the list of all]")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]; others need a token")
    serve.add_argument("--port", type=int, default=8023, help="[8023]; 0 takes any that is free")
    serve.add_argument("--token", help="what a browser has to say to be let in [$ZEROTOP_TOKEN]")


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = _add_command(
        commands,
        "export",
        "write a recording's tables to files",
        "zerotop export brisk-otter > steps.csv",
        "zerotop export brisk-otter --table all --format parquet -o tables/",
    )
    export.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    export.add_argument("--table", default="steps", metavar="NAME", help="a table, or all [steps]")
    export.add_argument("--format", choices=("csv", "parquet", "jsonl"), default="csv", help="[csv]")
    export.add_argument("-o", "--output", metavar="PATH", help="file, or directory [standard output]")


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _build_parser()
    options, unknown = parser.parse_known_args(arguments[:split])
    command = list(arguments[split + 1 :])
    if unknown and options.name == "run" and not command:
        parser.error(f"write -- before the command: zerotop run -- {shlex.join(unknown)}")
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
    if options.name == "run":
        if not command:
            parser.error("there is no command to run: zerotop run -- COMMAND ...")
        options.command = command
    elif command:
        parser.error(f"{options.name} takes no command after --")
    return options


def _run_command(options: argparse.Namespace) -> int:
    with freeze_imports():
        module = importlib.import_module(f"zerotop.commands.{options.name}")
    return int(getattr(module, options.name)(options))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: the job's, 0, 1 for what failed, 2 for wrong usage."""
    _escape_output()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = _parse_arguments(arguments) if arguments or not has_terminal() else argparse.Namespace(name="home")
    except SystemExit as end:  # argparse has said why, or has printed its help
        return end.code if isinstance(end.code, int) else USAGE
    try:
        return _run_command(options)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has gone; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except Exception as error:
        if not _is_expected(error):
            raise
        print(f"zerotop: {escape_unprintable(describe_error(error))}", file=sys.stderr)
        return error.code if isinstance(error, Problem) else FAILED


def _escape_output() -> None:
    """A path or a command line may hold what the locale cannot show, or bytes that are no text: they come escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _is_expected(error: Exception) -> bool:
    if isinstance(error, (Problem, OSError)):
        return True
    # Not imported for this alone: what was raised has been imported.
    reader = sys.modules.get("zerotop.session.reader")
    return reader is not None and isinstance(error, reader.SessionError)
