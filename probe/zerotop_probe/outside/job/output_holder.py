"""The holder, a process that reads the job's output, passes it on and records it, as ``tee`` does.

The job writes to a pipe or pseudo-terminal, as it would without zerotop. Its reader must not die with a viewer or sampler,
so it is this small process, which imports little and ignores all signals but SIGKILL. Where the user's descriptor is a file
on disk, the job writes to that file itself and the holder records what is added to it.

Arguments: a socket to the agent, a file with numbers that survive the holder (see ``output_log``), the session's directory,
the stem of the output files, the header of an index, the limit in bytes, 1 to redact the recorded output or 0, and the
streams as ``outlets.Outlet`` describes them, empty for those that have ended.

Messages from the agent: ``signal N``, answered by ``signal N 1`` if this process has also received signal N, else by
``signal N 0``; ``job PID START``; ``finish``, answered by ``finished`` once all output so far is passed on. Messages to the
agent: ``ready``; ``ended I ERROR`` when stream I has ended.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import signal
import stat
import sys
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from zerotop_probe.outside.job.output_log import RECORDED, STATE_BYTES, OutputLog

_CHUNK_BYTES = 1 << 18
# After a little output the holder waits, so that a job that prints every word costs few of its cores' time: as long as a job
# that prints this many bytes a second needs to fill the pipe.
_FAST_RATE = 100e6
_TERMINAL_BYTES = 4096
_LITTLE_BYTES = 4096
_FILE_PERIOD_S = 0.05


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
        capacity = fcntl.fcntl(copy_target, fcntl.F_SETPIPE_SZ, fcntl.fcntl(self._stage, fcntl.F_GETPIPE_SZ))
        self._pause_s = (capacity if stat.S_ISFIFO(os.fstat(self._source).st_mode) else _TERMINAL_BYTES) / _FAST_RATE
        tee = ctypes.CDLL(None, use_errno=True).tee
        self._tee = partial(tee, self._staged, copy_target, capacity, 0)
        self._capacity = capacity
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
        except BrokenPipeError:
            pass
        except OSError as error:
            self.error = error.strerror or str(error)
        finally:
            self._close()

    def _await_output(self) -> bool:
        """Wait for output; return False when the user's reader has closed, since the job then gets SIGPIPE at once."""
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        waiting.register(self._target, 0)
        return not any(descriptor == self._target for descriptor, _ in waiting.poll())

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
        """Record what is in the second pipe and pass it on. Raises OSError if that is impossible."""
        if not self._state[RECORDED + self.number]:
            size = self._tee()
            if size < 0:
                raise OSError(ctypes.get_errno(), "the output cannot be copied")
            self._log.append(self._name, os.read(self._copy, size))
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
        """Whether there is no output that is not passed on yet."""
        if self.is_over:
            return True
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        # In this order: output that was just taken has made the stream busy before.
        return not waiting.poll(0) and not self._busy


class FileStream:
    """A file on disk that the job writes to: what is added to it is recorded."""

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
        while not self._finishing.wait(_FILE_PERIOD_S):
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
        """Record what is left, then end."""
        self._finishing.set()

    def has_passed_all(self) -> bool:
        """Whether all is recorded, after :meth:`finish`."""
        return self.is_over


class Holder:
    """The holder of one job's output."""

    def __init__(self, agent: int, streams: list[Stream | FileStream], log: OutputLog) -> None:
        self._agent = agent
        self._streams = streams
        self._log = log
        self._job = (0, b"")

    def run(self) -> None:
        """Copy the output, answer the agent; end with the output once there is no agent."""
        for stream in self._streams:
            threading.Thread(target=self._run_stream, args=(stream,), daemon=True).start()
        self._send(b"ready")
        while message := self._receive():
            word, _, rest = message.partition(b" ")
            if word == b"signal":
                self._send(b"signal %s %d" % (rest, _take_signal(int(rest))))
            elif word == b"job":
                pid, start = rest.split()
                self._job = int(pid), start
            elif word == b"finish":
                self._finish()
                self._send(b"finished")
        self._await_end()

    def _run_stream(self, stream: Stream) -> None:
        stream.run()
        self._send(b"ended %d %s" % (stream.number, stream.error.encode()))

    def _receive(self) -> bytes:
        try:
            return os.read(self._agent, 256)
        except OSError:
            return b""

    def _send(self, message: bytes) -> None:
        with suppress(OSError):
            os.write(self._agent, message)

    def _finish(self) -> None:
        for stream in self._streams:
            if isinstance(stream, FileStream):
                stream.finish()
        quiet = 0
        while quiet < 2:  # a terminal hands output over with a delay
            quiet = quiet + 1 if all(stream.has_passed_all() for stream in self._streams) else 0
            if quiet < 2 and not all(stream.is_over for stream in self._streams):
                time.sleep(0.005)
        self._log.flush()

    def _await_end(self) -> None:
        """Wait for the end of all streams. The agent is gone; if it was killed the job may still run."""
        while not all(stream.is_over for stream in self._streams):
            if not self._is_job_alive():
                for stream in self._streams:
                    if isinstance(stream, FileStream):
                        stream.finish()
            time.sleep(_FILE_PERIOD_S)
        self._log.flush()

    def _is_job_alive(self) -> bool:
        pid, start = self._job
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return fields[19] == start and fields[0] not in b"ZX"
        except (OSError, IndexError):
            return False


def _take_signal(number: int) -> bool:
    """Return whether this process has received a signal since the last call. All signals are blocked, so it is pending."""
    return signal.sigtimedwait([number], 0) is not None


def _close_others(used: set[int]) -> None:
    """Close what the caller of zerotop has passed on to the job: its other end waits for the job to close it."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in used:
            with suppress(OSError):
                os.close(int(name))


def main() -> None:
    """Run as the holder."""
    agent, state_file, folder, stem, header, limit, redaction, *texts = sys.argv[1:]
    _close_others({int(agent), int(state_file), *(int(number) for text in texts for number in text.split(":")[2:])})
    state = memoryview(mmap.mmap(int(state_file), STATE_BYTES)).cast("q")
    log_class = OutputLog
    if int(redaction):
        from zerotop_probe.outside.job.redacted_log import RedactedLog  # takes as long to import as all else here

        log_class = RedactedLog
    log = log_class(folder, stem, header.encode(), int(limit), state)
    streams: list[Stream | FileStream] = []
    for number, text in enumerate(texts):
        if text:
            name, begin, *descriptors = map(int, text.split(":"))
            streams.append(
                FileStream(number, name, descriptors[0], begin, log, state)
                if len(descriptors) == 1
                else Stream(number, name, descriptors, log, state)
            )
    os.chdir("/")
    Holder(int(agent), streams, log).run()
