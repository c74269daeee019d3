"""A rank's process as detectors read it, up to the cursor: its own records and those of samplers about it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.annotations.support.records.detector_state import DetectorState
from zerotop.analysis.annotations.support.records.record_window import Records, WindowSamples
from zerotop.analysis.annotations.support.records.session_index import SessionIndex
from zerotop.analysis.engine import add_library
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.steps.growable_array import GrowingArray
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.steps.training_changes import TrainingChange, choose_changes, list_changes
from zerotop.session.events.event_files import E
from zerotop.session.keys import GpuKey
from zerotop.session.reader import Source
from zerotop.session.samples import Ints, Rows
from zerotop_probe.recording.events import Engine, EngineFacts, Hello, TotalSteps, TrainingChanged
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


class Process(DetectorState):
    """A rank's process."""

    def __init__(self, recording: SessionIndex, steps: RankSteps) -> None:
        super().__init__()
        self.recording = recording
        self.source = steps.source  # its spans
        self.rank = steps.source.rank
        self.host = steps.source.host
        self.key = (steps.source.host, steps.source.pid)
        self.spans = self._make_records("spans")
        self.begins = self._make_records("begins")
        self.allocator = self._make_records("allocator")
        self.device_times = self._make_records("device_times")
        self.host_samples = recording.get_records("processes", self.host, "pid", self.source.pid)
        self.rank_steps = steps
        self._rare_phases: dict[str, tuple[GrowingArray, GrowingArray]] = {}  # times and rows
        self._rare_counts: dict[Source, int] = {}

    def _make_records(self, table: str) -> Records:
        return Records(self.recording.cursor, lambda: self.recording.process_sources(table, self.source))

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

    def events_of(self, kind: type[E]) -> Sequence[E]:
        """Return the process's own events of this kind, in order of time."""
        return self.recording.process_events(kind, self.source)

    @property
    def engine(self) -> EngineFacts:
        """The facts about its engine or loop number 0, with the library that runs it; empty before they are reported."""
        engines = reversed(self.events_of(Engine))
        first = next((event for event in engines if not event.engine), None)
        return add_library(first, self.events_of(TotalSteps))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for memory and threads with which it was started."""
        return next((event.environment or {} for event in self.events_of(Hello)), {})

    def find_changes(self, earliest_ns: int, latest_ns: int, known_ns: int) -> list[TrainingChange]:
        """Return the changes of the training between two times, as known at a third one, the most telling first."""
        found = list_changes(self.events_of(TrainingChanged), self.source.offset_ns)
        return choose_changes(found, earliest_ns, latest_ns, known_ns)

    @property
    def has_expandable_segments(self) -> bool:
        """Whether PyTorch's allocator was configured to use expandable segments."""
        hello = self.events_of(Hello)
        return bool(hello) and read_settings(hello[0]).has_expandable_segments

    @property
    def torch(self) -> str:
        """Its version of PyTorch; empty if unknown."""
        return next((event.torch or "" for event in self.events_of(Hello)), "")

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
    def is_on_gpu(self) -> bool:
        """Whether its engine trains on a CUDA device."""
        return (self.engine.device or "").startswith("cuda")

    @property
    def device_bytes(self) -> int | None:
        sizes = [device.total_bytes for device in self.engine.devices or []]
        return next((size for size in sizes if size is not None and size > 0), None)

    def read_phases(self, begin_ns: int, end_ns: int, *names: str) -> WindowSamples:
        """Return the phases with these names that ended within a time window, ordered by their ends."""
        spans = self.spans.read_window(begin_ns, end_ns)
        return spans.select_rows(_mask_phases(spans.rows, *names)) if len(spans) else spans

    def read_rare_phases(self, name: str) -> WindowSamples:
        """Return all finished outermost phases with this name (evaluation, checkpoint save or load), by their ends."""
        fresh = self.spans.read_new(self._rare_counts)
        if len(fresh) and (is_rare := _mask_phases(fresh.rows, *_RARE)).any():
            rare = fresh.select_rows(is_rare & (fresh.rows["depth"] == 0))
            for phase in _RARE:
                chosen = rare.rows["phase"] == PHASE_CODE[phase]
                for known, new in zip(self._get_rare(phase), (rare.times, rare.rows), strict=True):
                    known.add_rows(int(chosen.sum()))[:] = new[chosen]
        times, rows = self._get_rare(name)
        return WindowSamples(times.rows, rows.rows)

    def _get_rare(self, name: str) -> tuple[GrowingArray, GrowingArray]:
        if name not in self._rare_phases:
            self._rare_phases[name] = GrowingArray(np.int64), GrowingArray(self.source.array.dtype)
        return self._rare_phases[name]

    def compute_begins(self, spans: WindowSamples) -> Ints:
        """Return the begins of phases of this process, in unix nanoseconds."""
        begins: Ints = spans.rows["begin_ns"] + self.source.offset_ns
        return begins

    @cached_property
    def has_exact_peaks(self) -> bool:
        """Whether the allocator's peaks were reset at each phase."""
        return any(one.header.get("peaks") == "window" for one in self.recording.process_sources("allocator", self.source))

    @property
    def gpu_key(self) -> GpuKey | None:
        """Host and NVML index of the GPU on which it allocates."""
        return self.recording.find_gpu(self.source)

    @property
    def gpu_samples(self) -> Records:
        """NVML's samples of its GPU."""
        host, index = self.gpu_key or ("", -1)
        return self.recording.get_records("gpus", host, "gpu", index)
