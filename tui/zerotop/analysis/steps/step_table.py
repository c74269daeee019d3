"""From spans to steps: one row per rank and optimizer step, built once and extended as the recording grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.steps.growable_array import GrowingArray
from zerotop.analysis.steps.span_sums import DURATION_COLUMNS, SIZE_COLUMNS, SUM_COLUMNS, sum_spans
from zerotop.analysis.steps.step_memory import add_memory
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE, SKIPPED, UNKNOWN

Rows = NDArray[Any]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STEP_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        # From the end of the step before (the first: from its first phase) to the end of this one, less what lay
        # between in evaluation and checkpoints.
        ("iteration_s", "<f8"),
        ("data_s", "<f8"),
        ("forward_s", "<f8"),
        ("backward_s", "<f8"),
        ("step_s", "<f8"),
        ("optimizer_s", "<f8"),  # within step_s: the optimizer itself, on whichever device
        ("eval_s", "<f8"),
        ("checkpoint_s", "<f8"),
        ("micro_steps", "<i4"),
        # Of all its micro-batches; UNKNOWN where no forward said.
        ("rows", "<i8"),
        ("tokens", "<i8"),
        ("skipped", "?"),
        # Exact where the allocator's own peak is of this step, else the highest of its samples.
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
# Spans taken in at once. What is computed of them stays in the processor's cache.
_SPANS_AT_ONCE = 16384
_PROCESSES_AT_ONCE = 8  # processes brought up to date together


class RankSteps:
    """The steps of one rank process, which its :class:`StepTable` extends."""

    def __init__(self, spans: Source) -> None:
        self.source = spans
        self.used_spans = 0  # spans taken in
        self.open_sums = np.zeros(len(SUM_COLUMNS))  # what those in the step in progress add up to
        self.end_ns = 0  # of the last finished step, on the writer's own clock
        self._rows = GrowingArray(STEP_DTYPE)

    @property
    def step_rows(self) -> Rows:
        """All finished steps so far, oldest first."""
        return self._rows.rows

    def reserve_steps(self, count: int) -> None:
        """So many steps are going to be added."""
        self._rows.reserve_rows(count)

    def add_rows(self, rows: Rows) -> Rows:
        """Some that were finished since; returns them where they are kept."""
        added = self._rows.add_rows(len(rows))
        added[:] = rows
        return added


_ProcessSpans = tuple[RankSteps, Rows]  # a process and spans of it that were not taken in yet


def _take_spans(pieces: Sequence[_ProcessSpans]) -> list[_ProcessSpans]:
    """Takes in fresh spans of processes; returns the steps that they finished, of each process that did.

    All together: a frame brings a process so few that an array of its own costs as much as one for all.
    """
    spans = pieces[0][1]
    if len(pieces) > 1:  # as bytes: where NumPy joins records it looks into each field, which takes thirty times longer
        spans = np.frombuffer(b"".join([piece.tobytes() for _, piece in pieces]), spans.dtype)
    closing = _find_closing(spans)
    if not len(closing) and len(spans) < _SPANS_AT_ONCE:
        return []
    counts = [len(piece) for _, piece in pieces]
    of = np.repeat(np.arange(len(pieces)), counts)
    finished = np.bincount(of[closing], minlength=len(pieces))
    sums = sum_spans(spans, closing, of)
    in_progress = (finished + 1).cumsum() - 1
    sums[in_progress - finished] += [steps.open_sums for steps, _ in pieces]
    ends = spans["end_ns"][closing]
    begins, loading_ns = np.append(np.int64(0), ends[:-1]), np.zeros(len(ends))
    taken: list[_ProcessSpans] = []
    rows = np.empty(len(closing), STEP_DTYPE)
    first = before = 0
    for (steps, _), open_, count, many in zip(pieces, sums[in_progress], counts, finished.tolist(), strict=True):
        if many:
            if not len(steps.step_rows):
                told = steps.source.array[: steps.used_spans + int(closing[first]) - before + 1]
                steps.end_ns, loading_ns[first] = _find_begin(told)
            begins[first], steps.end_ns = steps.end_ns, int(ends[first + many - 1])
            taken.append((steps, rows[first : first + many]))
        steps.open_sums = open_
        steps.used_spans += count
        first, before = first + many, before + count
    if taken:
        sources = [steps.source for steps, _ in pieces]
        mine = of[closing]
        rows["rank"] = np.array([source.rank for source in sources])[mine]
        rows["step"] = spans["step"][closing]
        rows["skipped"] = spans["flags"][closing] & SKIPPED != 0
        offsets = np.array([source.offset_ns for source in sources])[mine]
        rows["begin_unix_ns"] = begins + offsets
        rows["end_unix_ns"] = ends + offsets
        _add_times(rows, ends - begins, loading_ns, np.delete(sums, in_progress, axis=0))
    return taken


def _add_times(rows: Rows, passed_ns: Ints, loading_ns: Floats, sums: Floats) -> None:
    of = dict(zip(SUM_COLUMNS, sums.T, strict=True))
    rows["iteration_s"] = (passed_ns - of["eval_s"] - of["checkpoint_s"]) / 1e9 + loading_ns / 1e9
    for column in DURATION_COLUMNS:
        rows[column] = of[column] / 1e9
    rows["micro_steps"] = of["micro_steps"]
    for name in SIZE_COLUMNS:
        rows[name] = np.where(of[f"{name} known"] > 0, of[name], UNKNOWN)


def _find_closing(spans: Rows) -> Ints:
    """Where the spans lie that end an optimizer step."""
    found: Ints = (spans["phase"] == _STEP_CODE).nonzero()[0]
    if not len(found):  # as at every other look at a job that runs
        return found
    closing: Ints = found[(spans["flags"][found] & BOUNDARY != 0) & (spans["engine"][found] == 0)]
    return closing


def _find_begin(spans: Rows) -> tuple[int, int]:
    """When a process's first iteration began, and the nanoseconds in which checkpoints were loaded before.

    The engine's making and a checkpoint's loading come before it.
    """
    load = spans["phase"] == PHASE_CODE["checkpoint_load"]
    begin = spans["begin_ns"][~load & (spans["phase"] != PHASE_CODE["init"])].min()
    before = spans[load & (spans["depth"] == 0) & (spans["end_ns"] <= begin)]
    return int(begin), int((before["end_ns"] - before["begin_ns"]).sum())


class StepTable:
    """The steps of all rank processes of a session, extended by :meth:`update`."""

    def __init__(self, session: Session, *, memory: bool = True) -> None:
        """``memory``: the columns of memory too, which take as long as all others; without, they are UNKNOWN."""
        self._session = session
        self._with_memory = memory
        self._processes: dict[Source, RankSteps] = {}

    @property
    def process_count(self) -> int:
        """How many rank processes there are."""
        return len(self._processes)

    @property
    def rank_steps(self) -> list[RankSteps]:
        """The rank processes, with finished steps or without, in the order in which they made their engines."""
        return sorted(self._processes.values(), key=lambda process: process.source.created_ns)

    def update(self, until_ns: int | None = None) -> bool:
        """Take in what the session has read since, or what ended by then.

        True when a step was finished anywhere, or a process is new.
        """
        sources, before = self._session.sources["spans"], self.process_count
        finished = False
        for begin in range(0, len(sources), _PROCESSES_AT_ONCE):
            for pieces in self._iter_fresh(sources[begin : begin + _PROCESSES_AT_ONCE], until_ns):
                for steps, rows in _take_spans(pieces):
                    self._store_rows(steps, rows)
                    finished = True
        return finished or self.process_count > before

    def _iter_fresh(self, sources: Iterable[Source], until_ns: int | None) -> Iterator[list[_ProcessSpans]]:
        """The spans that were not taken in yet, and ended by then, so many in one go as stay in the processor's cache."""
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
        kept = steps.add_rows(rows)
        if self._with_memory:
            add_memory(self._session, steps.source, kept)
        else:
            for name in MEMORY_COLUMNS:
                kept[name] = UNKNOWN


def read_rank_steps(session: Session) -> list[Rows]:
    """All finished steps of each rank process, by rank and then in the order in which they made their engines."""
    table = StepTable(session)
    table.update()
    return [process.step_rows for process in sorted(table.rank_steps, key=lambda process: process.source.rank)]


def read_steps(session: Session) -> Rows:
    """All finished steps of a session, by rank and then in order (dtype STEP_DTYPE)."""
    return np.concatenate([np.empty(0, STEP_DTYPE), *read_rank_steps(session)])
