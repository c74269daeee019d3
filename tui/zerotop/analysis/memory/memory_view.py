"""Where memory is at a cursor, as one screen shows it: a chosen rank's GPU and its host memory, and the others beside.

After the ranks have gone it is the last moment at which all of them were there, or that of the failure which ended them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zerotop.analysis.failures.diagnosis import FailureFinder
from zerotop.analysis.failures.failure import Failure
from zerotop.analysis.failures.last_moments import read_last_seconds
from zerotop.analysis.keys import GpuKey
from zerotop.analysis.memory.allocator_health import AllocatorHealth, read_rank_health
from zerotop.analysis.memory.deepspeed_estimates import Estimate, RuleOfThumb
from zerotop.analysis.memory.gpu_holders import find_engine_gpus, read_gpu_by_allocator
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import HostLedger, read_host_ledger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_table import MemoryLine, build_gpu_lines, build_host_lines
from zerotop.analysis.memory.microscope import AllocationTrace, AllocationTraces
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import RankPeaks, read_peaks
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.analysis.memory.zero_model import (
    EngineSetup,
    ExpectedBytes,
    compare_ledger,
    compute_rule_of_thumb,
    estimate_job,
    is_for_setup,
    parse_setups,
    sum_expected,
)
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import RankProcess, find_alive_processes, identify_process, read_events
from zerotop.analysis.processes.host_memory import HostMemory
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.session.reader import Event, Session, Source

Item = TypeVar("Item")

MOST_SHOWN = 8
"""GPUs or ranks that are shown beside one another: of more the chosen one and those that stand out."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """What there is to show. Bytes, unix nanoseconds."""

    cursor_ns: int
    moment_ns: int  # which the ledgers are of: the cursor, or before it when ranks had gone by then
    rank: int | None  # the chosen one; None where no rank has made its engine
    gpus: tuple[GpuLedger, ...]  # by host and index: all, or the chosen one and those that stand out
    hidden_gpus: int  # how many there are beside these
    gpu: GpuLedger | None  # the chosen rank's, one of ``gpus``
    lines: tuple[MemoryLine, ...]  # of that one
    peak: PeakLedger | None  # of that one
    peaks: RankPeaks | None  # the chosen rank's highest by phase
    hosts: tuple[HostLedger, ...]  # by rank: all, or the chosen one and those that stand out
    hidden_hosts: int
    host: HostLedger | None  # the chosen rank's, one of ``hosts``
    host_lines: tuple[MemoryLine, ...]
    node_memory: HostMemory | None  # of the chosen rank's node
    setup: EngineSetup | None  # of the chosen rank's first engine that trains
    micro_steps: int  # of a step of that engine
    estimates: tuple[Estimate, ...]  # DeepSpeed's own, in all their option rows
    rule: RuleOfThumb | None  # the rule of thumb with what was measured of the chosen rank
    health: AllocatorHealth | None  # of the chosen rank's allocator
    trace: AllocationTrace | None  # the chosen rank's last through the microscope
    failure: Failure | None  # what ended the job

    @property
    def own_estimates(self) -> tuple[Estimate, ...]:
        """DeepSpeed's for what the job does."""
        return tuple(each for each in self.estimates if self.setup is not None and is_for_setup(each, self.setup))


@dataclass(frozen=True, slots=True, eq=False)
class _AllRanks:
    """What is known at a moment of all ranks and GPUs, whichever rank was chosen."""

    processes: list[RankProcess]
    allocator_gpus: dict[
        RankProcess, tuple[GpuKey, Source]
    ]  # the GPU that each rank's allocator lies on, and the allocator's table
    used_bytes: dict[GpuKey, int]  # what NVML said last of each GPU
    resident_bytes: dict[RankProcess, int]  # what each rank was seen to hold last


