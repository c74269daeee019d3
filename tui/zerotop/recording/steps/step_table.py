"""Steps from spans: one row per rank and optimizer step, extended as the recording grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.record_check import join_rows
from zerotop.recording.samples import Ints, Rows
from zerotop.recording.steps.folded_steps import FOLDED_DTYPE, fill_rows, has_gaps
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop.recording.steps.missing_steps import MOST_MISSING, erase_measures, find_recorded, insert_missing_steps
from zerotop.recording.steps.span_sums import SIZE_COLUMNS, SUM_COLUMNS, add_times, sum_spans
from zerotop.recording.steps.step_dtype import MEMORY_COLUMNS, STEP_DTYPE, erase_phases, has_phases
from zerotop.recording.steps.step_memory import add_memory
from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, INCOMPLETE, LIGHT, PHASE_CODE, SKIPPED, UNKNOWN

if TYPE_CHECKING:
    from zerotop.recording.reader import Recording

_STEP_CODE = PHASE_CODE["step"]
_SPANS_AT_ONCE = 16384  # so that intermediate arrays stay in the processor's cache
_PROCESSES_AT_ONCE = 64


class _Selection:
    """Those of a growing number of steps that a mask selects; they are copied once some are left out."""

    def __init__(self, mask: Callable[[Rows], NDArray[np.bool_]]) -> None:
        self._mask = mask
        self._copies: GrowingArray | None = None
        self._sorted_count = 0  # rows of which the selected ones are copied

    def select(self, rows: Rows) -> Rows:
        """Return the selected ones of these rows, which begin with those of the last call."""
        if self._sorted_count < len(rows):
            selected = self._mask(fresh := rows[self._sorted_count :])
            if self._copies is None and not selected.all():
                self._copies = GrowingArray(STEP_DTYPE)
                self._copies.add_rows(self._sorted_count)[:] = rows[: self._sorted_count]
            if self._copies is not None:
                self._copies.add_rows(int(selected.sum()))[:] = fresh[selected]
            self._sorted_count = len(rows)
        return rows if self._copies is None else self._copies.rows


class RankSteps:
    """The steps of one rank process, which its :class:`StepTable` extends."""

    def __init__(self, spans: Source, folded: Rows) -> None:
        """``folded``: records of steps whose spans need not be read any more."""
        self.source = spans
        self.used_spans = 0  # spans read so far
        self.open_sums = np.zeros(len(SUM_COLUMNS))  # of the step in progress
        self.end_ns = 0  # of the last finished step, on the writer's own clock
        self.last_step = 0  # number of the last finished step; at first of the one before its first phase
        self.missing_count = 0  # rows of steps that were not recorded
        self._rows = GrowingArray(STEP_DTYPE)
        self._recorded = _Selection(find_recorded)
        self._phased = _Selection(has_phases)
        self._folded = folded
        self._used_folded = 0
        if len(folded):
            self.used_spans = spans.count_until(int(folded["end_ns"][-1]) + spans.offset_ns)

    @property
    def step_rows(self) -> Rows:
        """All finished steps so far, oldest first, including steps that were not recorded."""
        return self._rows.rows

    @property
    def recorded_steps(self) -> Rows:
        """All finished steps that were recorded completely, oldest first."""
        return self._recorded.select(self.step_rows)

    @property
    def phased_steps(self) -> Rows:
        """All finished steps whose phases were recorded completely, oldest first, without counted ones."""
        return self._phased.select(self.step_rows)

    def reserve_steps(self, count: int) -> None:
        """Allocate room for more steps."""
        self._rows.reserve_rows(count)

    def add_folded(self, until_ns: int | None) -> bool:
        """Add the folded steps finished until a unix time, all of them if it is None; return whether there are any."""
        rows = self._folded[self._used_folded :]
        if until_ns is not None:
            rows = rows[: np.searchsorted(rows["end_ns"], until_ns - self.source.offset_ns, "right")]
        if not len(rows):
            return False
        previous_ns, last_step = self.end_ns, self.last_step
        if not self._used_folded:
            previous_ns, last_step = int(rows["begin_ns"][0]), int(rows["step"][0] - rows["steps"][0])
        self._rows.reserve_rows(len(rows) + max(_SPANS_AT_ONCE, len(rows) // 4))  # later steps need no copy of these
        if has_gaps(rows, last_step):
            filled = np.empty(len(rows), STEP_DTYPE)
            fill_rows(filled, rows, previous_ns, self.source)
            erase_measures(self.add_with_missing(filled, last_step))
        else:
            fill_rows(self._rows.add_rows(len(rows)), rows, previous_ns, self.source)
        self._used_folded += len(rows)
        self.end_ns, self.last_step = int(rows["end_ns"][-1]), int(rows["step"][-1])
        return True

    def add_with_missing(self, rows: Rows, last_step: int) -> Rows:
        """Add finished steps after the step ``last_step``, and rows for missing ones; return the stored rows."""
        stored = self.add_rows(insert_missing_steps(rows, last_step, MOST_MISSING - self.missing_count))
        self.missing_count += len(stored) - len(rows)
        return stored

    def add_rows(self, rows: Rows) -> Rows:
        """Add finished steps; return the stored rows."""
        added = self._rows.add_rows(len(rows))
        added[:] = rows
        return added


_ProcessSpans = tuple[RankSteps, Rows]  # a process and some of its spans or steps


def _take_spans(pieces: Sequence[_ProcessSpans]) -> list[_ProcessSpans]:
    """Add new spans to processes; return the steps that they finish.

    All processes at once: a frame has so few spans of each that one array for all is as fast as an array for one.
    """
    spans = pieces[0][1]
    if len(pieces) > 1:
        spans = join_rows([piece for _, piece in pieces])
    closing = _find_closing(spans)
    if not len(closing) and len(spans) < _SPANS_AT_ONCE:
        return []
    counts = [len(piece) for _, piece in pieces]
    process_index = np.repeat(np.arange(len(pieces)), counts)
    finished = np.bincount(process_index[closing], minlength=len(pieces))
    sums = sum_spans(spans, closing, process_index)
    in_progress = (finished + 1).cumsum() - 1
    sums[in_progress - finished] += [steps.open_sums for steps, _ in pieces]
    ends = spans["end_ns"][closing]
    begins, loading_ns = np.append(np.int64(0), ends[:-1]), np.zeros(len(ends))
    taken: list[_ProcessSpans] = []
    rows = np.empty(len(closing), STEP_DTYPE)
    first = before = 0
    for (steps, _), open_sums, count, done in zip(pieces, sums[in_progress], counts, finished.tolist(), strict=True):
        if done:
            if not len(steps.step_rows):
                first_spans = steps.source.array[: steps.used_spans + int(closing[first]) - before + 1]
                steps.end_ns, loading_ns[first], steps.last_step = _find_begin(first_spans)
            begins[first], steps.end_ns = steps.end_ns, int(ends[first + done - 1])
            taken.append((steps, rows[first : first + done]))
        steps.open_sums = open_sums
        steps.used_spans += count
        first, before = first + done, before + count
    if taken:
        sources = [steps.source for steps, _ in pieces]
        closing_process = process_index[closing]
        rows["rank"] = np.array([source.rank for source in sources])[closing_process]
        rows["step"] = spans["step"][closing]
        rows["skipped"] = spans["flags"][closing] & SKIPPED != 0
        rows["light"] = spans["flags"][closing] & LIGHT != 0
        rows["counted"] = spans["flags"][closing] & COUNTED != 0
        rows["steps"] = 1
        offsets = np.array([source.offset_ns for source in sources])[closing_process]
        rows["begin_unix_ns"] = begins + offsets
        rows["end_unix_ns"] = ends + offsets
        columns = dict(zip(SUM_COLUMNS, np.delete(sums, in_progress, axis=0).T, strict=True))
        add_times(rows, ends - begins, loading_ns, columns)
        rows["micro_steps"] = columns["micro_steps"]
        for name in SIZE_COLUMNS:
            rows[name] = np.where(columns[f"{name} known"] > 0, columns[name], UNKNOWN)
        erase_phases(rows)
        rows["iteration_s"][spans["flags"][closing] & INCOMPLETE != 0] = np.nan
    return taken


def _find_closing(spans: Rows) -> Ints:
    """Return the indices of the spans that end an optimizer step."""
    steps: Ints = (spans["phase"] == _STEP_CODE).nonzero()[0]
    if not len(steps):  # true for every other frame of a running job
        return steps
    closing: Ints = steps[(spans["flags"][steps] & BOUNDARY != 0) & (spans["engine"][steps] == 0)]
    return closing


def _find_begin(spans: Rows) -> tuple[int, int, int]:
    """Find the first iteration of a process, after making the engine.

    Returns:
        Its begin, the nanoseconds of loading before it, and the number of the step before it.
    """
    load = spans["phase"] == PHASE_CODE["checkpoint_load"]
    first = spans[~load & (spans["phase"] != PHASE_CODE["init"])]
    begin = first["begin_ns"].min()
    before = spans[load & (spans["depth"] == 0) & (spans["end_ns"] <= begin)]
    own = first[first["engine"] == 0]
    number = own["step"][own["begin_ns"].argmin()]
    return int(begin), int((before["end_ns"] - before["begin_ns"]).sum()), int(number) - 1


class StepTable:
    """The steps of all rank processes of a recording, extended by :meth:`update`."""

    def __init__(self, recording: Recording, *, memory: bool = True) -> None:
        """``memory``: fill in MEMORY_COLUMNS, which takes as long as all others; otherwise they are UNKNOWN."""
        self._recording = recording
        self._with_memory = memory
        self._processes: dict[Source, RankSteps] = {}

    @property
    def process_count(self) -> int:
        """Number of rank processes."""
        return len(self._processes)

    @property
    def rank_steps(self) -> list[RankSteps]:
        """The rank processes, with or without finished steps, by the time of their engines."""
        return sorted(self._processes.values(), key=lambda process: process.source.created_ns)

    def update(self, until_ns: int | None = None) -> bool:
        """Add the spans read since the last call, up to ``until_ns``; return whether there is a new step or process."""
        sources, before = self._recording.sources["spans"], self.process_count
        finished = False
        for source in sources:
            finished |= self._find_process(source).add_folded(until_ns)
        for begin in range(0, len(sources), _PROCESSES_AT_ONCE):
            for pieces in self._iter_fresh(sources[begin : begin + _PROCESSES_AT_ONCE], until_ns):
                for steps, rows in _take_spans(pieces):
                    self._store_rows(steps, rows)
                    finished = True
        return finished or self.process_count > before

    def _find_process(self, source: Source) -> RankSteps:
        process = self._processes.get(source)
        if process is None:
            folded = self._recording.find_sibling("folded", source)
            rows = np.empty(0, FOLDED_DTYPE) if folded is None else folded.array
            process = self._processes[source] = RankSteps(source, rows)
        return process

    def _iter_fresh(self, sources: Iterable[Source], until_ns: int | None) -> Iterator[list[_ProcessSpans]]:
        """Yield new spans up to ``until_ns``, about _SPANS_AT_ONCE together."""
        pieces: list[_ProcessSpans] = []
        room = _SPANS_AT_ONCE
        for source in sources:
            steps = self._find_process(source)
            spans = source.array[steps.used_spans : None if until_ns is None else source.count_until(until_ns)]
            if len(spans) > _SPANS_AT_ONCE:
                steps.reserve_steps(len(_find_closing(spans)))
            for begin in range(0, len(spans), _SPANS_AT_ONCE):
                piece = spans[begin : begin + _SPANS_AT_ONCE]
                if pieces and (len(piece) > room or piece.dtype != pieces[0][1].dtype):
                    yield pieces
                    pieces, room = [], _SPANS_AT_ONCE
                pieces.append((steps, piece))
                room -= len(piece)
            if len(spans) > _SPANS_AT_ONCE:
                (self._recording if self._with_memory else source).release_memory()
        if pieces:
            yield pieces

    def _store_rows(self, steps: RankSteps, rows: Rows) -> None:
        stored = steps.add_with_missing(rows, steps.last_step)
        steps.last_step = int(stored["step"][-1])
        if self._with_memory:
            add_memory(self._recording, steps.source, stored)
        else:
            for name in MEMORY_COLUMNS:
                stored[name] = UNKNOWN
        erase_measures(stored)


def read_rank_steps(recording: Recording) -> list[Rows]:
    """Return all finished steps of each rank process, by rank and then by the time of their engines."""
    table = StepTable(recording)
    table.update()
    return [process.step_rows for process in sorted(table.rank_steps, key=lambda process: process.source.rank)]


def read_steps(recording: Recording) -> Rows:
    """Return all finished steps of a recording, by rank and then in order (dtype STEP_DTYPE)."""
    return np.concatenate([np.empty(0, STEP_DTYPE), *read_rank_steps(recording)])
