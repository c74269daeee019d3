"""Small recordings written with the real writers, a record at a time. Times in tests are seconds, in files nanoseconds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import PHASE_CODE, UNKNOWN, Field, Table
from zerotop_probe.recording.writer import Identity, RecordWriter

S = 10**9
BEGIN_NS = 1000 * S
"""Second 0 in unix time."""


def second_to_unix_ns(second: float) -> int:
    """Return that second of a recording in unix nanoseconds."""
    return BEGIN_NS + int(second * S)


def make_identity(rank: int, pid: int | None = None, host: str = "node1") -> Identity:
    """Return the identity of a rank's process, or with -1 of a node's sampler."""
    return Identity("rank" if rank >= 0 else "node", rank, host, 100 + rank if pid is None else pid, 1, "boot")


def make_span(begin: float, end: float, phase: str, step: int = 0, flags: int = 0, depth: int = 0, tokens: int = -1) -> Any:
    """Return a record of SPANS; it has two rows where tokens are given."""
    rows = 2 if tokens >= 0 else -1
    return (int(begin * S), int(end * S), tokens, step, 0, rows, -1, PHASE_CODE[phase], flags, depth, 0, 0)


def make_record(table: Table, **fields: Any) -> tuple[Any, ...]:
    """Return a record; fields that are not given are unknown."""
    assert set(fields) <= {field.name for field in table.fields}
    return tuple(fields.get(field.name, _unknown_value(field)) for field in table.fields)


def _unknown_value(field: Field) -> Any:
    if field.code in "fd":
        return math.nan
    return b"" if field.code.endswith("s") else UNKNOWN if field.code in "qi" else 0


def write_table(folder: Path, table: Table, who: Identity, *records: Any, born: float = 0.0, **header: Any) -> RecordWriter:
    """Write a table; the caller closes the writer. ``born`` is when the file was created."""
    clock = {"monotonic_ns": int(born * S), "unix_ns": BEGIN_NS + int(born * S)}
    writer = RecordWriter(str(folder), table, who, clock=clock, **header)
    for record in records:
        writer.write(*record)
    assert writer.lost == 0
    return writer


def read_recording(folder: Path, *, begin_ns: int = BEGIN_NS) -> Recording:
    """The recording in a folder, without a recording file. One that began in the future is live, however slow we are."""
    return Recording(folder, {"boot": "boot", "clock": {"unix_ns": begin_ns, "monotonic_ns": 0}})
