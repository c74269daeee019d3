"""Writers of records and events: one file per process and table, one ``os.write`` per record.

Nothing is buffered, so that records survive SIGKILL of their writer. Errors (disk full, read-only mount, directory removed)
are counted and suppressed: the measured job goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from typing import Any

from zerotop_probe.recording import clock, disk, segments
from zerotop_probe.recording.event_base import Event
from zerotop_probe.recording.identity import Identity as Identity
from zerotop_probe.recording.interruptions import is_interruption
from zerotop_probe.recording.tables import FOLDED_TABLES, FORMAT_MAJOR, FORMAT_MINOR, Table

# Twice what the events of a rank usually take.
_ROOM_FOR_EVENTS = 1 << 14


def make_header(table: str, identity: Identity, **extra: Any) -> dict[str, Any]:
    """Return the header, which is the first line of every file."""
    return {
        "zerotop": [FORMAT_MAJOR, FORMAT_MINOR],
        "table": table,
        "writer": identity._asdict(),
        "clock": clock.read_clock_pair(),
        **extra,
    }


CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


def create_file(directory: str, stem: str, suffix: str) -> int:
    """Open a new file for appending, private to the user; a number is added to a name that exists already."""
    return create_named_file(directory, stem, suffix)[0]


def create_named_file(directory: str, stem: str, suffix: str) -> tuple[int, str]:
    """Open a new file as :func:`create_file` does; return it with the stem of its name."""
    for number in range(1000):
        numbered = f"{stem}.{number}" if number else stem
        try:
            return os.open(os.path.join(directory, numbered + suffix), CREATE_FLAGS, 0o600), numbered
        except FileExistsError:
            continue
    raise OSError(errno.EEXIST, "too many recordings of one name", stem)


def _name_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


class RecordWriter:
    """Append-only files of one table, see :mod:`~zerotop_probe.recording.segments`. Never raises.

    ``lost`` counts records that could not be written, ``last_error`` is the last reason.
    """

    def __init__(self, directory: str, table: Table, identity: Identity, **extra: Any) -> None:
        """Create the file and write its header with ``extra``. If that fails every record is lost."""
        self.lost = 0
        self.last_error = ""
        self._struct = table.record_struct
        self._pack_record = self._struct.pack
        self._directory = directory
        self._descriptor: int | None = None
        self._header = segments.pad_header(
            json.dumps(make_header(table.name, identity, dtype=table.dtype, **extra), default=str).encode()
        )
        self._stem = f"{table.name}-{identity.file_stem}"
        self._segment = 0
        # Records until the next segment; never in a table whose records are kept.
        self._segment_room = segments.count_records(self._struct.size) if table.name in FOLDED_TABLES else -1
        try:
            self._descriptor, self._stem = create_named_file(directory, self._stem, ".rec")
            if os.write(self._descriptor, self._header) != len(self._header):
                raise OSError(errno.ENOSPC, "header not written")
        except OSError as error:
            self.lost = 1
            self.last_error = _name_error(error)
            self.close()

    def write(self, *values: Any) -> None:
        """Append one record: a value for every field, in the table's order."""
        descriptor = self._descriptor
        if descriptor is None:
            self.lost += 1
            return
        try:
            record = self._pack_record(*values)
            if os.write(descriptor, record) != len(record):
                self._drop_torn_tail()
                return
            self._segment_room -= 1
            if not self._segment_room:
                self._begin_segment(descriptor)
        except Exception as error:
            if is_interruption(error):
                raise
            self.lost += 1
            self.last_error = _name_error(error)

    def _begin_segment(self, full: int) -> None:
        """Continue in a new file; in the full one if that cannot be created, until the next occasion."""
        self._segment_room = segments.count_records(self._struct.size)
        path = os.path.join(self._directory, segments.make_name(self._stem, self._segment + 1))
        try:
            descriptor = os.open(path, CREATE_FLAGS, 0o600)
        except OSError:
            return
        if os.write(descriptor, self._header) != len(self._header):
            os.unlink(path)
            os.close(descriptor)
            return
        self._descriptor = descriptor
        self._segment += 1
        os.close(full)

    def _drop_torn_tail(self) -> None:
        """Truncate the file to whole records after a short write, so that the next one is aligned."""
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, size - (size - len(self._header)) % self._struct.size)
        self.lost += 1
        self.last_error = os.strerror(errno.ENOSPC)

    def close(self) -> None:
        """Close the file; later records count as lost. Safe in a forked child."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def format_event(time_ns: int, event: type[Event] | str, facts: dict[str, Any]) -> bytes:
    """Return the line of an event. Raise TypeError or ValueError if a fact cannot be written as JSON."""
    name = event if isinstance(event, str) else event.event_name
    return json.dumps({"time_ns": time_ns, "event": name, **facts}, default=str).encode() + b"\n"


def reserve_events(descriptor: int | None) -> None:
    """Reserve disk space for a rank's events: even on a full disk its last event counts lost records."""
    disk.reserve_blocks(descriptor, _ROOM_FOR_EVENTS)


class EventWriter:
    """An append-only file of events as JSON lines. Never raises; ``lost`` counts events that could not be written."""

    def __init__(self, directory: str, identity: Identity, **extra: Any) -> None:
        """Create ``events-<writer>.jsonl`` and write its header with ``extra``."""
        self.lost = 0
        self._torn = False
        self._descriptor: int | None = None
        try:
            self._descriptor = create_file(directory, f"events-{identity.file_stem}", ".jsonl")
        except OSError:
            self.lost = 1
            return
        self._append_line(json.dumps(make_header("events", identity, **extra), default=str).encode() + b"\n")

    def fileno(self) -> int | None:
        """Return the file's descriptor; None if it could not be created or is closed."""
        return self._descriptor

    def write(self, time_ns: int, event: type[Event] | str, **facts: Any) -> None:
        """Append an event of :mod:`~zerotop_probe.recording.events` that happened at ``time_ns`` (CLOCK_MONOTONIC)."""
        try:
            self._append_line(format_event(time_ns, event, facts))
        except Exception as error:
            if is_interruption(error):
                raise
            self.lost += 1

    def _append_line(self, line: bytes) -> None:
        if self._descriptor is None:
            self.lost += 1
            return
        try:
            if self._torn:
                line = b"\n" + line
            self._torn = os.write(self._descriptor, line) != len(line)
            self.lost += self._torn
        except OSError as error:
            if is_interruption(error):
                raise
            self.lost += 1

    def close(self) -> None:
        """Close the file; later events count as lost."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
