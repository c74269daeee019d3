"""Starting a job's command and describing how it ended."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import zerotop_probe
from zerotop_probe.outside.procfs import ProcessHandle, read_stat
from zerotop_probe.recording.directory import SESSION_VARIABLE

# Python ignores these two signals; in the job they get their default action back, as from a shell.
_IGNORED_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ)


class JobResult(NamedTuple):
    """The end of a job, and the missing parts of its recording."""

    exit_code: int | None  # 128 + n after signal n; None if unknown
    signal: int  # the signal that ended it; 0 without one
    text: str  # one sentence
    lost_records: int  # records of this node's sampler that could not be written
    lost_output_bytes: int  # bytes of the job's output that could not be recorded
    echo_error: str  # why passing its output through failed; "" if it did not, or if the reader closed the pipe
    left_ranks: int = 0  # ranks that still run


class CommandError(OSError):
    """The command cannot be executed; the text is a sentence with the reason and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


def check_command(command: Sequence[str]) -> None:
    """Raise CommandError if ``command`` evidently cannot be executed, without starting anything."""
    if not command or not command[0]:
        raise CommandError(errno.EINVAL, "There is no command to run: give it after --")
    if shutil.which(command[0]) is None:
        raise _make_error(command[0], _find_errno(command[0]))


def _find_errno(program: str) -> int:
    if "/" in program and os.path.exists(program):
        return errno.EISDIR if os.path.isdir(program) else errno.EACCES
    return errno.ENOENT


def make_command_error(program: str, error: OSError | ValueError) -> CommandError:
    """Return what an attempt to execute a program has raised as a sentence."""
    return _make_error(program, getattr(error, "errno", None) or errno.EINVAL)


def _make_error(program: str, number: int) -> CommandError:
    sentences = {
        errno.ENOENT: f"There is no command {program!r}" + ("" if "/" in program else " on the PATH"),
        errno.EISDIR: f"{program!r} is a directory, not a command",
        errno.EACCES: f"{program!r} is not executable: run it as python {program}, or chmod +x it",
        errno.ENOEXEC: f"{program!r} is neither a program nor a script that begins with #!",
        errno.E2BIG: "The command line and environment are too long for this system",
    }
    otherwise = f"{program!r} cannot be executed: {os.strerror(number)}"
    return CommandError(number, sentences.get(number, otherwise))


def build_environment(recording: str, base: Mapping[str, str], *, unbuffered: bool) -> dict[str, str]:
    """Return the job's environment: ``base`` with the recording's directory and the probe's bootstrap folder added.

    ``unbuffered``: Python prints every line at once, as it does on a terminal, although its output is a pipe.
    """
    bootstrap = os.path.join(os.path.dirname(os.path.abspath(zerotop_probe.__file__)), "bootstrap")
    path = base.get("PYTHONPATH")
    return {
        **({"PYTHONUNBUFFERED": "1"} if unbuffered else {}),
        **{name: value for name, value in base.items() if name},  # Python cannot pass on one without a name
        SESSION_VARIABLE: recording,
        "PYTHONPATH": f"{bootstrap}{os.pathsep}{path}" if path else bootstrap,
    }


def spawn_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    writers: Sequence[int | None],
    signal_mask: Collection[int],
    own_session: bool,
) -> ChildJob:
    """Start ``command`` with two descriptors as its output, None for a closed one, and ``signal_mask`` as its signal mask.

    With ``own_session`` it gets its own session and process group. posix_spawn reports at once whether the command could be
    executed. Raises CommandError if not.
    """
    actions = [(os.POSIX_SPAWN_DUP2, writer, number) for number, writer in enumerate(writers, 1) if writer is not None]
    check_command(command)
    try:
        pid = os.posix_spawnp(
            command[0],
            list(command),
            dict(environ),
            file_actions=actions,
            setsigmask=signal_mask,
            setsigdef=_IGNORED_SIGNALS,
            setsid=own_session,
        )
    except (OSError, ValueError) as error:  # ValueError: a null byte in an argument
        raise make_command_error(command[0], error) from error
    stat = read_stat(pid)
    return ChildJob(ProcessHandle(pid, stat.start if stat else 0))


class ChildJob:
    """A job that this process started, so its exit status will be known."""

    def __init__(self, root: ProcessHandle) -> None:
        self.root = root
        self._status: int | None = None
        self._stop_signal = 0

    def has_ended(self) -> bool:
        """Whether the root process has ended. Reap it if so."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.root.pid, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:  # another part of this process has waited for it
                return not self.root.is_alive()
            if pid and os.WIFSTOPPED(status):
                self._stop_signal = os.WSTOPSIG(status)
            elif pid:
                self._status = status
        return self._status is not None

    def take_stop_signal(self) -> int:
        """Return the signal that has stopped the root process since the last call; 0 without one."""
        number, self._stop_signal = self._stop_signal, 0
        return number

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negated signal number; None while it runs or if unknown."""
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)


class WatchedJob:
    """A job that another process started: its exit status is unknown."""

    returncode: int | None = None

    def __init__(self, root: ProcessHandle) -> None:
        self.root = root

    def has_ended(self) -> bool:
        """Whether the root process has ended."""
        return not self.root.is_alive()

    def take_stop_signal(self) -> int:
        """Return 0: only a parent learns which signal has stopped a process."""
        return 0


Job = ChildJob | WatchedJob


def compute_exit_code(returncode: int) -> int:
    """Return the exit code as a shell reports it: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode


def find_signal_name(returncode: int | None) -> str | None:
    """Return for example "SIGKILL"; None if no signal ended the job."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def describe_end(returncode: int | None, oom_kills: int, where: str, *, stop_requested: bool) -> str:
    """Return one sentence about how the job ended.

    ``oom_kills`` is the number of processes of ``where`` that the kernel's OOM killer ended.
    """
    text = _describe_returncode(returncode)
    if stop_requested:
        text += ", after it had been asked to stop"
    if returncode is None:
        text += "; its exit code is not known, as this sampler did not start it"
    if oom_kills > 0:
        processes = "1 process" if oom_kills == 1 else f"{oom_kills} processes"
        text += f"; the kernel's OOM killer ended {processes} of {where}"
    return text + "."


def _describe_returncode(returncode: int | None) -> str:
    name = find_signal_name(returncode)
    if returncode is None:
        return "The job has ended"
    if name is not None:
        return f"The job was killed by signal {-returncode} ({name})"
    if returncode == 0:
        return "The job ended with exit code 0"
    inner = find_signal_name(128 - returncode) if returncode > 128 else None
    hint = f", as after {inner}" if inner and inner.startswith("SIG") else ""
    return f"The job failed with exit code {returncode}{hint}"
