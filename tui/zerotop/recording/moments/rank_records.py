"""A rank's process at a moment: its own events and tables, and those of samplers about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerotop.recording.events.event_files import E
from zerotop.recording.keys import GpuKey, RankProcess
from zerotop.recording.moments.devices import locate_processes
from zerotop.recording.moments.moment import Moment
from zerotop.recording.moments.records import Records
from zerotop.recording.table_files import Source
from zerotop_probe.recording.events import Engine, EngineFacts, Hello, TotalSteps

TRAINER = "Trainer"


class RankRecords:
    """What is known of a rank's process."""

    def __init__(self, at: Moment, process: RankProcess) -> None:
        self._at = at
        self.process = process
        self.host, self.pid, self.rank = process

    @property
    def at(self) -> Moment:
        """The moment."""
        return self._at

    def events_of(self, kind: type[E]) -> Sequence[E]:
        """Return the process's own events of this kind, in order of time."""
        return self.at.process_events(kind, self.process)

    @property
    def engine(self) -> EngineFacts:
        """The facts about its engine or loop number 0, with the library that runs it; empty before they are reported."""
        whole, process = self.at.whole, self.process
        engines = reversed(whole.process_events(Engine, process))
        first = next((event for event in engines if not event.engine), None)
        return add_library(first, whole.process_events(TotalSteps, process))

    @property
    def is_on_gpu(self) -> bool:
        """Whether its engine trains on a CUDA device."""
        return (self.engine.device or "").startswith("cuda")

    @property
    def hello(self) -> Hello | None:
        """How it was started; None before it has reported that."""
        return next(iter(self.at.whole.process_events(Hello, self.process)), None)

    def tables(self, name: str) -> list[Source]:
        """Return the tables of a name that it wrote: several if its probe was injected again."""
        return [one for one in self.at.process_sources(name, self.host, self.pid) if one.rank == self.rank]

    def records(self, name: str) -> Records:
        """Return its records in tables of a name."""
        return Records(self.at.cursor_ns, self.tables(name))

    @property
    def host_samples(self) -> Records:
        """The samples of its memory and cores."""
        return self.at.records("processes", self.host, "pid", self.pid)

    @property
    def gpu_key(self) -> GpuKey | None:
        """Host and NVML index of the GPU on which it allocates."""
        return locate_processes(self.at.whole).get(self.process)

    @property
    def gpu_samples(self) -> Records:
        """NVML's samples of its GPU."""
        host, index = self.gpu_key or ("", -1)
        return self.at.records("gpus", host, "gpu", index)


def add_library(engine: EngineFacts | None, total_steps: Iterable[TotalSteps]) -> EngineFacts:
    """Return an engine's facts with the library that runs it, which DeepSpeed's events of planned steps name."""
    is_trainer = any(event.source == "trainer" for event in total_steps)
    facts = engine.facts if engine is not None else {}
    return EngineFacts({"library": TRAINER, **facts} if facts and is_trainer else facts)
