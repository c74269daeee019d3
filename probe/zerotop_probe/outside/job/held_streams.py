"""The streams of a job's output in the holder: each is passed on and recorded, in its own thread."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from zerotop_probe.outside.job.output_log import RECORDED, OutputLog
from zerotop_probe.outside.job.terminal_modes import PERIOD_S, TerminalModes

_CHUNK_BYTES = 1 << 18
# After a little output the holder waits, so that a job that prints every word costs few of its cores' time: as long as a job
# that prints this many bytes a second needs to fill the pipe.
_FAST_RATE = 100e6
_TERMINAL_BYTES = 4096
# The size of all pipes of a job that prints faster than it is read: fewer and larger pieces take less time.
_LARGE_PIPE_BYTES = 1 << 20
_LITTLE_BYTES = 4096
FILE_PERIOD_S = 0.05


class Stream:
    """One stream of the job's output, until all writers have closed it or the user's reader has.

    Bytes move from the job's pipe or terminal to a second pipe, are recorded from a copy of that, and move on to the user's
    descriptor. The kernel moves them and the agent keeps the pipes too, so killing the holder loses and repeats none.
    """

    def __init__(self, number: int, name: int, descriptors: Sequence[int], log: OutputLog, state: memoryview[int]) -> None:
        """``name`` is an index into STREAMS; ``descriptors``: source, target, the second pipe's ends to read and write."""
        self.number = number
        self.error = ""
        self.is_over = False
        self._name = name
        self._source, self._target, self._staged, self._stage = descriptors
        self._log = log
        self._state = state
        self._copy, copy_target = os.pipe()
        self._capacity = _resize_pipe(self._copy, _find_pipe_size(self._stage))
        _resize_pipe(self._stage, self._capacity)  # the copy must not be the smaller one
        self._modes = TerminalModes(self._source, self._target) if os.isatty(self._source) else None
        source_size = self._capacity if self._modes is None else _TERMINAL_BYTES
        self._pause_s = source_size / _FAST_RATE
        tee = ctypes.CDLL(None, use_errno=True).tee
        self._tee = partial(tee, self._staged, copy_target, _LARGE_PIPE_BYTES, 0)
        self._busy = False

    def run(self) -> None:
        """Copy until the end."""
        try:
            if self._count_staged():  # by a holder that was killed
                self._pass_on()
            while self._await_output():
                self._busy = True
                size = self._take_output()
                if not size:
                    break
                self._pass_on()
                self._busy = False
                if size < _LITTLE_BYTES:
                    time.sleep(self._pause_s)
                elif self._capacity < 2 * size and self._capacity < _LARGE_PIPE_BYTES:
                    self._enlarge_pipes()
        except BrokenPipeError:
            pass
        except OSError as error:
            self.error = error.strerror or str(error)
        finally:
            self._close()

    def _enlarge_pipes(self) -> None:
        self._capacity = _resize_pipe(self._copy, _LARGE_PIPE_BYTES)
        for pipe in (self._stage, self._source, self._target):
            if 0 < _find_pipe_size(pipe) < self._capacity:
                _resize_pipe(pipe, self._capacity)

    def _await_output(self) -> bool:
        """Wait for output; return False when the user's reader has closed, since the job then gets SIGPIPE at once."""
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        waiting.register(self._target, 0)
        while not (ready := waiting.poll(None if self._modes is None else 1000 * PERIOD_S)):
            self._copy_modes()
        self._copy_modes()  # before the output that was written with them
        return not any(descriptor == self._target for descriptor, _ in ready)

    def renew_modes(self) -> None:
        """Set the modes of the user's terminal again, if it is one, after the job was stopped."""
        if self._modes is not None:
            self._modes.renew()

    def _copy_modes(self) -> None:
        if self._modes is not None:
            self._modes.copy_changes()

    def _take_output(self) -> int:
        """Move some output to the second pipe; return its bytes, 0 at the end."""
        self._state[RECORDED + self.number] = 0
        try:
            return os.splice(self._source, self._stage, self._capacity)
        except OSError as error:
            if error.errno == errno.EIO:  # a terminal whose other side was closed
                return 0
            if error.errno != errno.EINVAL:
                raise
        return os.write(self._stage, os.read(self._source, select.PIPE_BUF))  # a terminal in some kernels

    def _count_staged(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._staged, termios.FIONREAD, bytes(4)), sys.byteorder)

    def _pass_on(self) -> None:
        """Record the content of the second pipe and pass it on. Raises OSError if that is impossible."""
        if not self._state[RECORDED + self.number]:
            size = self._tee()
            if size < 0:
                raise OSError(ctypes.get_errno(), "the output cannot be copied")
            self._log.append_from(self._name, self._copy, size)
            self._state[RECORDED + self.number] = 1
        while size := self._count_staged():
            try:
                os.splice(self._staged, self._target, size)
            except BlockingIOError:  # another program that shares the terminal or pipe has made it non-blocking
                self._await_room()
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._write(os.read(self._staged, size))  # to a terminal in some kernels

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:
                self._await_room()

    def _await_room(self) -> None:
        waiting = select.poll()
        waiting.register(self._target, select.POLLOUT)
        waiting.poll()

    def _close(self) -> None:
        for descriptor in (self._source, self._target):
            os.close(descriptor)
        self.is_over = True

    def has_passed_all(self) -> bool:
        """Whether all output has been passed on."""
        if self.is_over:
            return True
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        # In this order: output that was just taken has made the stream busy before.
        return not waiting.poll(0) and not self._busy


class FileStream:
    """A file on disk that the job writes to: data added to it is recorded."""

    def __init__(self, number: int, name: int, source: int, begin: int, log: OutputLog, state: memoryview[int]) -> None:
        """``begin``: the offset at which the job begins to write."""
        self.number = number
        self.error = ""
        self.is_over = False
        self._name = name
        self._source = source
        self._state = state
        # An earlier holder has left the position, plus one as 0 stands for none.
        self._position = max(begin, state[RECORDED + number] - 1)
        self._log = log
        self._finishing = threading.Event()

    def run(self) -> None:
        """Record until :meth:`finish` was called."""
        while not self._finishing.wait(FILE_PERIOD_S):
            self._record_new()
        self._record_new()
        self.is_over = True

    def _record_new(self) -> None:
        with suppress(OSError):
            self._position = min(self._position, os.fstat(self._source).st_size)  # it may have been truncated
            while data := os.pread(self._source, _CHUNK_BYTES, self._position):
                self._position += len(data)
                self._log.append(self._name, data)
                self._state[RECORDED + self.number] = self._position + 1

    def finish(self) -> None:
        """Record the rest of the file, then end."""
        self._finishing.set()

    def has_passed_all(self) -> bool:
        """Whether all is recorded, after :meth:`finish`."""
        return self.is_over


def _find_pipe_size(descriptor: int) -> int:
    """Return the size of a pipe in bytes; 0 if it is not a pipe."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    except OSError:
        return 0


def _resize_pipe(pipe: int, size: int) -> int:
    """Resize a pipe as far as the user's limits allow; return its size."""
    with suppress(OSError):
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
    return _find_pipe_size(pipe)
