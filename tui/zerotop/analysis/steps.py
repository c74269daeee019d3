"""From spans to steps: one row per rank and optimizer step, built once and extended as the recording grows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import BOUNDARY, EVAL, PHASE_CODE, SKIPPED, UNKNOWN

Rows = NDArray[Any]
Ints = NDArray[np.int64]

STEP_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        ("begin_unix_s", "<f8"),
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
        ("rows", "<i8"),
        ("tokens", "<i8"),
        ("skipped", "?"),
        # Exact when the step raised the job's peak, else the highest of its samples.
        ("allocated_peak_bytes", "<i8"),
        ("reserved_peak_bytes", "<i8"),
        ("host_rss_bytes", "<i8"),  # the highest sampled
        ("nvml_process_bytes", "<i8"),  # the highest sampled
        ("begin_unix_ns", "<i8"),
        ("end_unix_ns", "<i8"),
    ]
)

# Columns that add up the host time of phases.
_SUMS = {
    "data_s": ("data",),
    "forward_s": ("forward",),
    "backward_s": ("backward",),
    "step_s": ("step",),
    "optimizer_s": ("optimizer", "cpu_optimizer"),
    "eval_s": ("eval",),
    "checkpoint_s": ("checkpoint_save", "checkpoint_load"),
}
# A phase of these counts only when it is outermost: within an evaluation it is the evaluation's time.
_OUTERMOST = ("data", "eval", "checkpoint_save", "checkpoint_load")
# Samples before a step's first that are looked at, so that a step shorter than a tick has the one before.
_LOOK_BACK = 512


def windowed_max(times: Ints, values: Ints, begins: Ints, ends: Ints) -> Ints:
    """The highest value of the samples in each window (begin, end], or the last one before where none lies within.

    ``times`` are sorted, shape (n,); windows have shape (m,) and follow one another. UNKNOWN where nothing was sampled.
    """
    if not len(times):
        return np.full(len(ends), UNKNOWN, np.int64)
    high = np.searchsorted(times, ends, "right")
    low = np.minimum(np.searchsorted(times, begins, "right"), np.maximum(high - 1, 0))
    padded = np.append(values, UNKNOWN)
    highest = np.maximum.reduceat(padded, np.stack([low, high], axis=1).ravel())[::2]
    return np.where(high > 0, highest, UNKNOWN)


class RankSteps:
    """The steps of one rank process, extended by :meth:`update`."""

    def __init__(self, session: Session, spans: Source) -> None:
        self._session = session
        self._spans = spans
        self._used = 0  # spans before this one lie in finished steps
        self._end_ns: int | None = None  # of the last finished step, on the writer's own clock
        self._parts: list[Rows] = []
        self._rows = np.empty(0, STEP_DTYPE)

    @property
    def rank(self) -> int:
        """The global rank."""
        return self._spans.rank

    @property
    def rows(self) -> Rows:
        """All finished steps so far, oldest first."""
        if self._parts:
            self._rows = np.concatenate([self._rows, *self._parts])
            self._parts = []
        return self._rows

    def update(self) -> bool:
        """Takes in spans recorded since. True when a step was finished."""
        spans = self._spans.array[self._used :]
        last = (spans["phase"] == PHASE_CODE["step"]) & (spans["flags"] & BOUNDARY != 0) & (spans["engine"] == 0)
        boundaries = np.flatnonzero(last)
        if not len(boundaries):
            return False
        self._parts.append(self._rows_of(spans[: boundaries[-1] + 1], boundaries))
        self._used += int(boundaries[-1]) + 1
        return True

    def _rows_of(self, spans: Rows, boundaries: Ints) -> Rows:
        closing = spans[boundaries]
        rows = np.zeros(len(boundaries), STEP_DTYPE)
        group = np.searchsorted(boundaries, np.arange(len(spans)))
        ends = closing["end_ns"].astype(np.int64)
        begins = np.append(self._first_begin(spans[: boundaries[0] + 1]), ends[:-1])
        self._end_ns = int(ends[-1])
        self._add_durations(rows, spans, group)
        rows["rank"] = self.rank
        rows["step"] = closing["step"]
        rows["skipped"] = closing["flags"] & SKIPPED != 0
        rows["begin_unix_ns"] = begins + self._spans.offset_ns
        rows["end_unix_ns"] = ends + self._spans.offset_ns
        rows["begin_unix_s"] = rows["begin_unix_ns"] / 1e9
        between = rows["eval_s"] + rows["checkpoint_s"]
        # A checkpoint loaded before the first iteration began takes nothing from it.
        early = (spans["phase"] == PHASE_CODE["checkpoint_load"]) & (spans["depth"] == 0) & (spans["end_ns"] <= begins[0])
        between[0] -= ((spans["end_ns"] - spans["begin_ns"])[early] / 1e9).sum()
        rows["iteration_s"] = (ends - begins) / 1e9 - between
        self._add_memory(rows)
        return rows

    def _first_begin(self, spans: Rows) -> int:
        if self._end_ns is not None:
            return self._end_ns
        # The engine's making and a checkpoint's loading come before the first iteration.
        work = spans[~np.isin(spans["phase"], [PHASE_CODE["init"], PHASE_CODE["checkpoint_load"]])]
        return int(work["begin_ns"].min())

    @staticmethod
    def _add_durations(rows: Rows, spans: Rows, group: Ints) -> None:
        count = len(rows)
        seconds = (spans["end_ns"] - spans["begin_ns"]) / 1e9
        phase, outermost, training = spans["phase"], spans["depth"] == 0, spans["flags"] & EVAL == 0
        for column, names in _SUMS.items():
            for name in names:
                mask = (phase == PHASE_CODE[name]) & training
                if name in _OUTERMOST:
                    mask &= outermost
                rows[column] += np.bincount(group[mask], seconds[mask], count)
        forward = (phase == PHASE_CODE["forward"]) & training
        for column in ("rows", "tokens"):
            known = forward & (spans[column] >= 0)
            rows[column] = np.bincount(group[known], spans[column][known], count)
        backward = phase == PHASE_CODE["backward"]
        rows["micro_steps"] = np.bincount(group[backward], minlength=count)

    def _add_memory(self, rows: Rows) -> None:
        for column in ("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "nvml_process_bytes"):
            rows[column] = UNKNOWN
        spans = self._spans
        for source in self._session.sources["allocator"]:
            if (source.host, source.pid, source.rank) == (spans.host, spans.pid, spans.rank):
                self._add_allocator(rows, source)
        for table, value, column in (
            ("processes", "rss_bytes", "host_rss_bytes"),
            ("gpu_processes", "used_bytes", "nvml_process_bytes"),
        ):
            for source in self._session.sources[table]:
                if source.host == spans.host:
                    samples = _between(source, rows)
                    mine = samples[samples["pid"] == spans.pid]
                    rows[column] = np.maximum(rows[column], _highest(source, mine, mine[value], rows))

    @staticmethod
    def _add_allocator(rows: Rows, source: Source) -> None:
        samples = _between(source, rows)
        times = samples["time_ns"] + source.offset_ns
        before = np.searchsorted(times, rows["begin_unix_ns"], "right") - 1
        after = np.searchsorted(times, rows["end_unix_ns"], "right") - 1
        for kind in ("allocated", "reserved"):
            sampled = _highest(source, samples, samples[f"{kind}_bytes"], rows)
            if len(samples):
                peaks = samples[f"{kind}_peak_bytes"]
                peak = np.where(after >= 0, peaks[after], UNKNOWN)
                raised = (after >= 0) & ((before < 0) | (peak > peaks[before]))
                sampled = np.where(raised, peak, sampled)
            rows[f"{kind}_peak_bytes"] = sampled


def _between(source: Source, rows: Rows) -> Rows:
    """The samples that can bear on these steps."""
    low = max(0, source.count_known(int(rows["begin_unix_ns"][0])) - _LOOK_BACK)
    return source.array[low : source.count_known(int(rows["end_unix_ns"][-1]))]


def _highest(source: Source, samples: Rows, values: Ints, rows: Rows) -> Ints:
    times = samples["time_ns"] + source.offset_ns
    return windowed_max(times, values.astype(np.int64), rows["begin_unix_ns"], rows["end_unix_ns"])


class StepTable:
    """The steps of all ranks of a session, extended by :meth:`update`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._by_source: dict[int, RankSteps] = {}

    def update(self) -> bool:
        """Takes in what the session has read since. True when a step was finished anywhere."""
        new = False
        for source in self._session.sources["spans"]:
            steps = self._by_source.setdefault(id(source), RankSteps(self._session, source))
            new |= steps.update()
        return new

    def by_rank(self) -> dict[int, Rows]:
        """Each rank's steps in order, none where none is finished; a restarted rank has those of all its processes."""
        found: dict[int, list[Rows]] = {}
        for steps in self._by_source.values():
            found.setdefault(steps.rank, []).append(steps.rows)
        return {
            rank: parts[0] if len(parts) == 1 else np.concatenate(sorted(parts, key=_begin))
            for rank, parts in sorted(found.items())
        }


def _begin(rows: Rows) -> int:
    return int(rows["end_unix_ns"][0]) if len(rows) else 0


def steps(session: Session) -> Rows:
    """All finished steps of a session, by rank and then in order (dtype STEP_DTYPE)."""
    table = StepTable(session)
    table.update()
    parts = list(table.by_rank().values())
    return np.concatenate(parts) if parts else np.empty(0, STEP_DTYPE)
