"""The exported tables as data frames, in batches, with units in the column names.

Times become unix nanoseconds, codes become names, unknown values become null. Rows are grouped by writer, in the order in
which they were recorded; events are ordered by time.

A table of ``recording.tables`` is exported unless ``_NOT_EXPORTED`` names it; ``_COMPUTED`` builds all others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars
from numpy.typing import NDArray

from zerotop.analysis.findings import link_findings
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.analysis.memory.reading_places import locate_readings
from zerotop.analysis.steps.logged_values import NAMES, NO_VALUES, find_steps, read_logged
from zerotop.analysis.steps.optimizer_phases import read_step_parts
from zerotop.analysis.views.finding_search import list_findings
from zerotop.recording.reader import Recording, Source
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.recording import tables

BATCH_ROWS = 100_000

# Of "logged", the table "loss" has what is recorded or printed.
_NOT_EXPORTED = ("begins", "history", "output", "folded", "logged")
# Tables that ranks write: the writer's rank becomes a column.
_RANK_TABLES = ("spans", "allocator", "device_times", "probe")
_TIME_COLUMNS = {"time_ns": "time_unix_ns", "begin_ns": "begin_unix_ns", "end_ns": "end_unix_ns"}
_FLAG_BITS = {
    "boundary": tables.BOUNDARY,
    "skipped": tables.SKIPPED,
    "eval": tables.EVAL,
    "failed": tables.FAILED,
    "incomplete": tables.INCOMPLETE,
    "light": tables.LIGHT,
    "counted": tables.COUNTED,
    "another_iterator": tables.ANOTHER_ITERATOR,
}
_CODE_NAMES = {"phase": tables.PHASES, "edge": ("tick", "begin", "end")}
Columns = dict[str, tuple[type[polars.DataType], Callable[[Any], Any]]]
_EVENT_COLUMNS: Columns = {
    "time_unix_ns": (polars.Int64, lambda event: event.unix_ns),
    "event": (polars.String, lambda event: event.event_name),
    "rank": (polars.Int32, lambda event: event.writer.rank if event.writer.rank >= 0 else None),
    "host": (polars.String, lambda event: event.writer.host),
    "pid": (polars.Int64, lambda event: event.writer.pid),
    "facts": (polars.String, lambda event: _format_json(event.facts)),
}
_FINDING_COLUMNS: Columns = {
    "known_unix_ns": (polars.Int64, lambda linked: linked.finding.known_ns),
    "begin_unix_ns": (polars.Int64, lambda linked: linked.finding.begin_ns),
    "end_unix_ns": (polars.Int64, lambda linked: linked.finding.end_ns),
    "step": (polars.Int64, lambda linked: linked.finding.step),
    "finding": (polars.String, lambda linked: linked.finding.name),
    "severity": (polars.String, lambda linked: linked.finding.severity.value),
    "confidence_percent": (polars.Float64, lambda linked: 100 * linked.finding.confidence),
    "ranks": (polars.String, lambda linked: " ".join(map(str, linked.finding.ranks))),
    "headline": (polars.String, lambda linked: linked.finding.headline),
    "details": (polars.String, lambda linked: linked.finding.details),
    "advice": (polars.String, lambda linked: linked.finding.advice),
    "fix": (polars.String, lambda linked: linked.finding.fix),
    "cost_percent": (polars.Float64, lambda linked: 100 * linked.finding.cost),
    "evidence": (polars.String, lambda linked: _format_json(dict(linked.finding.evidence))),
    "because_of": (polars.String, lambda linked: linked.cause and linked.cause.name),
    "because_of_step": (polars.Int64, lambda linked: linked.cause and linked.cause.step),
}
# The peak of the steps after the last reading, and that before the first one, are of no single step.
_PEAK_COLUMNS: Columns = {
    "rank": (polars.Int32, lambda one: one[0].process.rank),
    "host": (polars.String, lambda one: one[0].process.host),
    "phase": (polars.String, lambda one: one[1].phase),
    "step": (polars.Int64, lambda one: one[1].step if one[1].is_in_step else None),
    "last_step": (polars.Int64, lambda one: one[1].last_step if one[1].is_in_step else None),
    "allocated_peak_bytes": (polars.Int64, lambda one: one[1].allocated_bytes),
    "reserved_peak_bytes": (polars.Int64, lambda one: one[1].reserved_bytes),
    "time_unix_ns": (polars.Int64, lambda one: one[1].unix_ns),
}


class WriterColumns(NamedTuple):
    """The columns that are the same in all records of a file."""

    rank: int
    host: str
    offset_ns: int


TextFilter = Callable[[str], str]
Rows = NDArray[Any]
FrameBuilder = Callable[[Recording, TextFilter], Iterator[polars.DataFrame]]


def build_frames(recording: Recording, table: str, text: TextFilter) -> Iterator[polars.DataFrame]:
    """Yield a table of ``TABLES`` as at least one frame: an empty table has columns too. ``text`` escapes every text."""
    build = _COMPUTED.get(table)
    return build(recording, text) if build is not None else _iter_recorded(recording, tables.TABLES[table], text)


def _iter_recorded(recording: Recording, layout: tables.Table, text: TextFilter) -> Iterator[polars.DataFrame]:
    empty = np.empty(0, [(field.name, field.dtype) for field in layout.fields])
    yield _build_records(layout, empty, WriterColumns(-1, "", 0), text)
    for source in sorted(recording.sources[layout.name], key=lambda source: (source.rank, source.host, source.created_ns)):
        writer = WriterColumns(source.rank, text(_clean_text(source.host)), source.offset_ns)
        for number, batch in enumerate(_iter_batches(source.array)):
            rows = _place_readings(recording, source, number * BATCH_ROWS, batch) if layout is tables.ALLOCATOR else batch
            yield _build_records(layout, rows, writer, text)
        source.release_memory()


def _place_readings(recording: Recording, source: Source, begin: int, rows: Rows) -> Rows:
    """Return an allocator's readings from ``begin`` on with the step and the phase at the time of each."""
    rows = rows.copy()
    for name, values in locate_readings(recording, source, begin, begin + len(rows))._asdict().items():
        rows[name] = values.astype(rows[name].dtype)  # no phase has the code that an unknown one becomes
    return rows


