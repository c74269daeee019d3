"""The command line: its commands and options, and what becomes of errors. Imports only what the command needs."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any

from zerotop import find_version
from zerotop.commands.common.errors import (
    FAILED,
    INTERRUPTED,
    USAGE,
    Problem,
    describe_error,
    is_missing_package,
    suggest_name,
)
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.options.common_options import JSON_HELP, name_recordings_folder
from zerotop.commands.options.job_options import add_job_commands
from zerotop.commands.options.recording_options import add_recording_commands
from zerotop.commands.options.report_options import add_report_commands
from zerotop.commands.options.sweep_options import add_sweep_commands

_COMPLETION_VARIABLE = "_ARGCOMPLETE"  # set by the script of ``zerotop completions``
_TAKES_COMMAND = ("run", "sweep", "fit", "estimate")
# What other tools call the same.
_COMMANDS_BY_OTHER_NAME = {
    **dict.fromkeys(("summary", "summarize", "analyze", "explain", "diagnose"), "findings"),
    **dict.fromkeys(("show", "view", "open", "play"), "replay"),
    **dict.fromkeys(("list", "ls"), "recordings"),
    **dict.fromkeys(("delete", "rm", "prune"), "recordings --prune"),
    **dict.fromkeys(("start", "launch", "exec", "record"), "run"),
    **dict.fromkeys(("watch", "monitor", "top"), "attach"),
    "diff": "compare",
}
_NEGATIVE = re.compile(r"-\.?\d")  # Python 3.14 reads values this way: before it, -1GB and -5:10 were options

_EPILOG = """
With no COMMAND, opens the recordings list. RECORDING is a name from `zerotop recordings`, its start, or a path. Defaults
are in [brackets]. `zerotop COMMAND --help` describes a command.

Recordings are in {folder}; XDG_STATE_HOME moves them.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerotop",
        description="Watch, explain, replay and export DeepSpeed and PyTorch training from the terminal.",
        epilog=_EPILOG.format(folder=name_recordings_folder()),
    )
    parser.add_argument("--version", action=_VersionAction, help="show the version and exit")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND")
    add_command = partial(_add_command, commands)
    add_job_commands(add_command)
    add_recording_commands(add_command)
    add_report_commands(add_command)
    add_sweep_commands(add_command)
    completions = add_command(
        "completions",
        "print a script that completes commands and recordings",
        "zerotop completions fish > ~/.config/fish/completions/zerotop.fish",
        'eval "$(zerotop completions bash)"',
    )
    completions.add_argument("shell", choices=("bash", "zsh", "fish"), help="for its startup file")
    doctor = add_command("doctor", "check this machine's setup", "zerotop doctor", "zerotop doctor --measure")
    doctor.add_argument(
        "--measure", action="store_true", help="measure its speeds and fixed memory in 20 s, and keep them for estimates"
    )
    doctor.add_argument("--json", action="store_true", help=JSON_HELP)
    return parser


class _VersionAction(argparse.Action):
    """Prints the version, which is looked up only on request."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        print(f"zerotop {find_version()}")
        parser.exit()


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, *examples: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a command; ``summary`` is its entry in the list of commands and the first sentence of its help."""
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join(("examples:", *(f"  {example}" for example in examples))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    command._negative_number_matcher = _NEGATIVE
    command.set_defaults(fail=command.error)
    return command


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = build_parser()
    if arguments[:split] and not arguments[0].startswith("-"):
        _check_name(parser, arguments[0])
    _check_options(parser, arguments[:split])
    options, unknown = parser.parse_known_args(arguments[:split])
    command = list(arguments[split + 1 :])
    if options.name is None:  # without any argument the list opens, but only in a terminal
        parser.error(_describe_unknown(parser, unknown) if unknown else "missing COMMAND")
    if options.name == "run" and options.first_words:
        command = [*options.first_words, *arguments[split:]]
    if unknown:
        text = _describe_unknown(_list_commands(parser)[options.name], unknown)
        is_job = options.name in _TAKES_COMMAND and any(not word.startswith("-") for word in unknown)
        options.fail(f"{text}. The job's command goes after --, as in the examples of --help" if is_job else text)
    if options.name == "recordings" and not options.prune and _has_prune_option(options):
        options.fail("--older-than, --total-size, --ended, --dry-run and --yes go with --prune")
    if options.name == "run" and not command:
        options.fail("missing COMMAND: zerotop run COMMAND ...")
    if options.name in _TAKES_COMMAND:
        options.command = command
    elif command:
        options.fail(f"{options.name} takes no command after --")
    return options


def _list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def _describe_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Describe arguments that a command does not take, with the option that was probably meant."""
    wrong = next((one.partition("=")[0] for one in unknown if one.startswith("-")), "")
    known = [name for action in parser._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
    meant = suggest_name(wrong, known) if wrong else ""
    return f"unrecognized arguments: {shlex.join(unknown)}{meant}"


def _check_name(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuse an unknown command with the nearest one; argparse would list all."""
    if name not in (commands := _list_commands(parser)):
        known = _COMMANDS_BY_OTHER_NAME.get(name)
        likely = [known] if known else difflib.get_close_matches(name, commands, 1)
        script = f"run -- python {name}" if name.endswith(".py") else ""
        meant = f"Did you mean: zerotop {(likely or [script])[0]}?" if likely or script else "All are in zerotop --help."
        parser.error(f"there is no command {escape_unprintable(name)!r}. {meant}")


def _check_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Refuse an unknown option before the command; argparse would take its value for the command."""
    options = takewhile(lambda one: one.startswith("-"), arguments)
    unknown = [one for one in options if not any(known.startswith(one) for known in parser._option_string_actions)]
    if unknown:
        parser.error(_describe_unknown(parser, unknown))


def _has_prune_option(options: argparse.Namespace) -> bool:
    return (
        options.older_than is not None or options.total_size is not None or options.ended or options.dry_run or options.yes
    )


def _run_command(options: argparse.Namespace) -> int:
    name = options.name.replace("-", "_")
    with freeze_imports():
        module = importlib.import_module(f"zerotop.commands.{name}")
    return int(getattr(module, name)(options))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code: the job's, 0, 1 for a failure, 2 for wrong usage."""
    _escape_output()
    if _COMPLETION_VARIABLE in os.environ:
        from zerotop.commands.options.completion import print_completions

        print_completions(build_parser())  # ends the program
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = parse_arguments(arguments) if arguments or not has_terminal() else argparse.Namespace(name="home")
    except SystemExit as end:  # argparse has printed the error or the help
        return end.code if isinstance(end.code, int) else USAGE
    try:
        code = _run_command(options)
        if sys.stdout is not None:  # it is None where the caller has closed it
            sys.stdout.flush()  # here, where a reader that is gone is no error
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
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
    # An isolated Python does not look at the user's choice.
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0] if sys.flags.isolated else ""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if encoding:
                with suppress(LookupError):
                    stream.reconfigure(encoding=encoding)
            if stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")


def _is_expected(error: Exception) -> bool:
    if isinstance(error, (Problem, OSError, MemoryError)) or is_missing_package(error):
        return True
    # Looked up rather than imported: if it was raised, it has been imported.
    reader = sys.modules.get("zerotop.recording.reader")
    return reader is not None and isinstance(error, reader.RecordingError)