class MemoryViewBuilder:
    """The view at any cursor. The same view again where nothing has come to it since."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._failures = FailureFinder(session)
        self._traces = AllocationTraces(session)
        self._last: tuple[tuple[object, ...], MemoryView] | None = None
        self._all_ranks: tuple[tuple[int, ...], _AllRanks] | None = None

    def view_at(self, cursor_ns: int, rank: int | None = None, most: int = MOST_SHOWN) -> MemoryView:
        """What was known at the cursor of ``rank``, or of the first one there is."""
        # A cursor stands still only where all that was known at it has been read.
        key = (cursor_ns, rank, most, len(self._session.events))
        if self._last is None or self._last[0] != key:
            self._last = key, self._build_view(cursor_ns, rank, most)
        return self._last[1]

    def _build_view(self, cursor_ns: int, rank: int | None, most: int) -> MemoryView:
        session, died = self._session, self._failures.failure_at(cursor_ns)
        moment_ns = find_last_alive(session, cursor_ns, died)
        everyone = self._read_all_ranks(moment_ns)
        processes, on = everyone.processes, everyone.allocator_gpus
        process = next((one for one in processes if one.rank == rank), processes[0] if processes else None)
        key, source = on.get(process, (None, None)) if process is not None else (None, None)
        if key is None and process is not None:
            key = find_engine_gpus(session, moment_ns).get((process.host, process.pid))
        used = everyone.used_bytes
        key = key if key is not None else min(used, default=None)
        shown = _choose_standing_out(used, key, most)
        gpus = read_ledgers(session, moment_ns, shown)
        gpu = next((one for one in gpus if (one.host, one.index) == key), None)
        peak = next(iter(read_peak_ledgers(session, moment_ns, [key])), None) if key is not None else None
        engines = read_events(session, "engine", process, moment_ns) if process is not None else []
        setups = parse_setups(engines)
        known, said = next(iter(setups), None), sum_expected(setups)
        peaks = read_peaks(session, source, moment_ns) if source is not None else None
        peaks = peaks if peaks is not None and peaks.phases else None
        hosts, beside = self._choose_host_ledgers(moment_ns, everyone.resident_bytes, process, most)
        host = next((one for one in hosts if process is not None and one.rank == process.rank), None)
        nodes = len({one.host for one in processes})
        return MemoryView(
            cursor_ns=cursor_ns,
            moment_ns=moment_ns,
            rank=process.rank if process is not None else None,
            gpus=gpus,
            hidden_gpus=len(used) - len(gpus),
            gpu=gpu,
            lines=_build_lines(gpu, peak, said),
            peak=peak,
            peaks=peaks,
            hosts=hosts,
            hidden_hosts=beside,
            host=host,
            host_lines=build_host_lines(host, compare_ledger(host, said) if said is not None else ())
            if host is not None
            else (),
            node_memory=next(iter(read_last_seconds(session, process.host, moment_ns)[-1:]), None)
            if process is not None
            else None,
            setup=known,
            micro_steps=_read_micro_steps(engines[0]) if engines else 1,
            estimates=estimate_job(known, nodes=nodes) if known is not None else (),
            rule=_compute_rule(session, process, peaks, moment_ns),
            health=read_rank_health(session, source, moment_ns) if source is not None else None,
            trace=self._traces.trace_at(cursor_ns, process.rank) if process is not None else None,
            failure=died,
        )

    def _read_all_ranks(self, moment_ns: int) -> _AllRanks:
        key = moment_ns, len(self._session.events)
        if self._all_ranks is None or self._all_ranks[0] != key:
            processes, on = find_alive_processes(self._session, moment_ns), _map_allocators(self._session, moment_ns)
            used = dict.fromkeys((place for place, _ in on.values()), 0) | _read_used_bytes(self._session, moment_ns)
            self._all_ranks = key, _AllRanks(processes, on, used, _read_resident_bytes(self._session, moment_ns, processes))
        return self._all_ranks[1]

    def _choose_host_ledgers(
        self, moment_ns: int, resident: Mapping[RankProcess, int], chosen: RankProcess | None, most: int
    ) -> tuple[tuple[HostLedger, ...], int]:
        """The ranks' ledgers, and how many more there are."""
        shown = sorted(_choose_standing_out(resident, chosen, most), key=lambda one: (one.rank, one.host))
        found = [read_host_ledger(self._session, process, moment_ns) for process in shown]
        ledgers = tuple(one for one in found if one is not None)
        return ledgers, len(resident) - len(shown)


