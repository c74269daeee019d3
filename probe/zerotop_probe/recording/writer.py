"""Writers: one file per writer per table, one record one ``os.write``.

Nothing is buffered, so whatever was recorded survives SIGKILL of its writer. An error (disk full, read-only mount, folder
removed) is counted and swallowed: the job that is being measured goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import Any, NamedTuple

from zerotop_probe.recording import clock
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR, Table

# Records begin at a multiple of this, so that memory-mapped fields are aligned.
HEADER_ALIGNMENT = 64


class Identity(NamedTuple):
    """Who writes: ``role`` is "rank" (inside a training process) or "node" (the sampler beside it)."""

    role: str
    rank: int
    host: str
    pid: int
    start: int
    boot: str

    @classmethod
    def for_this_process(cls, role: str, rank: int = -1) -> Identity:
        """The identity of the calling process; ``rank`` only for role "rank"."""
        pid = os.getpid()
        return cls(role, rank, clock.read_hostname(), pid, clock.read_process_start(pid), clock.read_boot_id())

    @property
    def file_stem(self) -> str:
        """The part of a file name that tells writers apart, for example ``rank3-node1-4711``."""
        who = f"rank{self.rank}" if self.role == "rank" else self.role
        return f"{who}-{self.host}-{self.pid}"


def make_header(table: str, identity: Identity, **extra: Any) -> dict[str, Any]:
    """What the first line of every file says."""
    return {
        "zerotop": [FORMAT_MAJOR, FORMAT_MINOR],
        "table": table,
        "writer": identity._asdict(),
        "clock": clock.read_clock_pair(),
        **extra,
    }


def create_file(directory: str, stem: str, suffix: str) -> int:
    """Opens a new file for appending, private to the user; a restarted process whose name is taken gets a number."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    for number in range(1000):
        name = f"{stem}.{number}{suffix}" if number else f"{stem}{suffix}"
        try:
            return os.open(os.path.join(directory, name), flags, 0o600)
        except FileExistsError:
            continue
    raise OSError(errno.EEXIST, "too many recordings of one name", stem)


class RecordWriter:
    """Appends records of one table. Never raises: see ``lost``."""

    def __init__(self, directory: str, table: Table, identity: Identity, **extra: Any) -> None:
        """Creates the file and writes its header; ``more`` goes into the header. On failure every record is lost."""
        self.lost = 0
        self._struct = table.record_struct
        self._pack_record = self._struct.pack
        self._descriptor: int | None = None
        line = json.dumps(make_header(table.name, identity, dtype=table.dtype, **extra), default=str).encode()
        line = line.ljust(-(-(len(line) + 1) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - 1) + b"\n"
        self._header_size = len(line)
        try:
            self._descriptor = create_file(directory, f"{table.name}-{identity.file_stem}", ".rec")
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, "header not written")
        except OSError:
            self.lost = 1
            self.close()

    def write(self, *values: Any) -> None:
        """Appends one record: a value for every field, in the table's order."""
        descriptor = self._descriptor
        if descriptor is None:
            self.lost += 1
            return
        try:
            record = self._pack_record(*values)
            if os.write(descriptor, record) != len(record):
                self._drop_torn_tail()
        except Exception:
            self.lost += 1

    def _drop_torn_tail(self) -> None:
        """After a short write: cuts the file back to whole records, so that the next one is aligned again."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, size - (size - self._header_size) % self._struct.size)
        self.lost += 1

    def close(self) -> None:
        """Closes the file; later records count as lost. Also what a forked child calls."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class EventWriter:
    """Appends facts that are rare and irregular, one JSON object a line. Never raises: see ``lost``."""

    def __init__(self, directory: str, identity: Identity, **extra: Any) -> None:
        """Creates ``events-<writer>.jsonl`` with its header line, in which ``more`` stands too."""
        self.lost = 0
        self._torn = False
        self._descriptor: int | None = None
        try:
            self._descriptor = create_file(directory, f"events-{identity.file_stem}", ".jsonl")
        except OSError:
            self.lost = 1
            return
        self._append_line(make_header("events", identity, **extra))

    def fileno(self) -> int | None:
        """The file's descriptor; None when it could not be made or is closed."""
        return self._descriptor

    def write(self, time_ns: int, event: str, **facts: Any) -> None:
        """Records that ``event`` happened at ``time_ns`` (CLOCK_MONOTONIC); ``facts`` are any JSON values."""
        self._append_line({"time_ns": time_ns, "event": event, **facts})

    def _append_line(self, value: dict[str, Any]) -> None:
        if self._descriptor is None:
            self.lost += 1
            return
        try:
            line = json.dumps(value, default=str).encode() + b"\n"
            if self._torn:
                line = b"\n" + line
            self._torn = os.write(self._descriptor, line) != len(line)
            self.lost += self._torn
        except Exception:
            self.lost += 1

    def close(self) -> None:
        """Closes the file; later events count as lost."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
