"""The job's output streams: files in memory that a dead recorder, a full disk or a slow reader cannot break.

A pipe kills the job (SIGPIPE) or blocks it when its reader dies; a file on disk fails when the disk is full. A write to a
memfd always succeeds. The recorder copies from it and frees the memory of copied bytes by punching holes. While no sampler
runs the output stays in memory until a restarted one records it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile

from zerotop_probe.outside.procfs import Process
from zerotop_probe.recording import disk

_PREFIX = "zerotop-"
_PAGE = os.sysconf("SC_PAGE_SIZE")
# The least size of a hole: a call costs 2 us, too much for a page of text a second.
_PUNCH_BYTES = 1 << 16


class Stream:
    """One of the job's output streams: its memory, and the positions of its readers."""

    def __init__(self, name: str, descriptor: int, position: int = 0) -> None:
        self.name = name
        self.descriptor = descriptor
        self.recorded_bytes = position
        # None while this stream is not echoed.
        self.echoed_bytes: int | None = None
        self._punched_bytes = position

    @classmethod
    def create_stream(cls, name: str) -> Stream:
        """Create an empty stream. Raises OSError if there is neither a memfd nor a temporary directory."""
        try:
            descriptor = os.memfd_create(_PREFIX + name, os.MFD_CLOEXEC)
        except (OSError, AttributeError):  # forbidden by a sandbox
            with tempfile.TemporaryFile(prefix=_PREFIX + name) as file:
                descriptor = os.dup(file.fileno())
        try:
            # Above the standard descriptors, which a caller may have closed: a stream echoed into itself never ends.
            return cls(name, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
        finally:
            os.close(descriptor)

    @classmethod
    def adopt_stream(cls, name: str, owner: Process, number: int, position: int) -> Stream | None:
        """Return the stream behind descriptor ``number`` of a running job; None if it is not one of ours."""
        path = f"/proc/{owner.pid}/fd/{number}"
        try:
            if _PREFIX + name not in os.readlink(path):
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        return cls(name, descriptor, position)

    def open_writer(self) -> int:
        """Open a descriptor for the job. It appends, so that processes of the job do not overwrite each other."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def read_size(self) -> int:
        """Return the bytes written so far. If the job truncates its output, readers restart from 0."""
        size = os.fstat(self.descriptor).st_size
        if size < self.recorded_bytes:
            self.recorded_bytes = self._punched_bytes = 0
        echoed = self.echoed_bytes  # read once: the echo thread may end meanwhile
        if echoed is not None and size < echoed:
            self.echoed_bytes = 0
        return size

    def read(self, position: int, limit: int) -> bytes:
        """Return up to ``limit`` bytes from ``position`` on."""
        return os.pread(self.descriptor, limit, position)

    def release_memory(self) -> None:
        """Free the memory of the bytes that all readers have copied."""
        echoed = self.echoed_bytes
        done = self.recorded_bytes if echoed is None else min(self.recorded_bytes, echoed)
        done -= done % _PAGE
        if done - self._punched_bytes >= _PUNCH_BYTES:
            disk.punch_hole(self.descriptor, self._punched_bytes, done - self._punched_bytes)
            self._punched_bytes = done

    def close(self) -> None:
        """Close our side; the job's side stays open."""
        os.close(self.descriptor)
