"""Creating the recording of a command, and removing it if the command cannot be started."""

from __future__ import annotations

import difflib
import errno
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.exit_messages import write_messages
from zerotop_probe.outside.causes import describe_cause
from zerotop_probe.outside.job.agent import AgentError, CommandError, check_command
from zerotop_probe.outside.job.job import make_command_error
from zerotop_probe.outside.job.job_signals import PYTHON_IGNORES
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.recording import directory
from zerotop_probe.recording.launchers import LAUNCHERS

# As shells, env and timeout have it.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_PROGRAMS = ("python", "python3", *(name for one in LAUNCHERS for name in one.programs if "." not in name))
# A recording in a temporary folder takes this share of what is free there, if at least so many bytes are.
_SHARE_OF_ROOM = 0.1
_LEAST_ROOM = 2 * directory.MIN_BYTES


class NotRecorded(Problem):
    """Nothing can be recorded, and nothing was started. The text says why; ``advice`` is a sentence or empty."""

    advice = ""


@contextmanager
def make_recording(command: Sequence[str], path: str | None, *, elsewhere: bool = False, **facts: Any) -> Iterator[str]:
    """Create a recording folder for ``command`` and remove it again if the command cannot be started.

    ``elsewhere``: in a temporary folder if it cannot be created, with a message. ``facts`` become part of ``session.json``,
    see ``directory.create_recording``. Raises Problem for a command that cannot be executed, NotRecorded without
    a place for a recording, or the agent cannot be started.
    """
    try:
        check_command(command)
    except CommandError as error:
        raise _describe_command_error(error, command) from error
    existed = path is not None and os.path.isdir(os.path.abspath(path))  # "" is the current folder
    try:
        recording = _create_recording(command, path, facts)
    except NotRecorded as error:
        recording, existed = _create_elsewhere(command, facts, error) if elsewhere else "", False
        if not recording:
            raise
    try:
        yield recording
    except CommandError as error:
        _discard_recording(Path(recording), keep_folder=existed)
        raise _describe_command_error(error) from error
    except AgentError as error:
        _discard_recording(Path(recording), keep_folder=existed)
        raise NotRecorded(str(error)) from error


def run_unrecorded(command: Sequence[str], why: NotRecorded) -> None:
    """Become the job, after a message. Raises Problem if the command cannot be executed."""
    write_messages(f"{why}. The job runs without zerotop, and nothing is recorded")
    become_job(command)


def become_job(command: Sequence[str]) -> None:
    """Become the job. Raises Problem if the command cannot be executed."""
    for number in PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise _describe_command_error(make_command_error(command[0], error)) from error


def _describe_command_error(error: CommandError, command: Sequence[str] = ()) -> Problem:
    codes = {errno.ENOENT: _NOT_FOUND, errno.EINVAL: USAGE}
    text = str(error)
    if error.errno == errno.ENOENT and command and (likely := find_likely_command(command)):
        text += f". Did you mean: zerotop run -- {shlex.join(likely)}?"
    return Problem(text, codes.get(error.errno or 0, _NOT_EXECUTABLE))


def find_likely_command(command: Sequence[str]) -> list[str]:
    """Return the command that was probably meant: a script needs its Python, and a launcher's name may be misspelt."""
    if command[0].endswith(".py"):
        return ["python", *command]
    return [*likely, *command[1:]] if (likely := difflib.get_close_matches(command[0], _PROGRAMS, 1, 0.75)) else []


def _create_recording(command: Sequence[str], path: str | None, facts: dict[str, Any]) -> str:
    folder = directory.find_default_root() if path is None else os.path.abspath(path)
    try:
        return directory.create_recording(command, path=path, launcher=find_launcher(command), **facts)
    except OSError as error:
        reason = "a file of that name is in the way" if isinstance(error, FileExistsError) else describe_cause(error)
        if error.errno is None:  # the folder is not empty or another user's; the error says so
            reason = str(error)
        problem = NotRecorded(f"Cannot record to {folder}: {reason}")
        problem.advice = "Choose another folder with --recording DIR"
        raise problem from error


def _create_elsewhere(command: Sequence[str], facts: dict[str, Any], why: NotRecorded) -> str:
    """Create the recording in a temporary folder, after a message; return "" if that is impossible, too."""
    for root in dict.fromkeys((os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp", "/dev/shm")):
        with suppress(OSError, NotRecorded):
            free = shutil.disk_usage(root).free
            if free < _LEAST_ROOM:
                continue
            # It may be memory, which the job needs.
            limit = min(facts.get("max_bytes") or directory.MAX_BYTES, max(directory.MIN_BYTES, int(free * _SHARE_OF_ROOM)))
            folder = tempfile.mkdtemp(prefix=f"zerotop-{directory.find_script_name(command)}-", dir=root)
            try:
                recording = _create_recording(command, folder, {**facts, "max_bytes": limit, directory.ELSEWHERE: str(why)})
            except NotRecorded:
                os.rmdir(folder)
                raise
            write_messages(f"{why}. Recording to {recording} instead")
            return recording
    return ""


def _discard_recording(recording: Path, *, keep_folder: bool) -> None:
    """Remove the recording; one without records needs no file descriptor for it: there may be none left."""
    with suppress(OSError):
        (recording / directory.SESSION_FILE).unlink()
        if not keep_folder:
            try:
                recording.rmdir()
            except OSError:
                shutil.rmtree(recording)
