"""Creating the session of a command, and removing it if the command cannot be started."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop_probe.outside.job.agent import AgentError, CommandError, check_command
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.recording import directory

# As shells, env and timeout have it.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


@contextmanager
def make_session(command: Sequence[str], path: str | None, **facts: Any) -> Iterator[str]:
    """Create a session directory for ``command`` and remove it again if the command cannot be started.

    ``facts`` become part of the session file, see ``directory.create_session``. Raises Problem for a command that cannot be
    executed or a directory that cannot be created.
    """
    try:
        check_command(command)
    except CommandError as error:
        raise _describe_command_error(error) from error
    existed = path is not None and os.path.isdir(os.path.abspath(path))  # "" is the current folder
    session = _create_session(command, path, facts)
    try:
        yield session
    except CommandError as error:
        _discard_session(Path(session), keep_folder=existed)
        raise _describe_command_error(error) from error
    except AgentError as error:
        _discard_session(Path(session), keep_folder=existed)
        raise Problem(str(error)) from error


def _describe_command_error(error: CommandError) -> Problem:
    codes = {errno.ENOENT: _NOT_FOUND, errno.EINVAL: USAGE}
    return Problem(str(error), codes.get(error.errno or 0, _NOT_EXECUTABLE))


def _create_session(command: Sequence[str], path: str | None, facts: dict[str, Any]) -> str:
    folder = directory.find_default_root() if path is None else path
    try:
        return directory.create_session(command, path=path, launcher=find_launcher(command), **facts)
    except OSError as error:
        if error.errno is None:  # the folder is not empty or another user's; the error says so
            raise
        reason = "a file of that name is in the way" if isinstance(error, FileExistsError) else str(error.strerror)
        raise _make_problem(folder, reason) from error


def _make_problem(folder: str, reason: str) -> Problem:
    return Problem(f"Not started: cannot record to {folder}: {reason}. Choose another folder with --session DIR")


def _discard_session(session: Path, *, keep_folder: bool) -> None:
    with suppress(OSError):
        if keep_folder:
            (session / directory.SESSION_FILE).unlink()
        else:
            shutil.rmtree(session)
