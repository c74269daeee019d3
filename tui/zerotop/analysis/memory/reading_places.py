"""Where in training a rank's allocator was read: the step and the phase at the time of each reading.

The thread that reads it between boundaries knows only the phases in progress: neither those of counted steps, nor those
that are recorded at the end of a step. The spans have the ends of all steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.formatting import format_seconds
from zerotop.analysis.processes.phases import find_phase_name
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import find_sibling_table
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, END, INCOMPLETE, PHASE_CODE, TICK, UNKNOWN

Rows = NDArray[Any]

# Spans or begins to look through for the phases around the first reading, and for the end of the step of the last one.
_TAIL = 4096
_AT_END_S = 0.001  # a reading so soon before the end of a step is of that end: an edge so soon after it is not read again
_OTHER, _STEP, _INIT = (PHASE_CODE[name] for name in ("other", "step", "init"))
_COLUMNS = ("step", "micro_step", "phase")
_NO_PHASES = np.empty(0, [(name, np.int64) for name in ("begin_ns", "end_ns", "time_ns", "depth", *_COLUMNS)])


class WindowSteps(NamedTuple):
    """The steps between two times."""

    first: int
    last: int  # the last that is known to have begun
    is_open: bool = False  # the time reaches beyond the end of the last one


class Places(NamedTuple):
    """Columns of readings: as recorded, or at the time of each; UNKNOWN where not known."""

    step: Ints
    micro_step: Ints
    phase: Ints


def find_steps_between(recording: Recording, source: Source, begin_ns: int, end_ns: int) -> WindowSteps | None:
    """Return the steps between two times on the writer's own clock; None where no end of a step is near."""
    spans = _read_spans(recording, source, begin_ns, end_ns)
    ended = _select_ends(spans)
    if not len(ended):
        return None
    places = np.searchsorted(ended["end_ns"], [begin_ns, end_ns - 1], "right")
    if places[1] < len(ended):
        return WindowSteps(*ended["step"][places].tolist())
    final = ended[-1]
    last = int(final["step"])
    begun = (spans["begin_ns"] >= final["end_ns"]) & (spans["begin_ns"] < end_ns) & (spans["step"] == last + 1)
    has_begun = bool(begun.any())
    last += has_begun
    first = int(ended["step"][places[0]]) if places[0] < len(ended) else last
    return WindowSteps(first, last, is_open=not has_begun)


def locate_readings(recording: Recording, source: Source, begin: int, end: int) -> Places:
    """Return where a range of an allocator's readings were taken."""
    rows = source.array[begin:end]
    places = Places(*(rows[name].astype(np.int64) for name in _COLUMNS))
    unseen = np.flatnonzero((rows["edge"] == TICK) & (rows["phase"] == _OTHER))
    if not len(unseen):
        return places
    times: Ints = rows["time_ns"][unseen].astype(np.int64)
    spans = _read_spans(recording, source, int(times[0]), int(times[-1]))
    steps, is_complete = _number_steps(spans, times)
    found = Places(steps, np.full(len(times), UNKNOWN), np.where(is_complete, _OTHER, UNKNOWN))
    around_ns = np.zeros(len(times), np.int64)  # begin of the phase around each
    for depth in range(int(spans["depth"].max(initial=0)) + 1):
        intervals = PhaseIntervals(recording, source, begin, end, depth)
        index = intervals.find(times)
        inside = np.flatnonzero(index >= 0)
        inside = inside[intervals.begins[index[inside]] >= around_ns[inside]]
        around_ns[:] = np.iinfo(np.int64).max
        around_ns[inside] = intervals.begins[index[inside]]
        for column, values in zip(found, intervals.places, strict=True):
            column[inside] = values[index[inside]]
    for column, values in zip(places, found, strict=True):
        column[unseen] = values
    return places


def describe_reading(at: At, source: Source, step: int) -> str:
    """Return a sentence about when an allocator was last read, at the end of a step; "" where it was read at that end."""
    count = source.count_until(at.cursor_ns)
    if not count:
        return ""
    row = source.array[count - 1]
    seconds = (at.cursor_ns - int(row["time_ns"]) - source.offset_ns) / 1e9
    is_of_step = int(row["phase"]) == _STEP and int(row["edge"]) == END and int(row["step"]) == step
    if is_of_step or seconds < _AT_END_S:
        return ""
    (number,), _, (code,) = (column.tolist() for column in locate_readings(at.recording, source, count - 1, count))
    phase = f" in {find_phase_name(code).replace('_', ' ')}" if code not in (_OTHER, _STEP, UNKNOWN) else ""
    other_step = "" if number in (step, UNKNOWN) else f" of step {number}" if phase else f" in step {number}"
    when = f"{format_seconds(seconds)} before the end of step {step}"
    where = f",{phase}{other_step}" if phase or other_step else ""
    return f"PyTorch's allocator was last read {when}{where}: what it reserved and allocated is of that moment."


