"""The command line. Imports only what the command needs."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from zerotop.commands.common.errors import FAILED, USAGE, Problem, describe_error
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.options.option_types import (
    parse_age,
    parse_count,
    parse_max_size,
    parse_percent,
    parse_size,
)
from zerotop.commands.options.report_options import add_price, add_report_commands
from zerotop.commands.options.sweep_options import add_sweep_commands

_EXIT_INTERRUPTED = 130
_COMPLETION_VARIABLE = "_ARGCOMPLETE"  # set by the script of ``zerotop completions``
_TAKES_COMMAND = ("run", "sweep", "fit")

_SESSION_HELP = "name, start of a name, or path"
_JSON_HELP = "print JSON for programs"
_SESSION_DIR_HELP = "record in this folder [a new one in the state directory]"
_EPILOG = """
With no COMMAND, opens the recordings list. SESSION is a name from `zerotop sessions`, the start of one, or a path. Defaults
are in [brackets]. `zerotop COMMAND --help` describes a command.
"""


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerotop",
        description="Watch, explain, replay and export DeepSpeed and PyTorch training from the terminal.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action=_VersionAction, help="show the version and exit")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    _add_start_commands(commands)
    _add_attach(commands)
    _add_read_commands(commands)
    _add_microscope(commands)
    add_sweep_commands(partial(_add_command, commands))
    compare = _add_command(
        commands, "compare", "compare two or more recordings side by side", "zerotop compare brisk-otter calm-heron --json"
    )
    compare.add_argument("sessions", nargs="+", metavar="SESSION", help=_SESSION_HELP)
    compare.add_argument("--json", action="store_true", help=f"{_JSON_HELP}, with sizes in bytes and times in seconds")
    add_report_commands(partial(_add_command, commands))
    pack = _add_command(
        commands, "pack", "pack a recording into one small file", "zerotop pack brisk-otter -o otter.zerotop"
    )
    pack.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    pack.add_argument("-o", "--output", metavar="FILE", help="output file [SESSION.zerotop in this directory]")
    _add_serve(commands)
    completions = _add_command(
        commands,
        "completions",
        "print a script that completes commands and sessions",
        "zerotop completions fish > ~/.config/fish/completions/zerotop.fish",
        'eval "$(zerotop completions bash)"',
    )
    completions.add_argument("shell", choices=("bash", "zsh", "fish"), help="for its startup file")
    doctor = _add_command(commands, "doctor", "check this machine's setup", "zerotop doctor")
    doctor.add_argument("--json", action="store_true", help=_JSON_HELP)
    return parser


class _VersionAction(argparse.Action):
    """Prints the version, which is looked up only on request."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        from importlib import metadata

        print(f"zerotop {metadata.version('zerotop')}")
        parser.exit()


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, *examples: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a command; ``summary`` is its entry in the list of commands and the first sentence of its help."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join(("examples:", *(f"  {example}" for example in examples))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def _add_start_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = _add_command(
        commands, "demo", "train a small model with two ranks and watch it", "zerotop demo", "zerotop demo --recorded"
    )
    demo.add_argument("--steps", type=parse_count, default=24, help="optimizer steps to train [24]")
    demo.add_argument("--recorded", action="store_true", help="replay a recording of an 8 B model on 4 GPUs instead")
    run = _add_command(
        commands,
        "run",
        "start a job and watch it",
        "zerotop run deepspeed --num_gpus 8 train.py --deepspeed_config ds.json",
        "zerotop run --headless -- torchrun --nproc-per-node 8 train.py",
        usage="%(prog)s [-h] [--session DIR] [--max-size SIZE] [--headless] [--redact-output] [--no-phase-peaks]"
        " [--no-stacks] [--budget PERCENT] [--report FILE] [--price-per-hour PRICE] [--] COMMAND ...",
    )
    run.add_argument("--session", metavar="DIR", help=_SESSION_DIR_HELP)
    _add_max_size(run)
    run.add_argument("--headless", action="store_true", help="without the screen; pass output and signals through")
    run.add_argument("--redact-output", action="store_true", help="replace secrets in the recorded output, too")
    run.add_argument("--no-phase-peaks", action="store_true", help="do not reset the peak counters of PyTorch's allocator")
    _add_no_stacks(run)
    run.add_argument(
        "--budget",
        type=parse_percent,
        metavar="PERCENT",
        help="largest share of the training time that watching may take; of short steps less is recorded [0.3]",
    )
    run.add_argument("--report", metavar="FILE", help="write an HTML report when the job has ended")
    add_price(run)
    run.add_argument("first_words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # the command, where no -- precedes it


def _add_max_size(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-size", type=parse_max_size, metavar="SIZE", help="largest size of the recording, such as 500MB or 10GB [2GB]"
    )


def _add_no_stacks(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-stacks", action="store_true", help="do not record Python stacks: of slow or silent ranks, and of allocations"
    )


def _add_read_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = _add_command(
        commands,
        "sessions",
        "list recordings, or delete old ones",
        "zerotop sessions",
        "zerotop sessions --prune --older-than 30d --dry-run",
        "zerotop sessions --prune --total-size 20GB --yes",
    )
    listing.add_argument("--json", action="store_true", help=_JSON_HELP)
    listing.add_argument("--prune", action="store_true", help="delete recordings, never one whose job runs; asks first")
    listing.add_argument("--older-than", type=parse_age, metavar="AGE", help="those last written before, such as 12h or 30d")
    listing.add_argument(
        "--total-size", type=parse_size, metavar="SIZE", help="the oldest, until the others fit, as in 20GB"
    )
    listing.add_argument("--ended", action="store_true", help="all whose job has ended")
    listing.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    listing.add_argument("--yes", action="store_true", help="delete without asking")
    replay = _add_command(
        commands, "replay", "replay a recording", "zerotop replay brisk-otter", "zerotop replay otter.zerotop --speed 4"
    )
    replay.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    replay.add_argument("--speed", type=float, default=1.0, help="0.25 to 1000 [1]")
    add_price(replay)
    notes = _add_command(commands, "annotations", "list findings and fixes", "zerotop annotations brisk-otter")
    notes.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    notes.add_argument("--json", action="store_true", help=_JSON_HELP)
    memory = _add_command(commands, "memory", "show memory: measured vs expected", "zerotop memory brisk-otter --at 24")
    memory.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    memory.add_argument("--at", type=int, metavar="STEP", help="at the end of this step [the last step, or the failure]")
    memory.add_argument("--json", action="store_true", help=f"{_JSON_HELP}, with sizes in bytes")


def _add_microscope(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    microscope = _add_command(
        commands,
        "microscope",
        "trace every allocation in a running job's next steps",
        "zerotop microscope brisk-otter --steps 2",
    )
    microscope.add_argument("session", metavar="SESSION", help=_SESSION_HELP)
    microscope.add_argument("--steps", type=parse_count, default=1, help="optimizer steps to trace [1]")
    microscope.add_argument("--stacks", action="store_true", help="record Python stacks for memory_viz, which is slow")
    microscope.add_argument(
        "--wait", type=parse_count, default=120, metavar="SECONDS", help="longest wait for the steps [120]"
    )
    microscope.add_argument("--json", action="store_true", help=_JSON_HELP)


def _add_attach(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    attach = _add_command(
        commands,
        "attach",
        "list running jobs, or watch one, even if not started by zerotop",
        "zerotop attach",
        "zerotop attach 4711 --enter",
        "zerotop attach 4711 --hosts worker-2,worker-3 --session /shared/job",
    )
    attach.add_argument(
        "session", nargs="?", metavar="PID|SESSION", help="a process of the job, or a session [list the jobs]"
    )
    attach.add_argument("--enter", action="store_true", help="inject the probe into its ranks, for phases and memory")
    attach.add_argument("--headless", action="store_true", help="without the screen; record until the job ends")
    attach.add_argument("--json", action="store_true", help="print the list of jobs as JSON for programs")
    attach.add_argument("--session", dest="folder", metavar="DIR", help=_SESSION_DIR_HELP)
    _add_max_size(attach)
    _add_no_stacks(attach)
    _add_host_options(attach, "other nodes too: HOST,HOST or @HOSTFILE, or the word job for the nodes of its launcher")
    attach.add_argument("--there", metavar="REQUEST", help=argparse.SUPPRESS)
    detach = _add_command(commands, "detach", "remove the probe, stop recording", "zerotop detach 4711")
    detach.add_argument("session", metavar="PID|SESSION", help="a process of the job, or a session")
    _add_host_options(detach, "on these nodes [all that attach reached from here]")


def _add_host_options(command: argparse.ArgumentParser, hosts_help: str) -> None:
    command.add_argument("--hosts", metavar="HOSTS", help=hosts_help)
    command.add_argument("--ssh", metavar="COMMAND", help="ssh command for other nodes [$ZEROTOP_SSH, else ssh]")


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = _add_command(
        commands, "serve", "use zerotop in a browser", "zerotop serve", "zerotop serve brisk-otter --port 0"
    )
    serve.add_argument("session", nargs="?", metavar="SESSION", help="only this recording [the list of all]")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    serve.add_argument("--port", type=int, default=8023, help="port, 0 for any free one [8023]")
    serve.add_argument("--token", help="access token [$ZEROTOP_TOKEN, else a random one]")
    serve.add_argument("--no-browser", action="store_true", help="do not open a browser")


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _build_parser()
    options, unknown = parser.parse_known_args(arguments[:split])
    command = list(arguments[split + 1 :])
    if options.name == "run" and options.first_words:
        command = [*options.first_words, *arguments[split:]]
    if unknown:
        parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
    if options.name == "sessions" and not options.prune and _has_prune_option(options):
        parser.error("--older-than, --total-size, --ended, --dry-run and --yes go with --prune")
    if options.name == "run" and not command:
        parser.error("missing command: zerotop run COMMAND ...")
    if options.name in _TAKES_COMMAND:
        options.command = command
    elif command:
        parser.error(f"{options.name} takes no command after --")
    return options


def _has_prune_option(options: argparse.Namespace) -> bool:
    return (
        options.older_than is not None or options.total_size is not None or options.ended or options.dry_run or options.yes
    )


def _run_command(options: argparse.Namespace) -> int:
    with freeze_imports():
        module = importlib.import_module(f"zerotop.commands.{options.name}")
    return int(getattr(module, options.name)(options))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code: the job's, 0, 1 for a failure, 2 for wrong usage."""
    _escape_output()
    if _COMPLETION_VARIABLE in os.environ:
        from zerotop.commands.options.completion import print_completions

        print_completions(_build_parser())  # ends the program
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = _parse_arguments(arguments) if arguments or not has_terminal() else argparse.Namespace(name="home")
    except SystemExit as end:  # argparse has printed the error or the help
        return end.code if isinstance(end.code, int) else USAGE
    try:
        return _run_command(options)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader is gone. Without this, flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except Exception as error:
        if not _is_expected(error):
            raise
        print(f"zerotop: {escape_unprintable(describe_error(error))}", file=sys.stderr)
        return error.code if isinstance(error, Problem) else FAILED


def _escape_output() -> None:
    """Escape characters that the locale cannot show and undecodable bytes, as in paths and command lines."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _is_expected(error: Exception) -> bool:
    if isinstance(error, (Problem, OSError, MemoryError)):
        return True
    # Looked up rather than imported: if it was raised, it has been imported.
    reader = sys.modules.get("zerotop.session.reader")
    return reader is not None and isinstance(error, reader.SessionError)
