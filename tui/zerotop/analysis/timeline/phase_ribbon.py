"""The phases of one rank in columns of time: how many seconds of each column it was in each phase.

Where columns are short, spans tell, to the nanosecond, which phase was the innermost; all that lies in an evaluation counts
as evaluation. Where a column holds many spans, the
finished steps tell: what is nested then counts for what it lies in, and a step's phases are spread over its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes import phases
from zerotop.analysis.processes.alive_ranks import find_sibling_table
from zerotop.analysis.processes.process_exits import read_exits
from zerotop.analysis.timeline.metrics import FOREVER_NS
from zerotop.analysis.timeline.resample import merge_times
from zerotop.analysis.timeline.step_lane import StepTimes
from zerotop.session.reader import Session, Source
from zerotop.session.samples import Floats, Ints
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

# Spans to a column, on an average of the whole recording, from which on finished steps tell.
MANY_SPANS = 48
# Spans that begin in a piece of time end within so many of those that end in it, or have told of their begin.
_LATER = 64
_SETTLED_NS = 500_000_000
_EVAL = PHASE_CODE["eval"]


class RankPhases:
    """Tells the seconds that one rank, in all processes it was, spent in each phase: shape (phases, columns)."""

    def __init__(self, session: Session, rank: int, steps: Sequence[StepTimes]) -> None:
        """``steps``: of the rank's processes, kept up to date by others."""
        self._session, self._rank, self._steps = session, rank, steps
        self._sources_by_table: dict[str, tuple[int, list[Source]]] = {}

    def _find_sources(self, table: str) -> list[Source]:
        everybody = self._session.sources[table]
        if self._sources_by_table.get(table, (-1, []))[0] != len(everybody):
            self._sources_by_table[table] = len(everybody), [source for source in everybody if source.rank == self._rank]
        return self._sources_by_table[table][1]

    def list_sources(self) -> list[Source]:
        """The tables that tell of it."""
        return [*self._find_sources("begins"), *self._find_sources("spans")]

    def count_records(self) -> int:
        """See ``timeline_blocks.Teller``, as for all that follow."""
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
        if not steps or not self._is_dense(int(edges[1] - edges[0])):
            return self._measure_exactly(edges)
        seconds = sum((times.measure_phases(edges) for times in steps), self.make_blank(len(edges) - 1))
        # Before the first finished step, between two processes and after the last step there are only spans.
        for begin_ns, end_ns in _find_gaps([times.step_borders for times in steps]):
            low, high = (int(place) for place in np.searchsorted(edges, (begin_ns, end_ns)))
            clipped = np.clip(edges[max(0, low - 1) : high + 1], begin_ns, end_ns)
            if len(clipped) > 1 and clipped[-1] > clipped[0]:
                seconds[:, max(0, low - 1) : max(0, low - 1) + len(clipped) - 1] += self._measure_exactly(clipped)
        return seconds

    def _is_dense(self, column_ns: int) -> bool:
        spans = [source for source in self._find_sources("spans") if len(source.array)]
        taken = sum(int(source.array["end_ns"][-1]) - int(source.array["begin_ns"][0]) for source in spans)
        return column_ns * sum(len(source.array) for source in spans) > MANY_SPANS * taken

    def _measure_exactly(self, edges: Ints) -> Floats:
        ends = read_exits(self._session)
        seconds = self.make_blank(len(edges) - 1)
        for begins in sorted(self._find_sources("begins"), key=lambda source: source.created_ns):
            over_ns = ends.reported_until(begins) or FOREVER_NS
            mine = find_sibling_table(self._session, "spans", begins)
            if begins.created_ns <= edges[-1] and over_ns > edges[0]:
                seconds += _measure_innermost(begins, mine, np.minimum(edges, over_ns))
        return seconds


def _find_gaps(borders: list[Ints]) -> list[tuple[int, int]]:
    """What lies between the steps of several processes, before and after."""
    known = sorted((int(times[0]), int(times[-1])) for times in borders if len(times))
    begins = [0, *(end for _, end in known)]
    ends = [*(begin for begin, _ in known), FOREVER_NS]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if end > begin]


def _measure_innermost(begins: Source, spans: Source | None, edges: Ints) -> Floats:
    """Seconds in which each phase was the innermost of one process, between each two edges."""
    first, cursor_ns = int(edges[0]), int(edges[-1])
    borders = [edges, begins.unix_times(begins.between(first, cursor_ns))]
    if spans is not None and len(spans.array):
        upto = min(len(spans.array), spans.count_until(cursor_ns) + _LATER)
        cursor_ns = max(cursor_ns, int(spans.array["end_ns"][upto - 1]) + spans.offset_ns)
    if not begins.count_until(cursor_ns):
        return np.zeros((len(PHASES), len(edges) - 1))
    ended, begun = phases.read_closed_spans(spans, first, cursor_ns), phases.find_open_phases(begins, spans, cursor_ns)
    evaluations = [(one.time_ns + begins.offset_ns, FOREVER_NS) for one in begun if one.phase == _EVAL]
    if ended is not None and spans is not None:
        ends = ended["end_ns"] + spans.offset_ns
        borders += [ended["begin_ns"] + spans.offset_ns, ends]
        for row in np.flatnonzero(ended["phase"] == _EVAL).tolist():
            evaluations.append((int(borders[-2][row]), int(ends[row])))
    times, columns = merge_times(borders), len(edges) - 1
    times = times[times.searchsorted(edges[0]) : times.searchsorted(edges[-1], "right")]
    begun_ns, seconds = times[:-1], (times[1:] - times[:-1]) / 1e9
    codes = phases.resolve_innermost(begins, ended, begun, begun_ns)
    for begin_ns, end_ns in evaluations:
        codes[begun_ns.searchsorted(begin_ns) : begun_ns.searchsorted(end_ns)] = _EVAL
    # The last place is for what is not told: before the first phase nobody knows what the rank did.
    kinds = np.where(codes < 0, len(PHASES), np.minimum(codes, len(PHASES) - 1)).astype(np.intp)
    places = kinds * columns + edges.searchsorted(begun_ns, "right") - 1
    found = np.bincount(places, seconds, (len(PHASES) + 1) * columns)[: len(PHASES) * columns]
    return np.asarray(found, np.float64).reshape(len(PHASES), columns)


def find_outermost_end(sources: Iterable[Source]) -> int:
    """Up to when phases are known for good: nested ones may be told of when the outermost one ends.

    Spans are written in the order in which they end; a little is left for a rank that was started again.
    """
    found = 0
    for source in sources:
        depths = source.array["depth"][-_LATER:]
        last = np.flatnonzero(depths == 0)
        if len(last):
            found = max(found, int(source.array["end_ns"][len(source.array) - len(depths) + last[-1]]) + source.offset_ns)
    return found - _SETTLED_NS if found else 0


def choose_phase_codes(seconds: Floats) -> NDArray[np.int16]:
    """The phase that takes most of each column, -1 where none is known; ``seconds`` is of shape (..., phases, columns)."""
    return np.where(seconds.sum(axis=-2) > 0, seconds.argmax(axis=-2), -1).astype(np.int16)
