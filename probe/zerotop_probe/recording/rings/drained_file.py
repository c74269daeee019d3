"""A file of the recording to which the process that drains a ring appends its records."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import Any

from zerotop_probe.recording import segments, writer
from zerotop_probe.recording.rings.shared_memory import FileProgress
from zerotop_probe.recording.tables import FOLDED_TABLES, TABLES
from zerotop_probe.recording.writer import Identity

# ``kind`` of a declaration.
EVENTS_KIND, TABLE_KIND = "events", "table"
_MOST_NAMES = 1000


class DrainedFile:
    """One declared file: the events, or all segments of a table."""

    def __init__(self, recording: str, declaration: dict[str, Any], progress: FileProgress) -> None:
        header = declaration["header"]
        self._recording = recording
        self._stem = f"{header['table']}-{Identity(**header['writer']).file_stem}"
        self.table = header["table"]
        self.record_bytes = 0
        self._segment_bytes = 0
        self._suffix = ".jsonl"
        self._header = json.dumps(header).encode() + b"\n"
        if declaration["kind"] == TABLE_KIND:
            self.record_bytes = TABLES[header["table"]].record_struct.size
            self._suffix = ".rec"
            self._header = segments.pad_header(self._header[:-1])
            if header["table"] in FOLDED_TABLES:
                self._segment_bytes = segments.count_records(self.record_bytes) * self.record_bytes
        self.progress = progress
        self._written = progress  # as ``progress``, but of what the files contain
        self._descriptor: int | None = None

    def append(self, data: bytes) -> None:
        """Append bytes to those of ``progress``, but not what the files contain already. Raise OSError."""
        data = data[self._written.bytes - self.progress.bytes :]
        while data:
            room = len(data)
            if self._segment_bytes:
                room = self._written.segment_begin + self._segment_bytes - self._written.bytes
                if not room:
                    self._begin_segment()
                    continue
            assert self._descriptor is not None
            count = os.write(self._descriptor, data[:room])
            self._written = self._written._replace(bytes=self._written.bytes + count)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[count:]

    def note_written(self, length: int) -> None:
        """Count bytes as written."""
        end = self.progress.bytes + length
        if self._written.bytes == end:
            self.progress = self._written
        else:  # the files are ahead: their segments count once the records in them are drained again
            self.progress = self.progress._replace(bytes=end)

    def open(self) -> bool:
        """Create the file, or open it if it is known to the ring; return whether it was created. Raise OSError."""
        if self._descriptor is not None:
            return False
        if self.progress.number:
            self._written = self._measure_files()
            self._descriptor = os.open(self._make_path(self._written), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            return False
        self._descriptor, self._written = self._create()
        self.progress = self._written
        if not self.record_bytes:
            writer.reserve_events(self._descriptor)
        return True

    def _create(self) -> tuple[int, FileProgress]:
        for number in range(1, _MOST_NAMES):
            path = self._make_path(FileProgress(number))
            try:
                descriptor = os.open(path, writer.CREATE_FLAGS, 0o600)
            except FileExistsError:
                if not self._is_left_over(path):
                    continue
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_TRUNC)
            self._write_header(descriptor)
            return descriptor, FileProgress(number)
        raise OSError(errno.EEXIST, "too many recordings of one name", self._stem)

    def _is_left_over(self, path: str) -> bool:
        """Whether a sampler was killed right after it had created this file for the same writer."""
        with open(path, "rb") as file:
            return self._header.startswith(file.read(len(self._header) + 1))

    def _measure_files(self) -> FileProgress:
        """Return how far the files are written, possibly further than the ring says."""
        found = self.progress
        size = self._read_size(found)
        while self._segment_bytes and size >= self._segment_bytes:
            following = found._replace(segment=found.segment + 1, segment_begin=found.segment_begin + self._segment_bytes)
            try:
                size = self._read_size(following)
            except FileNotFoundError:
                break
            found = following
        return found._replace(bytes=found.segment_begin + max(0, size))

    def _read_size(self, progress: FileProgress) -> int:
        path = self._make_path(progress)
        size = os.stat(path).st_size
        if size < len(self._header):  # the sampler was killed meanwhile
            with open(path, "r+b") as file:
                file.truncate()
                file.write(self._header)
            return 0
        return size - len(self._header)

    def _make_path(self, progress: FileProgress) -> str:
        stem = f"{self._stem}.{progress.number - 1}" if progress.number > 1 else self._stem
        name = segments.make_name(stem, progress.segment) if self.record_bytes else stem + self._suffix
        return os.path.join(self._recording, name)

    def _begin_segment(self) -> None:
        written = self._written
        following = written._replace(segment=written.segment + 1, segment_begin=written.bytes)
        descriptor = os.open(self._make_path(following), writer.CREATE_FLAGS, 0o600)
        self._write_header(descriptor)
        self.close()
        self._descriptor, self._written = descriptor, following

    def _write_header(self, descriptor: int) -> None:
        try:
            if os.write(descriptor, self._header) != len(self._header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(descriptor)
            raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
