"""The phases of one rank in columns of time: how many seconds of each column it was in each phase.

Short columns are computed from spans: the innermost phase to the nanosecond, with everything within an evaluation counted
as evaluation. Columns with many spans are computed from finished steps: nested phases then count for their outer phase, and
a step's phases are spread evenly over its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes import phases
from zerotop.analysis.processes.thinned import find_thinned_times, mask_moments
from zerotop.analysis.timeline.metrics import FOREVER_NS
from zerotop.analysis.timeline.resample import merge_times
from zerotop.analysis.timeline.step_lane import StepTimes
from zerotop.recording.moments.moment import find_sibling_table
from zerotop.recording.moments.process_exits import read_exits
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

# Spans per column, averaged over the recording, above which finished steps are used.
MANY_SPANS = 48
# A span that begins in a window is among this many that end after it first, or its begin is recorded.
_LATER = 64
_SETTLED_NS = 500_000_000
_EVAL = PHASE_CODE["eval"]


class RankPhases:
    """Seconds that one rank, in all its processes, spent in each phase, shape (phases, columns): a ``ColumnSource``."""

    def __init__(self, recording: Recording, rank: int, steps: Sequence[StepTimes]) -> None:
        """``steps``: of the rank's processes; the caller updates them."""
        self._recording, self._rank, self._steps = recording, rank, steps
        self._sources_by_table: dict[str, tuple[int, list[Source]]] = {}

    def _find_sources(self, table: str) -> list[Source]:
        sources = self._recording.sources[table]
        if self._sources_by_table.get(table, (-1, []))[0] != len(sources):
            self._sources_by_table[table] = len(sources), [source for source in sources if source.rank == self._rank]
        return self._sources_by_table[table][1]

    def list_sources(self) -> list[Source]:
        """Return the rank's tables."""
        return [*self._find_sources("begins"), *self._find_sources("spans")]

    def count_records(self) -> int:
        return sum(len(source.array) for source in self.list_sources())

    def find_final_ns(self) -> int:
        return find_outermost_end(self._find_sources("spans"))

    def choose_base(self, column_ns: int) -> int:
        return column_ns

    def merge_columns(self, table: Floats, factor: int) -> Floats:
        return np.asarray(table.reshape(len(table), -1, factor).sum(axis=-1))

    def make_blank(self, columns: int) -> Floats:
        return np.zeros((len(PHASES), columns))

    def read_columns(self, edges: Ints) -> Floats:
        steps = [times for times in self._steps if len(times.step_borders)]
        if not steps:
            return self._measure_exactly(edges)
        if not self._is_dense(int(edges[1] - edges[0])):
            return self._fill_thinned(self._measure_exactly(edges), edges, steps)
        seconds = sum((times.measure_phases(edges) for times in steps), self.make_blank(len(edges) - 1))
        # Before the first finished step, between processes and after the last step there are only spans.
        for begin_ns, end_ns in _find_gaps([times.step_borders for times in steps]):
            low, high = (int(place) for place in np.searchsorted(edges, (begin_ns, end_ns)))
            clipped = np.clip(edges[max(0, low - 1) : high + 1], begin_ns, end_ns)
            if len(clipped) > 1 and clipped[-1] > clipped[0]:
                seconds[:, max(0, low - 1) : max(0, low - 1) + len(clipped) - 1] += self._measure_exactly(clipped)
        return seconds

    def _fill_thinned(self, seconds: Floats, edges: Ints, steps: Sequence[StepTimes]) -> Floats:
        """Replace the columns in which spans were deleted by those of finished steps."""
        middles = (edges[1:] + edges[:-1]) // 2
        thinned = np.zeros(len(middles), np.bool_)
        for source in self._find_sources("spans"):
            thinned |= mask_moments(self._recording, source, middles)
        if not thinned.any():
            return seconds
        return np.where(thinned, sum((times.measure_phases(edges) for times in steps), np.zeros_like(seconds)), seconds)

    def _is_dense(self, column_ns: int) -> bool:
        spans = [source for source in self._find_sources("spans") if len(source.array)]
        taken = sum(int(source.array["end_ns"][-1]) - int(source.array["begin_ns"][0]) for source in spans)
        taken -= sum(int(np.diff(find_thinned_times(self._recording, source)).sum()) for source in spans)
        return column_ns * sum(len(source.array) for source in spans) > MANY_SPANS * taken

    def _measure_exactly(self, edges: Ints) -> Floats:
        seconds = self._measure_spans(edges)
        for times in self._steps:
            # Phases whose end was lost would last through the gap.
            for gap in times.find_gaps(int(edges[0]), int(edges[-1])):
                seconds -= self._measure_spans(np.clip(edges, *gap))
        return np.maximum(0.0, seconds)

    def _measure_spans(self, edges: Ints) -> Floats:
        exits = read_exits(self._recording.at())
        seconds = self.make_blank(len(edges) - 1)
        for begins in sorted(self._find_sources("begins"), key=lambda source: source.created_ns):
            exit_ns = exits.reported_until(begins) or FOREVER_NS
            spans = find_sibling_table(self._recording, "spans", begins)
            if begins.created_ns <= edges[-1] and exit_ns > edges[0]:
                seconds += _measure_innermost(begins, spans, np.minimum(edges, exit_ns))
        return seconds


