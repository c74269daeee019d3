"""A rank's process as detectors read it: what it wrote, and what samplers saw of it, up to the cursor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerotop.analysis.annotations.support.record_window import Ints, Records, Rows, Samples
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.session.reader import Event, Source
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

if TYPE_CHECKING:
    from zerotop.analysis.annotations.support.evidence import Facts

T = TypeVar("T")

# Phases that come seldom, of which a process's are kept at hand.
_RARE = ("eval", "checkpoint_save", "checkpoint_load")
_IS_RARE = np.isin(np.arange(len(PHASES) + 1), [PHASE_CODE[name] for name in _RARE])


class Memory:
    """What detectors remember of something, so that they look at each record once."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def kept(self, kind: Callable[[], T], of: str = "") -> T:
        """A ``kind()`` that is made once, or once for each ``of``."""
        if (kind, of) not in self._kept:
            self._kept[kind, of] = kind()
        found: T = self._kept[kind, of]
        return found


class Process(Memory):
    """A rank's process."""

    def __init__(self, facts: Facts, steps: RankSteps) -> None:
        super().__init__()
        self.facts = facts
        self.source = steps.source  # its spans
        self.rank = steps.source.rank
        self.key = (steps.source.host, steps.source.pid)
        self.spans = self._own("spans")
        self.begun = self._own("begins")
        self.allocator = self._own("allocator")
        self.host_samples = facts.table("processes", self.source.host, "pid", self.source.pid)
        self._steps = steps
        self._rare_parts: list[Samples] = []
        self._rare_counts: dict[Source, int] = {}

    def _own(self, table: str) -> Records:
        """The table of that name that it writes, by the ends of phases or the times of samples."""
        return Records(self.facts.cursor, lambda: self.facts.own(table, self.source))

    @property
    def steps(self) -> Rows:
        """All finished steps, in order (STEP_DTYPE)."""
        return self._steps.rows

    def steps_until(self, time_ns: int) -> Rows:
        """Those that were finished at a moment."""
        return self.steps[: bisect_right(self.steps["end_unix_ns"], time_ns)]

    def events(self, name: str) -> Sequence[Event]:
        """Its own events of a name."""
        return self.facts.own_events(name, self.source)

    @property
    def engine(self) -> dict[str, Any]:
        """The facts of its first engine; empty where it has not told them."""
        return next((event.facts for event in self.events("engine") if not event.facts.get("engine")), {})

    @property
    def environment(self) -> dict[str, str]:
        """The variables it was started with that steer memory and threads."""
        found = [event.facts.get("environment") for event in self.events("hello")]
        return {str(k): str(v) for k, v in found[0].items()} if found and isinstance(found[0], dict) else {}

    @property
    def expandable(self) -> bool:
        """Whether PyTorch's allocator was told to use expandable segments."""
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        return "expandable_segments:true" in " ".join(self.environment.get(name, "") for name in names).lower()

    def step_at(self, time_ns: int) -> int | None:
        """The step that was in progress; None before any has been finished, of which the first is known."""
        if not len(self.steps):
            return None
        finished = len(self.steps_until(time_ns))
        return int(self.steps["step"][finished - 1]) + 1 if finished else int(self.steps["step"][0])

    @property
    def on_gpu(self) -> bool:
        """Whether it trains on a CUDA device, by what its engine says."""
        return str(self.engine.get("device") or "").startswith("cuda")

    @property
    def device_bytes(self) -> int | None:
        """What its device has in all."""
        sizes = [device.get("total_bytes") for device in self.engine.get("devices") or []]
        return next((int(size) for size in sizes if isinstance(size, int) and size > 0), None)

    def phase(self, begin_ns: int, end_ns: int, *names: str) -> Samples:
        """Its phases of these names that ended in a while, by their ends."""
        found = self.spans.within(begin_ns, end_ns)
        return found.where(np.isin(found.rows["phase"], [PHASE_CODE[name] for name in names])) if len(found) else found

    def rare(self, name: str) -> Samples:
        """All its evaluations, checkpoints saved or loaded that have ended and lie within none other, by their ends."""
        fresh = self.spans.after(self._rare_counts)
        if len(fresh):
            chosen = _IS_RARE.take(np.minimum(fresh.rows["phase"], len(PHASES)))
            if chosen.any():
                self._rare_parts.append(fresh.where(chosen & (fresh.rows["depth"] == 0)))
        if not self._rare_parts:
            return Samples(np.empty(0, np.int64), np.empty(0, self.source.array.dtype))
        if len(self._rare_parts) > 1:
            times, rows = ([getattr(part, name) for part in self._rare_parts] for name in ("times", "rows"))
            self._rare_parts = [Samples(np.concatenate(times), np.concatenate(rows))]
        found = self._rare_parts[0]
        return found.where(found.rows["phase"] == PHASE_CODE[name])

    def begins_ns(self, spans: Samples) -> Ints:
        """When phases of this process began, in unix time."""
        begins: Ints = spans.rows["begin_ns"] + self.source.offset_ns
        return begins

    @cached_property
    def exact_peaks(self) -> bool:
        """Whether the allocator's peaks are each phase's own."""
        return any(one.header.get("peaks") == "window" for one in self.facts.own("allocator", self.source))

    @property
    def gpu(self) -> tuple[str, int] | None:
        """Host and index of the GPU that its allocator lies on."""
        return self.facts.gpu_of(self.source)

    @property
    def gpu_samples(self) -> Records:
        """What NVML said of its GPU."""
        host, index = self.gpu or ("", -1)
        return self.facts.table("gpus", host, "gpu", index)
