"""A recording's tables as CSV, Parquet or JSON lines.

CSV and JSON lines are written in batches, so that a recording larger than memory can be exported.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import polars

from zerotop.analysis.reports.export_tables import TABLES, build_frames
from zerotop.recording.reader import Recording
from zerotop.recording.spreadsheet import escape_formula

FORMATS = ("csv", "parquet", "jsonl")


class ByteStream(Protocol):
    """The destination of an exported table."""

    def write(self, data: memoryview, /) -> int | None:
        """Write bytes; return how many, or None for all."""


def export_table(recording: Recording, table: str, fmt: str, stream: ByteStream) -> int:
    """Write ``table`` to ``stream`` as ``fmt`` and return the number of rows.

    Raises ValueError, with a sentence for the user, for an unknown table or format.
    """
    if table not in TABLES:
        raise ValueError(f"Unknown table {table!r}. Choose one of: {', '.join(TABLES)}.")
    if fmt not in FORMATS:
        raise ValueError(f"Unknown format {fmt!r}. Choose one of: {', '.join(FORMATS)}.")
    rows = 0
    with ThreadPoolExecutor(1) as executor:  # encodes the next batch while this one is written
        batches = _iter_batches(recording, table, fmt)
        upcoming = executor.submit(next, batches, None)
        while (batch := upcoming.result()) is not None:
            upcoming = executor.submit(next, batches, None)
            _write_all(stream, batch.data)
            rows += batch.rows
    return rows


class _EncodedBatch(NamedTuple):
    """Encoded rows, in memory, so that a closed pipe or a full disk raises the stream's own OSError."""

    rows: int
    data: memoryview


def _iter_batches(recording: Recording, table: str, fmt: str) -> Iterator[_EncodedBatch]:
    frames = build_frames(recording, table, escape_formula if fmt == "csv" else str)
    if fmt == "parquet":
        frames = iter([polars.concat(list(frames))])
    for number, frame in enumerate(frames):
        buffer = io.BytesIO()
        if fmt == "csv":
            frame.write_csv(buffer, include_header=number == 0)
        elif fmt == "jsonl":
            frame.write_ndjson(buffer)
        else:
            frame.write_parquet(buffer)
        yield _EncodedBatch(frame.height, buffer.getbuffer())


def _write_all(stream: ByteStream, data: memoryview) -> None:
    """Write all of ``data``, also to an unbuffered pipe, which may take only part of it."""
    while data:
        written = stream.write(data)
        data = data[len(data) if written is None else written :]