def _iter_steps(recording: Recording, text: TextFilter) -> Iterator[polars.DataFrame]:
    yield _build_steps(np.empty(0, STEP_DTYPE))
    yield from (_build_steps(batch) for rows in read_rank_steps(recording) for batch in _iter_batches(rows))


def _iter_step_parts(recording: Recording, text: TextFilter) -> Iterator[polars.DataFrame]:
    return (_build_numeric(batch) for batch in _iter_batches(read_step_parts(recording)))


def _iter_losses(recording: Recording, text: TextFilter) -> Iterator[polars.DataFrame]:
    series = read_logged(recording)
    times = np.unique(np.concatenate([np.empty(0, np.int64), *(one.times for one in series.values())]))
    rows = next((rows for rows in read_rank_steps(recording) if len(rows)), np.empty(0, STEP_DTYPE))
    rank = _repeat_value(int(rows["rank"][0]) if len(rows) else None, polars.Int32, len(times))  # whose steps these are
    steps, columns = np.full(len(times), tables.UNKNOWN), []
    for name in NAMES:
        values: list[float | None] = [None] * len(times)  # NaN is a value that was logged
        logged = series.get(name, NO_VALUES)
        places = times.searchsorted(logged.times)
        steps[places] = find_steps(rows, logged)  # some libraries log the rate apart from the loss
        for place, value in zip(places.tolist(), logged.values.tolist(), strict=True):
            values[place] = value
        columns.append(polars.Series(name, values, dtype=polars.Float64))
    when = (polars.Series("time_unix_ns", times), _build_numbers(steps).alias("step"))
    yield polars.DataFrame([rank.alias("rank"), *when, *columns])


def _iter_peaks(recording: Recording, text: TextFilter) -> Iterator[polars.DataFrame]:
    peaks = [(rank, peak) for rank in read_rank_peaks(recording.at()) for peak in rank.phases]
    yield _build_objects(peaks, _PEAK_COLUMNS, text)


def _iter_events(recording: Recording, text: TextFilter) -> Iterator[polars.DataFrame]:
    return (_build_objects(batch, _EVENT_COLUMNS, text) for batch in _iter_batches(recording.events))


def _iter_findings(recording: Recording, text: TextFilter) -> Iterator[polars.DataFrame]:
    findings = link_findings(list_findings(recording))
    yield _build_objects(findings, _FINDING_COLUMNS, text)


_COMPUTED: dict[str, FrameBuilder] = {
    "steps": _iter_steps,
    "step_parts": _iter_step_parts,
    "peaks": _iter_peaks,
    "loss": _iter_losses,
    "events": _iter_events,
    "findings": _iter_findings,
}
TABLES = (*_COMPUTED, *(name for name in tables.TABLES if name not in _NOT_EXPORTED))
"""The names of all exported tables."""


