"""The recorded output on disk: bytes in ``.log`` files, their times in an index table each, within a limit.

The output is written in segments of an eighth of the limit. Beyond the limit the segments in the middle are removed: the
beginning says how the job was set up, the end how it ended. The header of each index gives the position of its first byte in
the whole output, so readers can say how many bytes are missing before it.

This runs in the holder, which must start quickly: it imports as little as possible.
"""

import os
import struct
import threading
import time
from contextlib import suppress

_SEGMENTS = 8
# Seconds until recording is tried again after an error.
_RETRY_S = 1.0
# A record of ``recording.tables.OUTPUT``.
_RECORD = struct.Struct("<qqiHH")
_FIRST_BYTE = b'"first_byte": 0'
# Positions of the numbers in the state, which a later holder of the same job continues.
POSITION, LOST, REASON, NUMBER, RECORDED = 0, 1, 2, 3, 4
STATE_BYTES = 64


class OutputLog:
    """Appends output to the log. Bytes that cannot be written are counted in ``state[LOST]``; nothing raises."""

    def __init__(self, folder: str, stem: str, header: bytes, limit: int, state: "memoryview[int]") -> None:
        """``header`` is the first line of an index, padded with spaces; ``state`` has the numbers of an earlier holder."""
        self._folder = folder
        self._stem = stem
        self._header = header
        self._limit = limit
        self._state = state
        self._lock = threading.Lock()
        self._closed: list[tuple[int, int]] = []
        self._number = 0
        self._log: int | None = None
        self._index: int | None = None
        self._log_size = 0
        self._index_size = 0
        self._retry_s = 0.0
        self._can_splice = True
        if state[NUMBER]:
            self._continue_segments(state[NUMBER] - 1)

    def _continue_segments(self, last: int) -> None:
        """Take over the segments of an earlier holder, and continue in the last one."""
        for number in range(last):
            with suppress(OSError):
                size = sum(os.stat(self._make_path(number, suffix)).st_size for suffix in (".log", ".rec"))
                self._closed.append((number, size))
        with suppress(OSError):
            log, index = (os.open(self._make_path(last, suffix), os.O_RDWR | os.O_CLOEXEC) for suffix in (".log", ".rec"))
            count = (os.fstat(index).st_size - len(self._header)) // _RECORD.size
            if count > 0:
                self._number, self._log, self._index = last, log, index
                self._index_size = len(self._header) + count * _RECORD.size
                _, offset, length, _, _ = _RECORD.unpack(os.pread(index, _RECORD.size, self._index_size - _RECORD.size))
                self._log_size = offset + length

    def _make_path(self, number: int, suffix: str) -> str:
        return os.path.join(self._folder, f"{self._stem}.{number}{suffix}" if number else f"{self._stem}{suffix}")

    def flush(self) -> None:
        """Record output that is held back: nothing here, an unfinished line in a ``RedactedLog``."""

    def append(self, stream: int, data: bytes) -> None:
        """Record ``data``, the next bytes of a stream (index into STREAMS)."""
        with self._lock:
            while data:
                size = self._fit_into_segment(data)
                self._record(stream, data[:size])
                data = data[size:]

    def append_from(self, stream: int, pipe: int, size: int) -> None:
        """Record the next ``size`` bytes of a stream, which are in a pipe.

        The kernel copies as much as fits into the segment; reading and writing took a third longer.
        """
        with self._lock:
            while size and self._can_splice and self._log is not None and size < self._count_room():
                try:
                    moved = os.splice(pipe, self._log, size, offset_dst=self._log_size)
                except OSError:  # not every file system can; for other errors, writing raises the right one
                    self._can_splice = False
                    break
                size -= moved
                self._state[POSITION] += moved
                self._state[LOST] += moved - self._add_to_index(stream, moved)
        if size:
            self.append(stream, os.read(pipe, size))

    def _count_room(self) -> int:
        return self._limit // _SEGMENTS - self._log_size - self._index_size

    def _fit_into_segment(self, data: bytes) -> int:
        """Return how many bytes of ``data`` to write next, whole lines if possible; begin a new segment if this is full."""
        size, room = self._limit // _SEGMENTS, self._count_room()
        if len(data) < room:
            return len(data)
        if room > 0 and (cut := data.rfind(b"\n", 0, room) + 1):
            return cut
        if room < size // 2:
            self._close_segment()
            return min(len(data), data.rfind(b"\n", 0, size) + 1 or size)
        return min(len(data), room)

    def _record(self, stream: int, data: bytes) -> None:
        # Tried twice: a new file may have room when this one does not, for example under a limit of the file size.
        failures = 0
        while data and failures < 2:
            written = self._write(stream, data)
            failures = 0 if written else failures + 1
            self._state[POSITION] += written
            data = data[written:]
        self._state[LOST] += len(data)
        self._state[POSITION] += len(data)

    def _write(self, stream: int, data: bytes) -> int:
        """Write to the log, as much as possible, and then to the index; return the number of bytes."""
        if self._log is None and not self._start_segment():
            return 0
        assert self._log is not None
        try:
            written = os.pwrite(self._log, data, self._log_size)
        except OSError as error:
            self._give_up_segment(error)
            return 0
        return self._add_to_index(stream, written)

    def _add_to_index(self, stream: int, written: int) -> int:
        """Note the last ``written`` bytes of the log in the index; return their number, 0 if they are lost."""
        assert self._index is not None
        record = _RECORD.pack(time.monotonic_ns(), self._log_size, written, stream, 0)
        try:
            _write_all(self._index, record, self._index_size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._index, self._index_size)
            self._give_up_segment(error)
            return 0
        self._log_size += written
        self._index_size += len(record)
        return written

    def _give_up_segment(self, error: OSError) -> None:
        """Note an error and close the segment. The next one may have a gap before it, which its header states."""
        self._note_error(error)
        self._close_segment()

    def _start_segment(self) -> bool:
        """Begin the next segment; return whether it could be created."""
        if time.monotonic() < self._retry_s:
            return False
        self._remove_middle()
        self._number = self._state[NUMBER]
        self._state[NUMBER] += 1
        first_byte = _FIRST_BYTE[:-1] + b"%d" % self._state[POSITION]
        line = self._header.rstrip().replace(_FIRST_BYTE, first_byte, 1).ljust(len(self._header) - 1) + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._log = os.open(self._make_path(self._number, ".log"), flags, 0o600)
            self._index = os.open(self._make_path(self._number, ".rec"), flags, 0o600)
            _write_all(self._index, line, 0)
        except OSError as error:
            self._note_error(error)
            self._retry_s = time.monotonic() + _RETRY_S
            self._close_segment()
            return False
        self._index_size = len(line)
        return True

    def _note_error(self, error: OSError) -> None:
        self._state[REASON] = self._state[REASON] or error.errno or 0

    def _close_segment(self) -> None:
        """Close the segment if there is one; remove it if it has no output."""
        if self._log is None:
            return
        for descriptor in (self._log, self._index):
            if descriptor is not None:
                os.close(descriptor)
        if self._log_size:
            self._closed.append((self._number, self._log_size + self._index_size))
        else:
            self._retry_s = time.monotonic() + _RETRY_S
            self._remove(self._number)
        self._log = self._index = None
        self._log_size = self._index_size = 0

    def _remove(self, number: int) -> None:
        for suffix in (".rec", ".log"):
            with suppress(OSError):
                os.unlink(self._make_path(number, suffix))

    def _remove_middle(self) -> None:
        """Remove the oldest segments after the first half, so that a new one fits into the limit."""
        first, half = 0, 0
        while first < len(self._closed) and half < self._limit // 2:
            half += self._closed[first][1]
            first += 1
        total = sum(size for _, size in self._closed)
        while total > self._limit - self._limit // _SEGMENTS and first < len(self._closed):
            number, size = self._closed.pop(first)
            total -= size
            self._remove(number)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
