"""Making a session for a command, and unmaking it when the command cannot be started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from zerotop.commands.common.errors import USAGE, Problem
from zerotop_probe.outside.job.agent import AgentError, CommandError, check_command
from zerotop_probe.recording import directory

_LAUNCHERS = ("deepspeed", "torchrun", "accelerate")


def find_launcher(command: Sequence[str]) -> str:
    """The launcher that a command line names, by program or by ``-m`` module; "" if none that is known."""
    words = [os.path.basename(command[0])]
    if "-m" in command[:-1]:
        words.append(command[list(command).index("-m") + 1].split(".")[0])
    if "torch.distributed.run" in command:
        words.append("torchrun")
    return next((word for word in words if word in _LAUNCHERS), "")


@contextmanager
def make_session(command: Sequence[str], path: str | None) -> Iterator[str]:
    """A session directory for ``command``; it is gone again when the command could not be started.

    Raises Problem for a command that cannot be executed or a directory that cannot be made.
    """
    try:
        check_command(command)
    except CommandError as error:
        raise Problem(str(error), USAGE) from error
    existed = path is not None and os.path.isdir(os.path.abspath(path))  # "" is where we are
    session = _create_session(command, path)
    try:
        yield session
    except CommandError as error:
        _discard_session(Path(session), keep_folder=existed)
        raise Problem(str(error), USAGE) from error
    except AgentError as error:
        _discard_session(Path(session), keep_folder=existed)
        raise Problem(str(error)) from error


def _create_session(command: Sequence[str], path: str | None) -> str:
    where = directory.find_default_root() if path is None else path
    try:
        return directory.create_session(command, path=path, launcher=find_launcher(command))
    except FileExistsError as error:
        if error.errno is None:  # it holds something: said by whoever found it
            raise
        raise _make_problem(where, "there is a file in its way") from error
    except OSError as error:
        raise _make_problem(where, str(error.strerror or error)) from error


def _make_problem(where: str, why: str) -> Problem:
    return Problem(f"Nothing was started, for it cannot be recorded in {where}: {why}; name a folder with --session DIR")


def _discard_session(session: Path, *, keep_folder: bool) -> None:
    with suppress(OSError):
        if keep_folder:
            (session / directory.SESSION_FILE).unlink()
        else:
            shutil.rmtree(session)