def _find_gaps(borders: list[Ints]) -> list[tuple[int, int]]:
    """Return the intervals before, between and after the steps of several processes."""
    known = sorted((int(times[0]), int(times[-1])) for times in borders if len(times))
    begins = [0, *(end for _, end in known)]
    ends = [*(begin for begin, _ in known), FOREVER_NS]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if end > begin]


def _measure_innermost(begins: Source, spans: Source | None, edges: Ints) -> Floats:
    """Return for how many seconds each phase was the innermost one of a process, between each two edges."""
    first, cursor_ns = int(edges[0]), int(edges[-1])
    borders = [edges, begins.unix_times(begins.between(first, cursor_ns))]
    if spans is not None and len(spans.array):
        later = spans.array[: spans.count_until(cursor_ns) + _LATER]
        cursor_ns = max(cursor_ns, int(later["end_ns"][-1]) + spans.offset_ns)
    if not begins.count_until(cursor_ns):
        return np.zeros((len(PHASES), len(edges) - 1))
    closed, opened = phases.read_closed_spans(spans, first, cursor_ns), phases.find_open_phases(begins, spans, cursor_ns)
    evaluations = [(phase.time_ns + begins.offset_ns, FOREVER_NS) for phase in opened if phase.phase == _EVAL]
    if closed is not None and spans is not None:
        span_begins, span_ends = closed["begin_ns"] + spans.offset_ns, closed["end_ns"] + spans.offset_ns
        borders += [span_begins, span_ends]
        rows = np.flatnonzero(closed["phase"] == _EVAL)
        evaluations += zip(span_begins[rows].tolist(), span_ends[rows].tolist(), strict=True)
    times, columns = merge_times(borders), len(edges) - 1
    times = times[times.searchsorted(edges[0]) : times.searchsorted(edges[-1], "right")]
    begun_ns, seconds = times[:-1], (times[1:] - times[:-1]) / 1e9
    codes = phases.resolve_innermost(begins, closed, opened, begun_ns)
    for begin_ns, end_ns in evaluations:
        codes[begun_ns.searchsorted(begin_ns) : begun_ns.searchsorted(end_ns)] = _EVAL
    # The last row collects the time before the first phase, and is dropped.
    # In counted steps no phase is known either.
    rows = np.where(codes < 0, len(PHASES), np.minimum(codes, len(PHASES) - 1)).astype(np.intp)
    cells = rows * columns + edges.searchsorted(begun_ns, "right") - 1
    sums = np.bincount(cells, seconds, (len(PHASES) + 1) * columns)[: len(PHASES) * columns]
    return np.asarray(sums, np.float64).reshape(len(PHASES), columns)


def find_outermost_end(sources: Iterable[Source]) -> int:
    """Return the unix time up to which phases are final: an open outermost phase may still write nested ones.

    Spans are written in order of their ends. Some time is left for a restarted rank.
    """
    latest_ns = 0
    for source in sources:
        depths = source.array["depth"][-_LATER:]
        last = np.flatnonzero(depths == 0)
        if len(last):
            end_ns = int(source.array["end_ns"][len(source.array) - len(depths) + last[-1]])
            latest_ns = max(latest_ns, end_ns + source.offset_ns)
    return latest_ns - _SETTLED_NS if latest_ns else 0


def choose_phase_codes(seconds: Floats) -> NDArray[np.int16]:
    """Return the longest phase of each column, -1 if none is known. ``seconds``: shape (..., phases, columns)."""
    return np.where(seconds.sum(axis=-2) > 0, seconds.argmax(axis=-2), -1).astype(np.int16)
