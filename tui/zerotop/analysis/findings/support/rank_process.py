"""A rank's process as detectors read it, up to the cursor: its own records and those of samplers about it."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.searched import Searched
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.steps.training_changes import TrainingChange, choose_changes, list_changes
from zerotop.recording.events.event_files import E
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import find_limit
from zerotop.recording.moments.rank_records import RankRecords
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints, Rows, Samples
from zerotop.recording.steps.growable_array import GrowingArray
from zerotop.recording.steps.step_table import RankSteps
from zerotop_probe.recording.events import JobStarted, OutOfMemory, TrainingChanged
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

# Rare phases, which are collected for each process.
_RARE = ("eval", "checkpoint_save", "checkpoint_load")


@cache
def _mask_codes(names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return for each phase code whether it is one of these phases; the last entry stands for unknown newer codes."""
    return np.isin(np.arange(len(PHASES) + 1), [PHASE_CODE[name] for name in names])


def _mask_phases(rows: Rows, *names: str) -> NDArray[np.bool_]:
    """Return which rows are of these phases. Ten times as fast as ``np.isin`` for the few rows of a step."""
    is_phase: NDArray[np.bool_] = _mask_codes(names).take(np.minimum(rows["phase"], len(PHASES)))
    return is_phase


class AdvancingRecording(Searched):
    """A recording up to a cursor that only moves forward."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.at = recording.at(0)

    @property
    def cursor_ns(self) -> int:
        """The cursor in unix nanoseconds."""
        return self.at.cursor_ns

    def advance_cursor(self, cursor_ns: int) -> None:
        """Move the cursor forward."""
        self.at = self.recording.at(max(cursor_ns, self.cursor_ns))

    def events_of(self, kind: type[E]) -> Sequence[E]:
        """Return all events of this kind, in order of time."""
        return self.at.events_of(kind)


class Process(RankRecords, Searched):
    """A rank's process, up to the cursor of the recording."""

    def __init__(self, recording: AdvancingRecording, steps: RankSteps) -> None:
        RankRecords.__init__(self, recording.at, identify_process(steps.source))
        Searched.__init__(self)
        self.recording = recording
        self.source = steps.source  # its spans
        self.key = (steps.source.host, steps.source.pid)
        self.rank_steps = steps
        self._rare_phases: dict[str, tuple[GrowingArray, GrowingArray]] = {}  # times and rows
        self._rare_counts: dict[Source, int] = {}

    @cached_property
    def command(self) -> str:
        """The command that started the job, as a line for a shell; empty where it is not known."""
        return next((shlex.join(event.command) for event in self.at.events_of(JobStarted) if event.command), "")

    @property
    def at(self) -> At:
        """The moment of the recording."""
        return self.recording.at

    @property
    def steps(self) -> Rows:
        """All finished steps that were recorded completely, in order (STEP_DTYPE)."""
        return self.rank_steps.recorded_steps

    @property
    def phased_steps(self) -> Rows:
        """The steps whose phases were recorded, out of ``steps``. Counted steps between them are left out."""
        return self.rank_steps.phased_steps

    @property
    def aligned_steps(self) -> Rows:
        """All finished steps, with rows for unrecorded ones, so that a step has the same row in every rank."""
        return self.rank_steps.step_rows

    def steps_until(self, time_ns: int) -> Rows:
        """Return the steps that were finished at a time."""
        return self.steps[: bisect_right(self.steps["end_unix_ns"], time_ns)]

    def phased_steps_until(self, time_ns: int) -> Rows:
        """Return those of ``phased_steps`` that were finished at a time."""
        return self.phased_steps[: bisect_right(self.phased_steps["end_unix_ns"], time_ns)]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for memory and threads with which it was started."""
        return (self.hello.environment or {}) if self.hello is not None else {}

    def find_changes(self, earliest_ns: int, latest_ns: int, known_ns: int) -> list[TrainingChange]:
        """Return the changes of the training between two times, as known at a third one, the most telling first."""
        found = list_changes(self.events_of(TrainingChanged), self.source.offset_ns)
        return choose_changes(found, earliest_ns, latest_ns, known_ns)

    @property
    def has_expandable_segments(self) -> bool:
        """Whether PyTorch's allocator was configured to use expandable segments."""
        return self.hello is not None and read_settings(self.hello).has_expandable_segments

    @property
    def torch(self) -> str:
        """Its version of PyTorch; empty if unknown."""
        return (self.hello.torch or "") if self.hello is not None else ""

    def step_at(self, time_ns: int) -> int | None:
        """Return the step in progress at a time; None before the first step has finished."""
        if not len(self.steps):
            return None
        finished = len(self.steps_until(time_ns))
        return int(self.steps["step"][finished - 1]) + 1 if finished else int(self.steps["step"][0])

    def ranks_at(self, known_ns: int) -> tuple[int, ...]:
        """Return its rank, as a group returns its ranks."""
        return (self.rank,)

    @property
    def device_bytes(self) -> int | None:
        """What its device has, or less if PyTorch may use only a fraction."""
        total = self._total_bytes
        return self._find_limit(total) or total

    @property
    def limit_bytes(self) -> int | None:
        """What PyTorch may reserve, as far as is known by now; None without a limit."""
        return self._find_limit(self._total_bytes)

    def _find_limit(self, total: int | None) -> int | None:
        return find_limit(total or 0, self.engine, self.events_of(OutOfMemory))

    @property
    def _total_bytes(self) -> int | None:
        sizes = [device.total_bytes for device in self.engine.devices or []]
        return next((size for size in sizes if size is not None and size > 0), None)

    def read_phases(self, begin_ns: int, end_ns: int, *names: str) -> Samples:
        """Return the phases with these names that ended within a time window, ordered by their ends."""
        spans = self.records("spans").read_window(begin_ns, end_ns)
        return spans.select(_mask_phases(spans.rows, *names)) if len(spans) else spans

    def read_rare_phases(self, name: str) -> Samples:
        """Return all finished outermost phases with this name (evaluation, checkpoint save or load), by their ends."""
        fresh = self.records("spans").read_new(self._rare_counts)
        if len(fresh) and (is_rare := _mask_phases(fresh.rows, *_RARE)).any():
            rare = fresh.select(is_rare & (fresh.rows["depth"] == 0))
            for phase in _RARE:
                chosen = rare.rows["phase"] == PHASE_CODE[phase]
                for known, new in zip(self._get_rare(phase), (rare.times, rare.rows), strict=True):
                    known.add_rows(int(chosen.sum()))[:] = new[chosen]
        times, rows = self._get_rare(name)
        return Samples(times.rows, rows.rows)

    def _get_rare(self, name: str) -> tuple[GrowingArray, GrowingArray]:
        if name not in self._rare_phases:
            self._rare_phases[name] = GrowingArray(np.int64), GrowingArray(self.source.array.dtype)
        return self._rare_phases[name]

    def compute_begins(self, spans: Samples) -> Ints:
        """Return the begins of phases of this process, in unix nanoseconds."""
        begins: Ints = spans.rows["begin_ns"] + self.source.offset_ns
        return begins

    @cached_property
    def has_exact_peaks(self) -> bool:
        """Whether the allocator's peaks were reset at each phase."""
        return any(one.header.get("peaks") == "window" for one in self.tables("allocator"))