def _iter_batches(rows: Any) -> Iterator[Any]:
    return (rows[begin : begin + BATCH_ROWS] for begin in range(0, max(1, len(rows)), BATCH_ROWS))


def _build_numeric(rows: Rows) -> polars.DataFrame:
    return polars.DataFrame({name: _build_numbers(rows[name]) for name in rows.dtype.names or ()})


def _build_steps(rows: Rows) -> polars.DataFrame:
    return _build_numeric(rows).insert_column(2, polars.Series("begin_unix_s", rows["begin_unix_ns"] / 1e9))


def _build_records(layout: tables.Table, rows: Rows, writer: WriterColumns, text: TextFilter) -> polars.DataFrame:
    columns: dict[str, polars.Series] = {}
    if layout.name in _RANK_TABLES:
        columns["rank"] = _repeat_value(writer.rank if writer.rank >= 0 else None, polars.Int32, len(rows))
    elif layout is tables.PROCESSES:
        columns["rank"] = polars.Series(rows["rank"])  # -1 is a value: the rank of a launcher
    columns["host"] = _repeat_value(writer.host, polars.String, len(rows))
    for field in layout.fields:
        if field.name in ("pad", *columns):
            continue
        if field.since and field.name not in (rows.dtype.names or ()):
            columns[field.name] = _repeat_value(None, _find_dtype(field), len(rows))
        else:
            columns |= _build_columns(field.name, rows, writer.offset_ns, text)
    return polars.DataFrame(columns)


def _find_dtype(field: tables.Field) -> type[polars.DataType]:
    """Return the type of a column that an older recording lacks."""
    return type(polars.Series(np.empty(0, field.dtype)).dtype)


def _repeat_value(value: Any, kind: type[polars.DataType], count: int) -> polars.Series:
    return polars.Series([value], dtype=kind).new_from_index(0, count)


def _build_columns(name: str, rows: Rows, offset_ns: int, text: TextFilter) -> dict[str, polars.Series]:
    """Return the columns that a field becomes."""
    values = rows[name]
    if name == "flags":
        return {flag: polars.Series(values & bit != 0) for flag, bit in _FLAG_BITS.items()}
    if name in _CODE_NAMES:
        return {name: _name_codes(values, _CODE_NAMES[name])}
    if name in _TIME_COLUMNS:
        duration = {"duration_ns": polars.Series(values - rows["begin_ns"])} if name == "end_ns" else {}
        return {_TIME_COLUMNS[name]: polars.Series(values + offset_ns), **duration}
    return {name: _decode_texts(values, text) if values.dtype.kind == "S" else _build_numbers(values)}


def _build_numbers(values: Rows) -> polars.Series:
    """Return a column that is null where the values are NaN or UNKNOWN."""
    series = polars.Series(np.ascontiguousarray(values))
    if values.dtype.kind == "f":
        return series.fill_nan(None)
    missing = values == tables.UNKNOWN if values.dtype.kind == "i" else np.empty(0)
    return series.set(polars.Series(missing), None) if missing.any() else series


def _decode_texts(values: Rows, text: TextFilter) -> polars.Series:
    listed = values.tolist()
    decoded = {value: text(_clean_text(value)) for value in set(listed)}  # few distinct values
    return polars.Series([decoded[value] for value in listed], dtype=polars.String)


def _name_codes(codes: Rows, names: Sequence[str]) -> polars.Series:
    """Return codes as names; null for a code that only a newer version defines."""
    series = polars.Series(codes.astype(np.uint32))
    is_unknown = series >= len(names)
    if is_unknown.any():
        series = series.set(is_unknown, None)
    return polars.Series(names, dtype=polars.Enum(names)).gather(series)


def _build_objects(items: Sequence[Any], columns: Columns, text: TextFilter) -> polars.DataFrame:
    """Return a row for each event or finding."""

    def read_column(dtype: type[polars.DataType], read: Callable[[Any], Any]) -> polars.Series:
        values = map(read, items)
        cells = [value if value is None or dtype is not polars.String else text(_clean_text(value)) for value in values]
        return polars.Series(cells, dtype=dtype)

    return polars.DataFrame({name: read_column(*column) for name, column in columns.items()})


def _clean_text(value: str | bytes) -> str:
    """Replace characters that cannot be written as UTF-8."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.encode(errors="replace").decode()


def _format_json(facts: dict[str, Any]) -> str:
    try:
        return json.dumps(facts, allow_nan=False)
    except ValueError:
        return json.dumps(_replace_nonfinite(facts))


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, with None."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
