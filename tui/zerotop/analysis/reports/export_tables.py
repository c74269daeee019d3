"""A recording's tables as data frames, a batch at a time, units in the names of the columns.

Times become unix nanoseconds, codes become names, and what is unknown is null. Rows stand writer by writer, each writer's as
recorded; events in order of time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars
from numpy.typing import NDArray

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.annotations import annotations as annotations_of
from zerotop.analysis.steps.optimizer_phases import PARTS_DTYPE, step_parts
from zerotop.analysis.steps.step_table import STEP_DTYPE, steps_of_ranks
from zerotop.session.reader import Event, Session
from zerotop_probe.recording import tables

BATCH_ROWS = 100_000

# Written by the ranks themselves: the writer's rank is a column. (Records of processes have their own.)
_OF_RANKS = ("spans", "allocator", "device_times", "probe")
_TIMES = {"time_ns": "time_unix_ns", "begin_ns": "begin_unix_ns", "end_ns": "end_unix_ns"}
_FLAGS = {"boundary": tables.BOUNDARY, "skipped": tables.SKIPPED, "eval": tables.EVAL, "failed": tables.FAILED}
_NAMES = {"phase": tables.PHASES, "edge": ("tick", "begin", "end")}
# Where -1 is no want of knowledge: a process of rank -1 is a launcher.
_MINUS_ONE = (("processes", "rank"),)
_EVENTS = {
    "time_unix_ns": polars.Int64,
    "event": polars.String,
    "rank": polars.Int32,
    "host": polars.String,
    "pid": polars.Int64,
    "facts": polars.String,
}

_ANNOTATIONS = {
    "known_unix_ns": polars.Int64,
    "begin_unix_ns": polars.Int64,
    "end_unix_ns": polars.Int64,
    "step": polars.Int64,
    "annotation": polars.String,
    "severity": polars.String,
    "confidence_percent": polars.Float64,
    "ranks": polars.String,
    "sentence": polars.String,
    "advice": polars.String,
    "evidence": polars.String,
}


class Writer(NamedTuple):
    """What is the same in all records of one file."""

    rank: int
    host: str
    offset_ns: int


Text = Callable[[str], str]
Rows = NDArray[Any]


def frames(session: Session, table: str, text: Text) -> Iterator[polars.DataFrame]:
    """``steps``, ``step_parts``, ``events``, ``annotations`` or a table of records.

    At least one frame: an empty table has columns too.
    ``text`` makes what is safe to write of every text.
    """
    if table == "annotations":
        yield _annotations(annotations_of(session, session.end_ns), text)
    elif table == "events":
        yield from (_events(batch, text) for batch in _batches(session.events))
    elif table == "steps":
        yield _steps(np.empty(0, STEP_DTYPE))
        yield from (_steps(batch) for rows in steps_of_ranks(session) for batch in _batches(rows))
    elif table == "step_parts":
        yield from (_parts(batch) for batch in _batches(step_parts(session)))
    else:
        layout = tables.TABLES[table]
        empty = np.empty(0, [(field.name, field.dtype) for field in layout.fields])
        yield _records(layout, empty, Writer(-1, "", 0), text)
        for source in sorted(session.sources[table], key=lambda source: (source.rank, source.host, source.born_ns)):
            who = Writer(source.rank, text(_sound(source.host)), source.offset_ns)
            yield from (_records(layout, batch, who, text) for batch in _batches(source.array))
            source.release()


def _batches(rows: Any) -> Iterator[Any]:
    return (rows[begin : begin + BATCH_ROWS] for begin in range(0, max(1, len(rows)), BATCH_ROWS))


def _steps(rows: Rows) -> polars.DataFrame:
    frame = polars.DataFrame({name: _numbers(rows[name]) for name in STEP_DTYPE.names or ()})
    return frame.insert_column(2, polars.Series("begin_unix_s", rows["begin_unix_ns"] / 1e9))


def _parts(rows: Rows) -> polars.DataFrame:
    return polars.DataFrame({name: _numbers(rows[name]) for name in PARTS_DTYPE.names or ()})


def _records(layout: tables.Table, rows: Rows, who: Writer, text: Text) -> polars.DataFrame:
    """Some records of one writer, as columns."""
    columns: dict[str, polars.Series] = {}
    if layout.name in _OF_RANKS:
        columns["rank"] = _repeated(who.rank if who.rank >= 0 else None, polars.Int32, len(rows))
    elif (layout.name, "rank") in _MINUS_ONE:
        columns["rank"] = polars.Series(rows["rank"])
    columns["host"] = _repeated(who.host, polars.String, len(rows))
    for field in layout.fields:
        if field.since and field.name not in (rows.dtype.names or ()):
            columns[field.name] = _repeated(None, _kind(field), len(rows))
        elif field.name not in ("pad", *columns):
            columns |= _columns(field.name, rows, who.offset_ns, text)
    return polars.DataFrame(columns)


def _kind(field: tables.Field) -> type[polars.DataType]:
    """The type of a column that an older recording lacks."""
    return type(polars.Series(np.empty(0, field.dtype)).dtype)


def _repeated(value: Any, kind: type[polars.DataType], count: int) -> polars.Series:
    return polars.Series([value], dtype=kind).new_from_index(0, count)


def _columns(name: str, rows: Rows, offset_ns: int, text: Text) -> dict[str, polars.Series]:
    """What a field becomes, by name."""
    values = rows[name]
    if name == "flags":
        return {flag: polars.Series(values & bit != 0) for flag, bit in _FLAGS.items()}
    if name in _NAMES:
        return {name: _named(values, _NAMES[name])}
    if name in _TIMES:
        duration = {"duration_ns": polars.Series(values - rows["begin_ns"])} if name == "end_ns" else {}
        return {_TIMES[name]: polars.Series(values + offset_ns), **duration}
    return {name: _texts(values, text) if values.dtype.kind == "S" else _numbers(values)}


def _numbers(values: Rows) -> polars.Series:
    """One field, null where it is NaN or UNKNOWN."""
    series = polars.Series(np.ascontiguousarray(values))
    if values.dtype.kind == "f":
        return series.fill_nan(None)
    missing = values == tables.UNKNOWN if values.dtype.kind == "i" else np.empty(0)
    return series.set(polars.Series(missing), None) if missing.any() else series


def _texts(values: Rows, text: Text) -> polars.Series:
    """One field of bytes; there are few different ones."""
    listed = values.tolist()
    words = {value: text(_sound(value)) for value in set(listed)}
    return polars.Series([words[value] for value in listed], dtype=polars.String)


def _named(codes: Rows, names: Sequence[str]) -> polars.Series:
    """Codes as names; null for a code that only a newer version knows."""
    series = polars.Series(codes.astype(np.uint32))
    strange = series >= len(names)
    if strange.any():
        series = series.set(strange, None)
    return polars.Series(names, dtype=polars.Enum(names)).gather(series)


def _events(events: Sequence[Event], text: Text) -> polars.DataFrame:
    columns = {
        "time_unix_ns": [event.unix_ns for event in events],
        "event": [text(_sound(event.name)) for event in events],
        "rank": [event.rank if event.rank >= 0 else None for event in events],
        "host": [text(_sound(event.host)) for event in events],
        "pid": [event.pid for event in events],
        "facts": [text(_json(event.facts)) for event in events],
    }
    return polars.DataFrame(columns, schema=_EVENTS)


def _annotations(found: Sequence[Annotation], text: Text) -> polars.DataFrame:
    columns = {
        "known_unix_ns": [finding.known_ns for finding in found],
        "begin_unix_ns": [finding.begin_ns for finding in found],
        "end_unix_ns": [finding.end_ns for finding in found],
        "step": [finding.step for finding in found],
        "annotation": [finding.name for finding in found],
        "severity": [finding.severity.value for finding in found],
        "confidence_percent": [100 * finding.confidence for finding in found],
        "ranks": [" ".join(str(rank) for rank in finding.ranks) for finding in found],
        "sentence": [text(_sound(finding.sentence)) for finding in found],
        "advice": [text(_sound(finding.advice)) for finding in found],
        "evidence": [text(_json(dict(finding.evidence))) for finding in found],
    }
    return polars.DataFrame(columns, schema=_ANNOTATIONS)


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