def _number_steps(spans: Rows, times: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the step in progress at each time, or UNKNOWN, and whether all phases of it are among the spans."""
    ended = _select_ends(spans)
    if not len(ended):
        return np.full(len(times), UNKNOWN), np.ones(len(times), np.bool_)
    is_complete = ended["flags"] & (COUNTED | INCOMPLETE) == 0
    numbers: Ints = ended["step"].astype(np.int64)
    # Of the first step nothing ends before it; steps whose end was lost would be taken for the next one.
    own = spans[(spans["step"] == numbers[0]) & (spans["phase"] != _INIT)]
    is_next = np.diff(numbers, prepend=numbers[0] - 1) == 1
    after = np.searchsorted(ended["end_ns"], times, "right")
    known = np.minimum(after, len(ended) - 1)
    steps = np.where((after < len(ended)) & is_next[known] & (times >= own["begin_ns"].min()), numbers[known], UNKNOWN)
    return steps, is_complete[known]


def find_last_ended(at: At, source: Source) -> int | None:
    """Return the last step that a rank had finished at the cursor; None where no end of a step is near."""
    spans = find_sibling_table(at.recording, "spans", source)
    ended = _select_ends(spans.until(at.cursor_ns)[-_TAIL:]) if spans is not None else None
    return int(ended["step"][-1]) if ended is not None and len(ended) else None


def _select_ends(spans: Rows) -> Rows:
    ended: Rows = spans[(spans["phase"] == _STEP) & (spans["flags"] & BOUNDARY != 0) & (spans["engine"] == 0)]
    return ended


def _read_spans(recording: Recording, source: Source, begin_ns: int, end_ns: int) -> Rows:
    """Return the spans of the same process around two times on its own clock."""
    table = find_sibling_table(recording, "spans", source)
    if table is None:
        return np.empty(0, [*_NO_PHASES.dtype.descr, ("flags", np.int64), ("engine", np.int64)])
    offset_ns = source.offset_ns
    return table.between(begin_ns + offset_ns, end_ns + offset_ns, rows_before=_TAIL, rows_after=_TAIL)


class PhaseIntervals:
    """The phases of one depth, 0 is outermost, around a range of an allocator's records, on the writer's own clock."""

    def __init__(self, recording: Recording, source: Source, begin: int, end: int, depth: int = 0) -> None:
        spans = _read_phases(recording, "spans", source, begin, end, depth)
        opened = _read_phases(recording, "begins", source, begin, end, depth)
        opened = opened[~_is_among(opened["time_ns"], np.sort(spans["begin_ns"], kind="stable"))]
        # A phase in progress at the end of the range has no end.
        never = np.full(len(opened), np.iinfo(np.int64).max)
        begins: Ints = np.concatenate([spans["begin_ns"], opened["time_ns"]]).astype(np.int64)
        order = np.argsort(begins, kind="stable")
        self.begins = begins[order]
        self._ends: Ints = np.concatenate([spans["end_ns"], never]).astype(np.int64)[order]
        self.places = Places(*(np.concatenate([spans[name], opened[name]]).astype(np.int64)[order] for name in _COLUMNS))
        self._edges = np.sort(np.concatenate([self.begins, self._ends]), kind="stable")  # fast where parts are in order

    def find(self, moments: Ints) -> Ints:
        """Return the index of the phase at each moment; -1 between phases."""
        if not len(self.begins):
            return np.full(len(moments), -1)
        index = np.searchsorted(self.begins, moments, "right") - 1
        return np.where((index >= 0) & (moments < self._ends[index]), index, -1)

    def count_edges(self, begins: Ints, ends: Ints) -> Ints:
        """Return how many phases begin or end strictly between each begin and end."""
        count = np.searchsorted(self._edges, ends, "left") - np.searchsorted(self._edges, begins, "right")
        return np.asarray(np.maximum(0, count), np.int64)


def _is_among(values: Ints, known: Ints) -> NDArray[np.bool_]:
    """Return which values are in ``known``, which is sorted. Several times as fast as ``np.isin`` for times."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    found: NDArray[np.bool_] = known[np.minimum(known.searchsorted(values), len(known) - 1)] == values
    return found


def _read_phases(recording: Recording, name: str, source: Source, begin: int, end: int, depth: int) -> Rows:
    """Return the phases of a depth, of a table of the same process, from a while before a range of records to its end."""
    table = find_sibling_table(recording, name, source)
    if table is None:
        return _NO_PHASES
    first_ns, last_ns = source.unix_times(source.array[[max(0, begin - 1), end - 1]]).tolist()
    rows: Rows = table.between(first_ns, last_ns, rows_before=_TAIL)
    found: Rows = rows[rows["depth"] == depth]
    return found