def find_last_alive(session: Session, cursor_ns: int, failure: Failure | None) -> int:
    """The cursor while ranks are there; else the failure that ended them, or the last moment when all were."""
    tables = session.sources["begins"] + session.sources["spans"] + session.sources["allocator"]
    if find_alive_processes(session, cursor_ns) or not tables:
        return cursor_ns
    if failure is not None and failure.unix_ns <= cursor_ns and find_alive_processes(session, failure.unix_ns):
        return failure.unix_ns
    ends = ProcessExits(event for event in session.events if event.unix_ns <= cursor_ns)
    born = [source for source in tables if source.created_ns <= cursor_ns]
    over = {identify_process(source): end for source in born if (end := ends.find_exit(source)) is not None}
    if not over:
        return cursor_ns
    # Ranks of one attempt leave within a minute; those of an attempt before are not meant.
    last = max(over.values())
    return min(end for end in over.values() if end > last - 60_000_000_000) - 1


def _map_allocators(session: Session, moment_ns: int) -> dict[RankProcess, tuple[GpuKey, Source]]:
    """The GPU that each rank's allocator lies on, and the allocator's table."""
    tables = session.sources["allocator"]
    return {
        identify_process(tables[place]): (key, tables[place])
        for place, key in read_gpu_by_allocator(session, moment_ns).items()
    }


def _read_used_bytes(session: Session, moment_ns: int) -> dict[GpuKey, int]:
    """What NVML said last of each GPU."""
    found = {}
    for host, (_, tick) in ranks_and_hosts.find_last_ticks(session.sources["gpus"], moment_ns).items():
        for gpu, used in zip(tick["gpu"].tolist(), tick["used_bytes"].tolist(), strict=True):
            found[host, gpu] = used
    return found


def _read_resident_bytes(session: Session, moment_ns: int, processes: Sequence[RankProcess]) -> dict[RankProcess, int]:
    """What the processes were seen to hold last; 0 where they were not."""
    found = dict.fromkeys(processes, 0)
    for host, (_, tick) in ranks_and_hosts.find_last_ticks(session.sources["processes"], moment_ns).items():
        columns = (tick[name].tolist() for name in ("pid", "rank", "rss_bytes"))
        for pid, number, size in zip(*columns, strict=True):
            if (one := RankProcess(host, pid, number)) in found:
                found[one] = size
    return found


def _choose_standing_out(amounts: Mapping[Item, int], chosen: Item | None, most: int) -> list[Item]:
    """All where they are few; else the chosen one, the one with the least and those with the most, in their order."""
    order = list(amounts)
    if len(order) <= most:
        return order
    ranked = sorted(order, key=lambda item: -amounts[item])
    wanted = [item for item in (chosen, ranked[-1]) if item is not None]
    wanted += [item for item in ranked if item not in wanted][: most - len(wanted)]
    return [item for item in order if item in wanted]


def _read_micro_steps(engine: Event) -> int:
    told = engine.facts.get("gradient_accumulation")
    return told if isinstance(told, int) else 1


def _build_lines(gpu: GpuLedger | None, peak: PeakLedger | None, expected: ExpectedBytes | None) -> tuple[MemoryLine, ...]:
    if gpu is None:
        return ()
    differences = compare_ledger(gpu, expected) if expected is not None and gpu.ranks else ()
    return build_gpu_lines(gpu, peak.ledger if peak is not None else None, differences)


def _compute_rule(
    session: Session, process: RankProcess | None, peaks: RankPeaks | None, moment_ns: int
) -> RuleOfThumb | None:
    told = read_inventory(session, process, moment_ns) if process is not None and peaks is not None else None
    return compute_rule_of_thumb(told, peaks) if told is not None and peaks is not None else None
