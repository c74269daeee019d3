"""Passing the job's output through, byte for byte, in the foreground."""

from __future__ import annotations

import os
import select
import threading

from zerotop_probe.outside.job.stream import Stream

# The longest delay of the output, in seconds.
_PERIOD_S = 0.02
_CHUNK_BYTES = 1 << 16


class Echo(threading.Thread):
    """Copies one stream to one of our descriptors.

    It is a thread because a paused terminal or a slow pipe blocks the write, while sampling and recording must continue. A
    closed reader ends the echo, not the job.
    """

    def __init__(self, stream: Stream, descriptor: int) -> None:
        super().__init__(name=f"echo-{stream.name}", daemon=True)
        # Why it ended early; empty if the reader closed the pipe, which is no error.
        self.error = ""
        self._stream = stream
        self._descriptor = descriptor
        self._finish_requested = threading.Event()
        stream.echoed_bytes = stream.recorded_bytes

    def run(self) -> None:
        """Copy until a finish was requested and all output is passed on."""
        try:
            while True:
                finishing = self._finish_requested.wait(_PERIOD_S)
                self._copy_stream()
                if finishing:
                    return
        except BrokenPipeError:
            return
        except OSError as error:
            self.error = error.strerror or str(error)
        finally:
            self._stream.echoed_bytes = None

    def _copy_stream(self) -> None:
        stream = self._stream
        while stream.echoed_bytes is not None and stream.echoed_bytes < stream.read_size():
            data = stream.read(stream.echoed_bytes, _CHUNK_BYTES)
            if not data:
                return
            while data:
                written = self._write_chunk(data)
                stream.echoed_bytes += written
                data = data[written:]

    def _write_chunk(self, data: bytes) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another program that shares our terminal or pipe has made it non-blocking
            select.select([], [self._descriptor], [], 1.0)
            return 0

    def request_finish(self) -> None:
        """End the thread once the remaining output is passed on; the job writes no more."""
        self._finish_requested.set()


def fill_standard_descriptors() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that our caller has closed.

    Otherwise the first files that we open would take these numbers, and the job's output would go into a recording.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def is_same_file(first: int, second: int) -> bool:
    """Whether two descriptors refer to the same file, terminal or pipe. False if one is closed."""
    try:
        one, other = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
