"""A recording as CSV, Parquet or JSON lines, one table at a time.

CSV and JSON lines are written a batch at a time, so that a recording larger than memory can be exported.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from zerotop.session.reader import Session

TABLES = (
    *("steps", "spans", "gpus", "processes", "threads", "allocator", "events", "annotations"),
    *("device_times", "gpu_processes", "hosts", "probe", "step_parts"),
)
FORMATS = ("csv", "parquet", "jsonl")

# What a spreadsheet may take for the beginning of a formula, the full-width forms included.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def export_table(session: Session, table: str, fmt: str, stream: BinaryIO) -> int:
    """Writes ``table`` to ``stream`` as ``fmt`` and returns how many rows that were.

    Raises ValueError, with a sentence for the user, for a table or format there is not.
    """
    if table not in TABLES:
        raise ValueError(f"There is no table {table!r} to export; there are {', '.join(TABLES)}.")
    if fmt not in FORMATS:
        raise ValueError(f"There is no export format {fmt!r}; there are {', '.join(FORMATS)}.")
    rows = 0
    with ThreadPoolExecutor(1) as ahead:  # the next batch is made while this one is written
        pieces = _iter_batches(session, table, fmt)
        coming = ahead.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = ahead.submit(next, pieces, None)
            _write_all(stream, piece.data)
            rows += piece.rows
    return rows


def escape_formula(text: str) -> str:
    """``text``, behind an apostrophe if a spreadsheet would take it for a formula."""
    return "'" + text if text.startswith(_FORMULA_STARTS) else text


class _EncodedBatch(NamedTuple):
    """Some rows as they are written: in memory, so that a closed pipe or a full disk is the stream's own OSError."""

    rows: int
    data: memoryview


def _iter_batches(session: Session, table: str, fmt: str) -> Iterator[_EncodedBatch]:
    # Polars takes a while to import, and only writing needs it.
    import polars

    from zerotop.analysis.reports.export_tables import build_frames

    found = build_frames(session, table, escape_formula if fmt == "csv" else str)
    if fmt == "parquet":
        found = iter([polars.concat(list(found))])
    for number, frame in enumerate(found):
        buffer = io.BytesIO()
        if fmt == "csv":
            frame.write_csv(buffer, include_header=number == 0)
        elif fmt == "jsonl":
            frame.write_ndjson(buffer)
        else:
            frame.write_parquet(buffer)
        yield _EncodedBatch(frame.height, buffer.getbuffer())


def _write_all(stream: BinaryIO, data: memoryview) -> None:
    """Writes all of ``data``, also where a write may be short (an unbuffered pipe)."""
    while data:
        written = stream.write(data)
        data = data[len(data) if written is None else written :]
