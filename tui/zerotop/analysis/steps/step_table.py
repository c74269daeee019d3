"""Steps from spans: one row per rank and optimizer step, extended as the recording grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from zerotop.analysis.steps.growable_array import GrowingArray
from zerotop.analysis.steps.missing_steps import MOST_MISSING, erase_measures, find_recorded, insert_missing_steps
from zerotop.analysis.steps.span_sums import DURATION_COLUMNS, SIZE_COLUMNS, SUM_COLUMNS, sum_spans
from zerotop.analysis.steps.step_memory import add_memory
from zerotop.session.reader import Session, Source
from zerotop.session.samples import Floats, Ints, Rows
from zerotop_probe.recording.tables import BOUNDARY, INCOMPLETE, PHASE_CODE, SKIPPED, UNKNOWN

STEP_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        # From the end of the step before (the first: from its first phase) to the end of this one, without evaluation
        # and checkpoints. NaN where the step was not, or not completely, recorded: see ``missing_steps``.
        ("iteration_s", "<f8"),
        ("data_s", "<f8"),
        ("forward_s", "<f8"),
        ("backward_s", "<f8"),
        ("step_s", "<f8"),
        ("optimizer_s", "<f8"),  # the optimizer itself, on either device; part of step_s
        ("eval_s", "<f8"),
        ("checkpoint_s", "<f8"),
        ("micro_steps", "<i4"),
        # Of all its micro-batches; UNKNOWN where not recorded.
        ("rows", "<i8"),
        ("tokens", "<i8"),
        ("skipped", "?"),
        # Exact where the allocator's own peak belongs to this step, else its highest sample.
        ("allocated_peak_bytes", "<i8"),
        ("reserved_peak_bytes", "<i8"),
        ("host_rss_bytes", "<i8"),  # the highest sampled
        ("nvml_process_bytes", "<i8"),  # the highest sampled
        ("begin_unix_ns", "<i8"),
        ("end_unix_ns", "<i8"),
    ]
)

MEMORY_COLUMNS = ("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "nvml_process_bytes")

_STEP_CODE = PHASE_CODE["step"]
_SPANS_AT_ONCE = 16384  # so that intermediate arrays stay in the processor's cache
_PROCESSES_AT_ONCE = 8


class RankSteps:
    """The steps of one rank process, which its :class:`StepTable` extends."""

    def __init__(self, spans: Source) -> None:
        self.source = spans
        self.used_spans = 0  # spans read so far
        self.open_sums = np.zeros(len(SUM_COLUMNS))  # of the step in progress
        self.end_ns = 0  # of the last finished step, on the writer's own clock
        self.last_step = 0  # number of the last finished step; at first of the one before its first phase
        self.missing_count = 0  # rows of steps that were not recorded
        self._rows = GrowingArray(STEP_DTYPE)
        self._recorded: GrowingArray | None = None  # copies of the recorded rows, once some are missing
        self._sorted_count = 0  # rows whose recorded ones are copied

    @property
    def step_rows(self) -> Rows:
        """All finished steps so far, oldest first, with those that were not recorded."""
        return self._rows.rows

    @property
    def recorded_steps(self) -> Rows:
        """All finished steps that were recorded completely, oldest first."""
        if self._sorted_count < len(self._rows):
            rows = self.step_rows
            recorded = find_recorded(fresh := rows[self._sorted_count :])
            if self._recorded is None and not recorded.all():
                self._recorded = GrowingArray(STEP_DTYPE)
                self._recorded.add_rows(self._sorted_count)[:] = rows[: self._sorted_count]
            if self._recorded is not None:
                self._recorded.add_rows(int(recorded.sum()))[:] = fresh[recorded]
            self._sorted_count = len(rows)
        return self.step_rows if self._recorded is None else self._recorded.rows

    def reserve_steps(self, count: int) -> None:
        """Allocate room for so many more steps."""
        self._rows.reserve_rows(count)

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
    if len(pieces) > 1:  # joined as bytes: np.concatenate copies field by field, which takes thirty times longer
        spans = np.frombuffer(b"".join([piece.tobytes() for _, piece in pieces]), spans.dtype)
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
        offsets = np.array([source.offset_ns for source in sources])[closing_process]
        rows["begin_unix_ns"] = begins + offsets
        rows["end_unix_ns"] = ends + offsets
        _add_times(rows, ends - begins, loading_ns, np.delete(sums, in_progress, axis=0))
        rows["iteration_s"][spans["flags"][closing] & INCOMPLETE != 0] = np.nan
    return taken


def _add_times(rows: Rows, passed_ns: Ints, loading_ns: Floats, sums: Floats) -> None:
    columns = dict(zip(SUM_COLUMNS, sums.T, strict=True))
    rows["iteration_s"] = (passed_ns - columns["eval_s"] - columns["checkpoint_s"]) / 1e9 + loading_ns / 1e9
    for name in DURATION_COLUMNS:
        rows[name] = columns[name] / 1e9
    rows["micro_steps"] = columns["micro_steps"]
    for name in SIZE_COLUMNS:
        rows[name] = np.where(columns[f"{name} known"] > 0, columns[name], UNKNOWN)


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
    """The steps of all rank processes of a session, extended by :meth:`update`."""

    def __init__(self, session: Session, *, memory: bool = True) -> None:
        """``memory``: fill in MEMORY_COLUMNS, which takes as long as all others; otherwise they are UNKNOWN."""
        self._session = session
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
        sources, before = self._session.sources["spans"], self.process_count
        finished = False
        for begin in range(0, len(sources), _PROCESSES_AT_ONCE):
            for pieces in self._iter_fresh(sources[begin : begin + _PROCESSES_AT_ONCE], until_ns):
                for steps, rows in _take_spans(pieces):
                    self._store_rows(steps, rows)
                    finished = True
        return finished or self.process_count > before

    def _iter_fresh(self, sources: Iterable[Source], until_ns: int | None) -> Iterator[list[_ProcessSpans]]:
        """Yield new spans up to ``until_ns``, about _SPANS_AT_ONCE together."""
        pieces: list[_ProcessSpans] = []
        room = _SPANS_AT_ONCE
        for source in sources:
            steps = self._processes.get(source) or self._processes.setdefault(source, RankSteps(source))
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
                self._session.release_memory()
        if pieces:
            yield pieces

    def _store_rows(self, steps: RankSteps, rows: Rows) -> None:
        count = len(rows)
        stored = steps.add_rows(insert_missing_steps(rows, steps.last_step, MOST_MISSING - steps.missing_count))
        steps.last_step = int(stored["step"][-1])
        steps.missing_count += len(stored) - count
        if self._with_memory:
            add_memory(self._session, steps.source, stored)
        else:
            for name in MEMORY_COLUMNS:
                stored[name] = UNKNOWN
        erase_measures(stored)


def read_rank_steps(session: Session) -> list[Rows]:
    """Return all finished steps of each rank process, by rank and then by the time of their engines."""
    table = StepTable(session)
    table.update()
    return [process.step_rows for process in sorted(table.rank_steps, key=lambda process: process.source.rank)]


def read_steps(session: Session) -> Rows:
    """Return all finished steps of a session, by rank and then in order (dtype STEP_DTYPE)."""
    return np.concatenate([np.empty(0, STEP_DTYPE), *read_rank_steps(session)])
