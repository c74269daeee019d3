"""A rank's process as detectors read it: what it wrote, and what samplers saw of it, up to the cursor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerotop.analysis.annotations.support.record_window import Ints, Records, Rows, Samples
from zerotop.analysis.keys import GpuKey
from zerotop.analysis.memory.allocator_settings import read_settings
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.session.reader import Event, Source
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

if TYPE_CHECKING:
    from zerotop.analysis.annotations.support.evidence import Evidence

T = TypeVar("T")

# Phases that come seldom, of which a process's are kept at hand.
_RARE = ("eval", "checkpoint_save", "checkpoint_load")
_RARE_MASK = np.isin(np.arange(len(PHASES) + 1), [PHASE_CODE[name] for name in _RARE])


class DetectorState:
    """What detectors remember of something, so that they look at each record once."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    def get_state(self, kind: Callable[[], T], key: str = "") -> T:
        """A ``kind()`` that is made once, or once for each ``of``."""
        if (kind, key) not in self._states:
            self._states[kind, key] = kind()
        found: T = self._states[kind, key]
        return found


class Process(DetectorState):
    """A rank's process."""

    def __init__(self, facts: Evidence, steps: RankSteps) -> None:
        super().__init__()
        self.facts = facts
        self.source = steps.source  # its spans
        self.rank = steps.source.rank
        self.key = (steps.source.host, steps.source.pid)
        self.spans = self._make_records("spans")
        self.begins = self._make_records("begins")
        self.allocator = self._make_records("allocator")
        self.host_samples = facts.get_records("processes", self.source.host, "pid", self.source.pid)
        self._rank_steps = steps
        self._rare_parts: list[Samples] = []
        self._rare_counts: dict[Source, int] = {}

    def _make_records(self, table: str) -> Records:
        """The table of that name that it writes, by the ends of phases or the times of samples."""
        return Records(self.facts.cursor, lambda: self.facts.process_sources(table, self.source))

    @property
    def steps(self) -> Rows:
        """All finished steps, in order (STEP_DTYPE)."""
        return self._rank_steps.step_rows

    def steps_until(self, time_ns: int) -> Rows:
        """Those that were finished at a moment."""
        return self.steps[: bisect_right(self.steps["end_unix_ns"], time_ns)]

    def events_named(self, name: str) -> Sequence[Event]:
        """Its own events of a name."""
        return self.facts.process_events(name, self.source)

    @property
    def engine(self) -> dict[str, Any]:
        """The facts of its first engine; empty where it has not told them."""
        return next((event.facts for event in self.events_named("engine") if not event.facts.get("engine")), {})

    @property
    def environment(self) -> dict[str, str]:
        """The variables it was started with that steer memory and threads."""
        found = [event.facts.get("environment") for event in self.events_named("hello")]
        return {str(k): str(v) for k, v in found[0].items()} if found and isinstance(found[0], dict) else {}

    @property
    def has_expandable_segments(self) -> bool:
        """Whether PyTorch's allocator was told to use expandable segments."""
        hello = self.events_named("hello")
        return bool(hello) and read_settings(hello[0].facts).has_expandable_segments

    def step_at(self, time_ns: int) -> int | None:
        """The step that was in progress; None before any has been finished, of which the first is known."""
        if not len(self.steps):
            return None
        finished = len(self.steps_until(time_ns))
        return int(self.steps["step"][finished - 1]) + 1 if finished else int(self.steps["step"][0])

    @property
    def is_on_gpu(self) -> bool:
        """Whether it trains on a CUDA device, by what its engine says."""
        return str(self.engine.get("device") or "").startswith("cuda")

    @property
    def device_bytes(self) -> int | None:
        """What its device has in all."""
        sizes = [device.get("total_bytes") for device in self.engine.get("devices") or []]
        return next((int(size) for size in sizes if isinstance(size, int) and size > 0), None)

    def read_phases(self, begin_ns: int, end_ns: int, *names: str) -> Samples:
        """Its phases of these names that ended in a while, by their ends."""
        found = self.spans.read_window(begin_ns, end_ns)
        return found.select_rows(np.isin(found.rows["phase"], [PHASE_CODE[name] for name in names])) if len(found) else found

    def read_rare_phases(self, name: str) -> Samples:
        """All its evaluations, checkpoints saved or loaded that have ended and lie within none other, by their ends."""
        fresh = self.spans.read_new(self._rare_counts)
        if len(fresh):
            chosen = _RARE_MASK.take(np.minimum(fresh.rows["phase"], len(PHASES)))
            if chosen.any():
                self._rare_parts.append(fresh.select_rows(chosen & (fresh.rows["depth"] == 0)))
        if not self._rare_parts:
            return Samples(np.empty(0, np.int64), np.empty(0, self.source.array.dtype))
        if len(self._rare_parts) > 1:
            times, rows = ([getattr(part, name) for part in self._rare_parts] for name in ("times", "rows"))
            self._rare_parts = [Samples(np.concatenate(times), np.concatenate(rows))]
        found = self._rare_parts[0]
        return found.select_rows(found.rows["phase"] == PHASE_CODE[name])

    def compute_begins(self, spans: Samples) -> Ints:
        """When phases of this process began, in unix time."""
        begins: Ints = spans.rows["begin_ns"] + self.source.offset_ns
        return begins

    @cached_property
    def has_exact_peaks(self) -> bool:
        """Whether the allocator's peaks are each phase's own."""
        return any(one.header.get("peaks") == "window" for one in self.facts.process_sources("allocator", self.source))

    @property
    def gpu_key(self) -> GpuKey | None:
        """Host and index of the GPU that its allocator lies on."""
        return self.facts.find_gpu(self.source)

    @property
    def gpu_samples(self) -> Records:
        """What NVML said of its GPU."""
        host, index = self.gpu_key or ("", -1)
        return self.facts.get_records("gpus", host, "gpu", index)
