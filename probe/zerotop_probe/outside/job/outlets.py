"""The targets of the job's output: pipes and pseudo-terminals, instead of the user's descriptors, read by the holder."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording.tables import STREAMS

# Kinds of outlets: a pipe, a pseudo-terminal, or a file that the job itself writes to.
PIPE, TERMINAL, FILE = "pipe", "terminal", "file"
# A slow reader stops the job after two of these and its own pipe.
_PIPE_BYTES = 1 << 18
_OUTPUT_FLAGS = 1  # the position in what tcgetattr returns


@dataclass
class Outlet:
    """One stream of the job's output, as an object of the agent.

    The agent keeps ``source`` and ``target`` until the stream has ended, so that a holder that was killed can be replaced.
    """

    name: str
    kind: str
    source: int  # the read end, the master, or the file opened for reading
    writer: int  # the job's descriptor; our own copy is closed once the job has it
    target: int  # the user's descriptor
    begin: int = 0  # of a file: the offset at which the job begins to write
    stage: tuple[int, ...] = ()  # a pipe, to be read and written by the holder; none for a file

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the holder uses."""
        return [self.source] if self.kind == FILE else [self.source, self.target, *self.stage]

    def describe(self) -> str:
        """Return the argument for the holder: ``name:begin:descriptors``, the name as index into STREAMS."""
        return ":".join(map(str, (STREAMS.index(self.name), self.begin, *self.descriptors)))

    def copy_window_size(self) -> bool:
        """Give the job's terminal the size of the user's; return whether it has changed."""
        if self.kind != TERMINAL:
            return False
        with suppress(OSError):
            size, before = (fcntl.ioctl(number, termios.TIOCGWINSZ, bytes(8)) for number in (self.target, self.source))
            if size != before:
                fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)
                return True
        return False

    def count_waiting(self) -> int:
        """Return the bytes that are not passed on yet; 0 for a file, and for a terminal, which may be paused."""
        return sum(_count_readable(number) for number in (self.source, self.stage[0])) if self.kind == PIPE else 0

    def close_writer(self) -> None:
        """Close our copy of the job's descriptor, or else the stream never ends."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close_reader(self) -> None:
        """Close all descriptors but the job's."""
        for number in (self.source, self.target, *self.stage):
            os.close(number)


def open_outlets(closed: Sequence[int] = ()) -> tuple[list[Outlet], list[int | None]]:
    """Return outlets for our standard output and error, and the job's descriptors (None: it stays closed).

    ``closed``: those that were closed when we were started. If both are the same file, terminal or pipe, they share one
    outlet, so that their order is kept. Raises OSError.
    """
    kinds = ["" if number in closed else _find_kind(number) for number in (1, 2)]
    if kinds[0] and kinds[1] and _is_same_file(1, 2):
        outlet = _open_outlet("output", kinds[0], 1)
        # Of one file opened twice, each descriptor has its own offset.
        return [outlet], [outlet.writer, 2 if outlet.kind == FILE else outlet.writer]
    outlets: list[Outlet] = []
    writers: list[int | None] = []
    for number, kind in enumerate(kinds, 1):
        if kind:
            outlets.append(_open_outlet(STREAMS[number], kind, number))
        writers.append(outlets[-1].writer if kind else None)
    return outlets, writers


def leave_outputs(closed: Sequence[int]) -> tuple[list[Outlet], list[int | None]]:
    """Return no outlets, and our own standard output and error for the job."""
    return [], [None if number in closed else number for number in (1, 2)]


def open_background_outlet() -> Outlet:
    """Return an outlet for a job in the background, whose output is only recorded. Raises OSError."""
    return Outlet("output", PIPE, *_open_pipe(), _open_null(), stage=_open_pipe())


def adopt_outlets(root: ProcessHandle, pipes: dict[str, str]) -> list[Outlet]:
    """Return outlets for the pipes that a running job still writes to; ``pipes`` are their names by stream."""
    outlets = []
    for name, number in (("output", 1), ("stdout", 1), ("stderr", 2)):
        path = f"/proc/{root.pid}/fd/{number}"
        with suppress(OSError):
            if pipes.get(name) == os.readlink(path):
                source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                outlets.append(Outlet(name, PIPE, source, -1, _open_null(), stage=_open_pipe()))
    return outlets


def fill_standard_descriptors(closed: list[int]) -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that our caller has closed, and add those to ``closed``.

    Otherwise the first files that we open would take these numbers. Raises OSError.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        closed.append(descriptor)
    os.close(descriptor)


def release_standard_descriptors(passed_on: Iterable[int]) -> None:
    """Replace our standard input and output by /dev/null, and close other descriptors that were meant for the job.

    Their other ends then see it when the job closes them. Standard error stays open for messages.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0, inheritable=False)
    os.dup2(null, 1, inheritable=False)
    for number in (null, *passed_on):
        os.close(number)


def _find_kind(number: int) -> str:
    if os.isatty(number):
        return TERMINAL
    return FILE if stat.S_ISREG(os.fstat(number).st_mode) else PIPE


def _open_outlet(name: str, kind: str, number: int) -> Outlet:
    target = os.dup(number)
    if kind == TERMINAL:
        return _open_terminal(name, target)
    if kind == FILE:
        with suppress(OSError):  # it may not be readable
            source = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            is_appending = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_APPEND
            begin = os.lseek(source, 0, os.SEEK_END) if is_appending else os.lseek(number, 0, os.SEEK_CUR)
            return Outlet(name, FILE, source, os.dup(number), target, begin)
    return Outlet(name, PIPE, *_open_pipe(), target, stage=_open_pipe())


def _open_null() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _open_pipe() -> tuple[int, int]:
    """Return (read end, write end) of a pipe that is as large as the user's limits allow, at most 256 KiB."""
    source, writer = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return source, writer


def _open_terminal(name: str, target: int) -> Outlet:
    """Return a pseudo-terminal that passes bytes on as they are; the user's terminal processes them."""
    source, writer = os.openpty()
    settings = termios.tcgetattr(target)
    settings[_OUTPUT_FLAGS] &= ~termios.OPOST
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    outlet = Outlet(name, TERMINAL, source, writer, target, stage=_open_pipe())
    outlet.copy_window_size()
    return outlet


def _count_readable(number: int) -> int:
    return int.from_bytes(fcntl.ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)


def _is_same_file(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
