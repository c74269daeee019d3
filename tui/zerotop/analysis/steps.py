"""From spans to steps: one row per rank and optimizer step, built once and extended as the recording grows."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.growing import Growing
from zerotop.analysis.span_sums import DURATIONS, SIZES, SUMS, add_up
from zerotop.analysis.step_memory import add_memory
from zerotop.session.reader import Session, Source, whole
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

MEMORY = ("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "nvml_process_bytes")

_STEP = PHASE_CODE["step"]
# Spans taken in at once. What is computed of them stays in the processor's cache.
_AT_ONCE = 16384
_PIECE = 8  # processes brought up to date in one go


class RankSteps:
    """The steps of one rank process, extended by :meth:`update`."""

    def __init__(self, session: Session, spans: Source, *, memory: bool = True) -> None:
        """``memory``: the columns of memory too, which take as long as all others; without, they are UNKNOWN."""
        self.source = spans
        self._memory = memory
        self._session = session
        self._used = 0  # spans taken in
        self._open = np.zeros(len(SUMS))  # what those in the step in progress add up to
        self._end_ns = 0  # of the last finished step, on the writer's own clock
        self._rows = Growing(STEP_DTYPE)

    @property
    def rows(self) -> Rows:
        """All finished steps so far, oldest first."""
        return self._rows.rows

    def update(self, until_ns: int | None = None) -> bool:
        """Takes in spans recorded since, or those of them that ended by then. True when a step was finished."""
        spans = self.source.array[self._used : None if until_ns is None else self.source.count_known(until_ns)]
        closing = _closing(spans)
        if not len(closing) and len(spans) < _AT_ONCE:
            return False
        loading_ns = 0
        if len(closing) and not len(self._rows):
            self._end_ns, loading_ns = _begin(self.source.array[: self._used + int(closing[0]) + 1])
        rows = self._rows.add(len(closing))
        for begin in range(0, len(spans), _AT_ONCE):
            low, high = np.searchsorted(closing, (begin, begin + _AT_ONCE))
            self._take(spans[begin : begin + _AT_ONCE], closing[low:high] - begin, rows[low:high])
        rows["iteration_s"][:1] += loading_ns / 1e9
        self._used += len(spans)
        if len(spans) > _AT_ONCE:
            self._session.release()
        return len(closing) > 0

    def _take(self, spans: Rows, closing: Ints, rows: Rows) -> None:
        """Takes in some spans, of which ``closing`` end steps, and fills in ``rows`` with those."""
        sums = add_up(spans, closing)
        sums[0] += self._open
        self._open = sums[-1].copy()
        if len(closing):
            rows["rank"] = self.source.rank
            rows["step"] = spans["step"][closing]
            rows["skipped"] = spans["flags"][closing] & SKIPPED != 0
            self._add_times(rows, spans["end_ns"][closing], sums[:-1])
            if self._memory:
                add_memory(self._session, self.source, rows)
            else:
                for name in MEMORY:
                    rows[name] = UNKNOWN

    def _add_times(self, rows: Rows, ends: Ints, sums: Floats) -> None:
        begins = np.append(np.int64(self._end_ns), ends[:-1])
        self._end_ns = int(ends[-1])
        rows["begin_unix_ns"] = begins + self.source.offset_ns
        rows["end_unix_ns"] = ends + self.source.offset_ns
        of = dict(zip(SUMS, sums.T, strict=True))
        rows["iteration_s"] = (ends - begins - of["eval_s"] - of["checkpoint_s"]) / 1e9
        for column in DURATIONS:
            rows[column] = of[column] / 1e9
        rows["micro_steps"] = of["micro_steps"]
        for name in SIZES:
            rows[name] = np.where(of[f"{name} known"] > 0, of[name], UNKNOWN)


def _closing(spans: Rows) -> Ints:
    """Where the spans lie that end an optimizer step."""
    found: Ints = (spans["phase"] == _STEP).nonzero()[0]
    if not len(found):  # as at every other look at a job that runs
        return found
    closing: Ints = found[(spans["flags"][found] & BOUNDARY != 0) & (spans["engine"][found] == 0)]
    return closing


def _begin(spans: Rows) -> tuple[int, int]:
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
        """``memory``: see :class:`RankSteps`."""
        self._session = session
        self._memory = memory
        self._processes: dict[Source, RankSteps] = {}

    @property
    def count(self) -> int:
        """How many rank processes there are."""
        return len(self._processes)

    @property
    def processes(self) -> list[RankSteps]:
        """The rank processes, with finished steps or without, in the order in which they made their engines."""
        return sorted(self._processes.values(), key=lambda process: process.source.born_ns)

    def update(self, until_ns: int | None = None) -> bool:
        """Takes in what the session has read since, or what ended by then.

        True when a step was finished anywhere, or a process is new.
        """
        return whole(self.updating(until_ns))

    def updating(self, until_ns: int | None = None) -> Generator[None, None, bool]:
        """The same in pieces."""
        new = False
        for number, source in enumerate(self._session.sources["spans"], 1):
            if source not in self._processes:
                self._processes[source] = RankSteps(self._session, source, memory=self._memory)
                new = True
            new |= self._processes[source].update(until_ns)
            if not number % _PIECE:
                yield
        return new


def steps_of_ranks(session: Session) -> list[Rows]:
    """All finished steps of each rank process, by rank and then in the order in which they made their engines."""
    table = StepTable(session)
    table.update()
    return [process.rows for process in sorted(table.processes, key=lambda process: process.source.rank)]


def steps(session: Session) -> Rows:
    """All finished steps of a session, by rank and then in order (dtype STEP_DTYPE)."""
    return np.concatenate([np.empty(0, STEP_DTYPE), *steps_of_ranks(session)])
