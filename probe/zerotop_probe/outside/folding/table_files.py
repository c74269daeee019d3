"""The files of a recording's tables, read with plain Python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from zerotop_probe.recording import clock, segments
from zerotop_probe.recording.tables import TABLES, Table

Record = tuple[Any, ...]


class Segment(NamedTuple):
    """A file of a table; times are those of its first and last record on the writer's clock."""

    path: str
    number: int
    bytes: int
    first_ns: int
    last_ns: int


class TableFiles:
    """The segments of one table, oldest first. The last one may still grow."""

    def __init__(self, table: Table, stem: str, header: dict[str, Any], header_line: bytes) -> None:
        self.table = table
        self.stem = stem
        self.header = header
        self.header_line = header_line
        self.segments: list[Segment] = []
        self._time = [field.name for field in table.fields].index(table.time_column)

    @property
    def closed_segments(self) -> list[Segment]:
        """The segments that no longer grow."""
        return self.segments[:-1]

    @property
    def writer(self) -> dict[str, Any]:
        """The writer's identity."""
        return dict(self.header["writer"])

    def get_time(self, record: Record) -> int:
        return int(record[self._time])

    def add_segment(self, path: str, number: int) -> None:
        """Add the next segment. Raise OSError if it cannot be read."""
        size = os.stat(path).st_size
        count = max(0, size - len(self.header_line)) // self.table.record_struct.size
        ends = [self._read_time(path, index) for index in (0, count - 1)] if count else [0, 0]
        self.segments.append(Segment(path, number, size, *ends))

    def _read_time(self, path: str, index: int) -> int:
        record = self.table.record_struct
        with open(path, "rb") as file:
            file.seek(len(self.header_line) + index * record.size)
            return self.get_time(record.unpack(file.read(record.size)))

    def iter_records(self, after_ns: int, until_ns: int) -> Iterator[Record]:
        """Iterate over the records after a time and up to another, oldest first."""
        for index, segment in enumerate(self.segments):
            is_last = index + 1 == len(self.segments)
            if segment.first_ns > until_ns or (segment.last_ns <= after_ns and not is_last):
                continue
            for record in read_records(segment.path, self.table, len(self.header_line)):
                if after_ns < record[self._time] <= until_ns:
                    yield record


def read_records(path: str, table: Table, header_bytes: int) -> Iterator[Record]:
    """Return the complete records of a file."""
    with open(path, "rb") as file:
        file.seek(header_bytes)
        data = file.read()
    record = table.record_struct
    return record.iter_unpack(data[: len(data) // record.size * record.size])


def read_last_record(path: str, table: Table, header_bytes: int) -> Record | None:
    """Return the last complete record of a file; None without any."""
    record = table.record_struct
    with open(path, "rb") as file:
        count = (file.seek(0, os.SEEK_END) - header_bytes) // record.size
        if count < 1:
            return None
        file.seek(header_bytes + (count - 1) * record.size)
        return record.unpack(file.read(record.size))


def find_tables(folder: str) -> list[TableFiles]:
    """Return the tables that this node has recorded since its last boot and that can be folded, by stem.

    A table whose header is damaged or has the columns of another version is left alone.
    """
    names: dict[str, list[tuple[int, str]]] = {}
    for name in os.listdir(folder):
        segment = segments.parse_name(name)
        if segment is not None:
            names.setdefault(segment[0], []).append((segment[1], name))
    found = (_open_table(folder, stem, sorted(names[stem])) for stem in sorted(names))
    return [table for table in found if table is not None]


def _open_table(folder: str, stem: str, names: list[tuple[int, str]]) -> TableFiles | None:
    try:
        with open(os.path.join(folder, names[0][1]), "rb") as file:
            line = file.readline(1 << 16)
        header = json.loads(line)
        table, writer = TABLES[header["table"]], header["writer"]
        is_own = (writer["host"], writer["boot"]) == (clock.read_hostname(), clock.read_boot_id())
        if not is_own or header["dtype"] != table.dtype or not line.endswith(b"\n"):
            return None
        found = TableFiles(table, stem, header, line)
        for number, name in names:
            found.add_segment(os.path.join(folder, name), number)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def replace_file(path: str, content: bytes) -> None:
    """Write a file completely or not at all. Raise OSError."""
    partial = f"{path}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except OSError:
        os.unlink(partial)
        raise


def append_records(path: str, header_line: bytes, table: Table, records: list[Record]) -> None:
    """Append records to a file that only this process writes, durably; create it with this header. Raise OSError.

    An incomplete record at its end, as after a crash, is removed first.
    """
    record_struct = table.record_struct
    content = b"".join(record_struct.pack(*record) for record in records)
    if not os.path.exists(path):
        replace_file(path, header_line + content)
        return
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size - (size - len(header_line)) % table.record_struct.size
        file.truncate(end)
        file.seek(end)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
