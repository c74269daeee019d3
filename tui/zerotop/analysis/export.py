"""A recording as CSV, Parquet or JSON lines: one table at a time, units in the names of the columns.

Times become unix nanoseconds, codes become names, and what is unknown is empty (null). CSV and JSON lines are
written a batch at a time, so that a recording larger than memory can be exported. Rows stand
writer by writer, each writer's as recorded.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from zerotop_probe.recording import tables

if TYPE_CHECKING:
    import polars

    from zerotop.session.reader import Event, Session, Source

TABLES = ("steps", "spans", "gpus", "processes", "threads", "allocator", "events")
MORE_TABLES = ("gpu_processes", "hosts", "probe")
FORMATS = ("csv", "parquet", "jsonl")

BATCH_ROWS = 500_000

# Written by the ranks themselves: the writer's rank is a column. (Records of processes have their own.)
_OF_RANKS = ("spans", "allocator", "probe")
_TIMES = {"time_ns": "time_unix_ns", "begin_ns": "begin_unix_ns", "end_ns": "end_unix_ns"}
_FLAGS = {
    "boundary": tables.BOUNDARY,
    "skipped": tables.SKIPPED,
    "eval": tables.EVAL,
    "failed": tables.FAILED,
}
_NAMES = {"phase": tables.PHASES, "edge": ("tick", "begin", "end")}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

_Text = Callable[[str], str]


def export(session: Session, table: str, fmt: str, stream: BinaryIO) -> int:
    """Writes ``table`` to ``stream`` as ``fmt`` and returns how many rows that were.

    Raises ValueError, with a sentence for the user, for a table or format there is not.
    """
    if table not in TABLES + MORE_TABLES:
        raise ValueError(
            f"There is no table {table!r} to export; there are {', '.join(TABLES + MORE_TABLES)}."
        )
    if fmt not in FORMATS:
        raise ValueError(f"There is no export format {fmt!r}; there are {', '.join(FORMATS)}.")
    import polars

    frames = _frames(session, table, spreadsheet_safe if fmt == "csv" else str)
    if fmt == "parquet":
        frames = iter([polars.concat(list(frames))])
    rows = 0
    for number, frame in enumerate(frames):
        # Through memory, so that a closed pipe or a full disk is the stream's own OSError.
        buffer = io.BytesIO()
        if fmt == "csv":
            frame.write_csv(buffer, include_header=number == 0)
        elif fmt == "jsonl":
            frame.write_ndjson(buffer)
        else:
            frame.write_parquet(buffer)
        _write_all(stream, buffer.getbuffer())
        rows += frame.height
    return rows


def spreadsheet_safe(text: str) -> str:
    """``text``, behind an apostrophe if a spreadsheet would take it for a formula."""
    return "'" + text if text.startswith(_FORMULA) else text


def _write_all(stream: BinaryIO, data: memoryview) -> None:
    """Writes all of ``data``, also where a write may be short (an unbuffered pipe)."""
    while data:
        written = stream.write(data)
        data = data[len(data) if written is None else written :]


def _frames(session: Session, table: str, text: _Text) -> Iterator[polars.DataFrame]:
    """The table in batches; at least one, so that an empty table still has its columns."""
    if table == "events":
        events = sorted(session.events, key=_writer)
        for begin in range(0, max(1, len(events)), BATCH_ROWS):
            yield _events(events[begin : begin + BATCH_ROWS], text)
    elif table == "steps":
        from zerotop.analysis.steps import steps

        array = steps(session)
        for begin in range(0, max(1, len(array)), BATCH_ROWS):
            yield _plain(array[begin : begin + BATCH_ROWS], text)
    else:
        layout = tables.TABLES[table]
        nothing = True
        for source in sorted(session.sources.get(table, []), key=_writer):
            array = source.array
            for begin in range(0, len(array), BATCH_ROWS):
                nothing = False
                rows = array[begin : begin + BATCH_ROWS]
                yield _records(layout, rows, source.rank, source.host, source.offset_ns, text)
        if nothing:
            empty = np.empty(0, [(field.name, field.dtype) for field in layout.fields])
            yield _records(layout, empty, -1, "", 0, text)


def _writer(of: Source | Event) -> tuple[int, str, int]:
    return of.rank, of.host, of.pid


def _records(
    layout: tables.Table, array: np.ndarray[Any, Any], rank: int, host: str, offset_ns: int, text: _Text
) -> polars.DataFrame:
    """Some records of one writer, as columns."""
    import polars

    rows = len(array)
    columns: dict[str, polars.Series] = {}
    if layout.name in _OF_RANKS:
        known_rank = rank if rank >= 0 else None
        columns["rank"] = polars.Series([known_rank], dtype=polars.Int32).new_from_index(0, rows)
    elif any(field.name == "rank" for field in layout.fields):
        columns["rank"] = polars.Series(dtype=polars.Int32)  # its place; filled below
    columns["host"] = polars.Series([text(_sound(host))], dtype=polars.String).new_from_index(0, rows)
    for field in layout.fields:
        name = field.name
        if name == "pad":
            continue
        values = array[name]
        if name == "flags":
            for flag, bit in _FLAGS.items():
                columns[flag] = polars.Series((values & bit) != 0)
        elif name in _NAMES:
            columns[name] = _named(values, _NAMES[name])
        elif name in _TIMES:
            columns[_TIMES[name]] = polars.Series(values + offset_ns)
            if name == "end_ns":
                columns["duration_ns"] = polars.Series(values - array["begin_ns"])
        else:
            # A process of rank -1 is a launcher, which is known.
            columns[name] = _column(values, text, unknown=name != "rank")
    return polars.DataFrame(columns)


def _plain(array: np.ndarray[Any, Any], text: _Text) -> polars.DataFrame:
    """A structured array whose fields are the columns already."""
    import polars

    return polars.DataFrame({name: _column(array[name], text) for name in array.dtype.names or ()})


def _column(values: np.ndarray[Any, Any], text: _Text, unknown: bool = True) -> polars.Series:
    """One field, null where it is -1 (if that means ``unknown``) or NaN."""
    import polars

    kind = values.dtype.kind
    if kind in "SUO":
        cells: dict[Any, str] = {}
        listed = values.tolist()
        for value in set(listed):
            cells[value] = text(_sound(value))
        return polars.Series([cells[value] for value in listed], dtype=polars.String)
    series = polars.Series(np.ascontiguousarray(values))
    if kind == "f":
        return series.fill_nan(None)
    if kind == "i" and unknown:
        missing = series == tables.UNKNOWN
        if missing.any():
            return series.set(missing, None)
    return series


def _named(codes: np.ndarray[Any, Any], names: Sequence[str]) -> polars.Series:
    """Codes as names; null for a code that only a newer version knows."""
    import polars

    series = polars.Series(codes.astype(np.uint32))
    strange = series >= len(names)
    if strange.any():
        series = series.set(strange, None)
    return polars.Series(names, dtype=polars.Enum(names)).gather(series)


def _events(events: Sequence[Event], text: _Text) -> polars.DataFrame:
    import polars

    return polars.DataFrame(
        {
            "time_unix_ns": [event.unix_ns for event in events],
            "event": [text(_sound(event.name)) for event in events],
            "rank": [event.rank if event.rank >= 0 else None for event in events],
            "host": [text(_sound(event.host)) for event in events],
            "pid": [event.pid for event in events],
            "facts": [text(_json(event.facts)) for event in events],
        },
        schema={
            "time_unix_ns": polars.Int64,
            "event": polars.String,
            "rank": polars.Int32,
            "host": polars.String,
            "pid": polars.Int64,
            "facts": polars.String,
        },
    )


def _sound(value: str | bytes) -> str:
    """Text that can be written as UTF-8, whatever was recorded."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.encode(errors="replace").decode()


def _json(facts: dict[str, Any]) -> str:
    try:
        return json.dumps(facts, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(facts))


def _finite(value: Any) -> Any:
    """``value`` with null for the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
