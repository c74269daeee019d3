"""A recording up to a cursor, as detectors read it. Later records cannot be reached from here."""

from __future__ import annotations

from zerotop.analysis.findings.support.finding import FindingKind
from zerotop.analysis.findings.support.rank_process import AdvancingRecording, Process
from zerotop.analysis.findings.support.searched import Searched
from zerotop.analysis.findings.support.thresholds import USED_SHARE
from zerotop.recording.keys import GpuKey
from zerotop.recording.moments.devices import locate_processes
from zerotop.recording.moments.records import Records
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints, Rows, Samples
from zerotop.recording.steps.step_table import RankSteps, StepTable
from zerotop_probe.recording.events import EngineFacts

__all__ = ["Evidence", "Floats", "Group", "Ints", "Process", "Records", "Rows", "Samples"]


class Group(Searched):
    """The processes of one attempt of the job, by rank. The first is the lead: it stands for the steps of all ranks."""

    def __init__(self, processes: list[Process]) -> None:
        super().__init__()
        self.processes = processes

    @property
    def lead(self) -> Process:
        """The process of the lowest rank."""
        return self.processes[0]

    @property
    def engine(self) -> EngineFacts:
        """The facts about the lead's engine or loop; empty before it has reported them."""
        return self.lead.engine

    @property
    def command(self) -> str:
        return self.lead.command

    @property
    def has_stages(self) -> bool:
        """Whether ranks are stages of a pipeline, which differ, and wait for each other between their phases."""
        return bool(self.engine.pipeline)

    @property
    def gathers_parameters(self) -> bool:
        """Whether ranks gather parameters within forward and backward, as under ZeRO-3 and FSDP."""
        return self.engine.zero_stage == 3 or (self.engine.parallelism or "").startswith("FSDP")

    @property
    def hosts(self) -> list[str]:
        """The nodes of the processes."""
        return sorted({process.host for process in self.processes})

    def processes_on(self, host: str) -> list[Process]:
        """Return the processes on a node, by rank."""
        return [process for process in self.processes if process.host == host]

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return tuple(process.rank for process in self.processes_on(host))

    def is_memory_short(self, time_ns: int) -> bool:
        """Whether a device of the ranks was ever filled to USED_SHARE; true if that is unknown."""
        for process in self.processes:
            reserved = int(process.steps_until(time_ns)["reserved_peak_bytes"].max(initial=-1))
            if not process.device_bytes or reserved < 0 or reserved >= USED_SHARE * process.device_bytes:
                return True
        return False

    def keep_saving_advice(self, kind: FindingKind, time_ns: int) -> FindingKind:
        """Return a kind of finding without its advice if that saves device memory of which there is plenty."""
        return kind if self.is_memory_short(time_ns) else kind.with_changes(advice="", fix="")

    def step_at(self, time_ns: int) -> int | None:
        """Return the lead's step in progress at a time; None before the first step has finished."""
        return self.lead.step_at(time_ns)

    def ranks_at(self, known_ns: int) -> tuple[int, ...]:
        """Return the ranks that had started at a time."""
        return tuple(process.rank for process in self.processes if process.source.created_ns <= known_ns)


class Evidence(AdvancingRecording):
    """A recording up to a cursor that only moves forward, with its rank processes."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.news = AdvancingRecording(recording)
        """The recording for detectors that need events alone: they look at those that were read last at once."""
        self.groups: list[Group] = []
        """The attempts of the job: a rank that appears again was restarted."""
        self._step_table = StepTable(recording)
        self._processes: dict[Source, Process] = {}
        self._processes_by_gpu: tuple[object, dict[GpuKey, list[Process]]] = (None, {})

    @property
    def processes(self) -> list[Process]:
        """All ranks' processes, in the order in which they created their engines."""
        return list(self._processes.values())

    def advance_cursor(self, cursor_ns: int) -> None:
        """Move the cursor forward."""
        super().advance_cursor(cursor_ns)
        self._step_table.update(self.cursor_ns)
        if self._step_table.process_count == len(self._processes):
            return
        for steps in self._step_table.rank_steps:
            if steps.source not in self._processes and steps.source.created_ns <= self.cursor_ns:
                self._add_process(steps)

    def _add_process(self, steps: RankSteps) -> None:
        process = self._processes[steps.source] = Process(self, steps)
        last = self.groups[-1].processes if self.groups else None
        if last is None or any(process.rank == other.rank for other in last):
            self.groups.append(Group([process]))
        else:
            last.append(process)
            last.sort(key=lambda other: other.rank)

    def find_next_cursor(self, span_count: int, end_ns: int) -> int:
        """Return the cursor at which about ``span_count`` more phases of all ranks have ended; at most ``end_ns``."""
        most, done, longest = 0, 0, None
        sources = self.recording.sources["spans"]
        for source in sources:
            count = source.count_until(self.cursor_ns)
            if len(source.array) - count > most:
                most, done, longest = len(source.array) - count, count, source
        each = max(1, span_count // max(1, len(sources)))
        if longest is None or most <= each:
            return end_ns
        return min(end_ns, int(longest.array["end_ns"][done + each - 1]) + longest.offset_ns)

    def processes_on_gpu(self, gpu_key: GpuKey) -> list[Process]:
        """Return the processes that allocate on a GPU, in the order in which they created their engines."""
        version = (len(self._processes), locate_processes(self.at))
        if self._processes_by_gpu[0] != version:
            by_gpu: dict[GpuKey, list[Process]] = {}
            for process in self.processes:
                if process.gpu_key is not None:
                    by_gpu.setdefault(process.gpu_key, []).append(process)
            self._processes_by_gpu = version, by_gpu
        return self._processes_by_gpu[1].get(gpu_key, [])

    def find_first_creations(self) -> dict[str, int]:
        """Return when the first rank on each node created its engine (unix nanoseconds), by host."""
        first: dict[str, int] = {}
        for process in self._processes.values():
            first[process.host] = min(process.source.created_ns, first.get(process.host, process.source.created_ns))
        return first
