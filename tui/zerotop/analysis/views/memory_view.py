"""The memory screen at a cursor: a chosen rank's GPU and host memory, and those of the other ranks.

After the ranks have exited it shows the last moment at which all of them were alive, or the failure that ended them.
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
from zerotop.analysis.memory.block_lines import Look, read_last_look
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate, RuleOfThumb
from zerotop.analysis.memory.expected.zero_model import (
    EngineSetup,
    ExpectedBytes,
    compare_ledger,
    compute_rule_of_thumb,
    estimate_job,
    is_for_setup,
    parse_setups,
    sum_expected,
)
from zerotop.analysis.memory.gpu_holders import find_engine_gpus, read_gpu_by_allocator
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import HostLedger, read_host_ledger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_table import MemoryLine, build_gpu_lines, build_host_lines
from zerotop.analysis.memory.microscope import AllocationTrace, AllocationTraces
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import RankPeaks, read_peaks
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import RankProcess, find_alive_processes, identify_process, read_events
from zerotop.analysis.processes.host_memory import HostMemory
from zerotop.analysis.processes.process_exits import read_exits_until
from zerotop.analysis.processes.thinned import is_thinned_at
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.events import Engine

Item = TypeVar("Item")

MOST_SHOWN = 8
"""The number of GPUs or ranks that are shown; of more, the chosen one and those with the most and the least bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """All that the screen shows. Bytes, unix nanoseconds."""

    cursor_ns: int
    moment_ns: int  # of the ledgers: the cursor, or an earlier time if the ranks had exited by then
    rank: int | None  # the chosen one; None before any rank
    gpus: tuple[GpuLedger, ...]  # by host and index: all, or the outstanding ones
    hidden_gpus: int  # how many others there are
    gpu: GpuLedger | None  # the chosen rank's, one of ``gpus``
    lines: tuple[MemoryLine, ...]  # of that one
    peak: PeakLedger | None  # of that one
    peaks: RankPeaks | None  # of the chosen rank
    hosts: tuple[HostLedger, ...]  # by rank: all, or the outstanding ones
    hidden_hosts: int
    host: HostLedger | None  # the chosen rank's, one of ``hosts``
    host_lines: tuple[MemoryLine, ...]
    node_memory: HostMemory | None  # of the chosen rank's node
    setup: EngineSetup | None  # of the chosen rank's first engine that trains
    micro_steps: int  # in a step of that engine
    estimates: tuple[Estimate, ...]  # DeepSpeed's own, for all options
    rule: RuleOfThumb | None  # the rule of thumb with the chosen rank's measured figures
    health: AllocatorHealth | None  # of the chosen rank's allocator
    trace: AllocationTrace | None  # the chosen rank's latest
    look: Look | None  # the last at the lines that allocate, of the same rank
    failure: Failure | None  # what ended the job

    @property
    def own_estimates(self) -> tuple[Estimate, ...]:
        """DeepSpeed's estimates for the job's options."""
        if self.setup is None:
            return ()
        return tuple(estimate for estimate in self.estimates if is_for_setup(estimate, self.setup))


@dataclass(frozen=True, slots=True, eq=False)
class _AllRanks:
    """All ranks and GPUs at a moment, whichever rank is chosen."""

    processes: list[RankProcess]
    allocators: dict[RankProcess, tuple[GpuKey, Source]]  # the GPU of each rank's allocator, and the allocator's table
    used_bytes: dict[GpuKey, int]  # NVML's last figure
    resident_bytes: dict[RankProcess, int]  # each rank's last sample


class MemoryViewBuilder:
    """Builds the view at any cursor; the last view is cached."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._failures = FailureFinder(session)
        self._traces = AllocationTraces(session)
        self._last: tuple[tuple[object, ...], MemoryView] | None = None
        self._all_ranks: tuple[tuple[int, ...], _AllRanks] | None = None

    def view_at(self, cursor_ns: int, rank: int | None = None, most: int = MOST_SHOWN) -> MemoryView:
        """Return the view at the cursor with ``rank`` chosen, or the first rank where there is no such rank."""
        # A result for a cursor is final only if all records up to it have been read.
        key = (cursor_ns, rank, most, len(self._session.events))
        if self._last is None or self._last[0] != key:
            self._last = key, self._build_view(cursor_ns, rank, most)
        return self._last[1]

    def _build_view(self, cursor_ns: int, rank: int | None, most: int) -> MemoryView:
        session, failure = self._session, self._failures.failure_at(cursor_ns)
        moment_ns = find_last_alive(session, cursor_ns, failure)
        ranks = self._read_all_ranks(moment_ns)
        processes = ranks.processes
        process = next((p for p in processes if p.rank == rank), next(iter(processes), None))
        key, source = ranks.allocators.get(process, (None, None)) if process is not None else (None, None)
        if key is None and process is not None:
            key = find_engine_gpus(session, moment_ns).get((process.host, process.pid))
        key = key if key is not None else min(ranks.used_bytes, default=None)
        gpus = read_ledgers(session, moment_ns, _choose_outstanding(ranks.used_bytes, key, most))
        gpu = next((ledger for ledger in gpus if (ledger.host, ledger.index) == key), None)
        peak = next(iter(read_peak_ledgers(session, moment_ns, [key])), None) if key is not None else None
        engines = read_events(session, Engine, process, moment_ns) if process is not None else []
        setups = parse_setups(engines)
        setup, expected = next(iter(setups), None), sum_expected(setups)
        peaks = read_peaks(session, source, moment_ns) if source is not None else None
        peaks = peaks if peaks is not None and peaks.phases else None
        shown = sorted(_choose_outstanding(ranks.resident_bytes, process, most), key=lambda p: (p.rank, p.host))
        ledgers = (read_host_ledger(session, shown_process, moment_ns) for shown_process in shown)
        hosts = tuple(ledger for ledger in ledgers if ledger is not None)
        host = next((ledger for ledger in hosts if process is not None and ledger.rank == process.rank), None)
        node_memory = read_last_seconds(session, process.host, moment_ns) if process is not None else ()
        return MemoryView(
            cursor_ns=cursor_ns,
            moment_ns=moment_ns,
            rank=process.rank if process is not None else None,
            gpus=gpus,
            hidden_gpus=len(ranks.used_bytes) - len(gpus),
            gpu=gpu,
            lines=_build_gpu_lines(gpu, peak, expected),
            peak=peak,
            peaks=peaks,
            hosts=hosts,
            hidden_hosts=len(ranks.resident_bytes) - len(shown),
            host=host,
            host_lines=_build_host_lines(host, expected),
            node_memory=node_memory[-1] if node_memory else None,
            setup=setup,
            micro_steps=engines[0].gradient_accumulation or 1 if engines else 1,
            estimates=estimate_job(setup, nodes=len({p.host for p in processes})) if setup is not None else (),
            rule=_compute_rule(session, process, peaks, moment_ns),
            health=read_rank_health(session, source, moment_ns) if source is not None else None,
            trace=self._traces.trace_at(cursor_ns, process.rank) if process is not None else None,
            look=read_last_look(session, process, cursor_ns) if process is not None else None,
            failure=failure,
        )

    def _read_all_ranks(self, moment_ns: int) -> _AllRanks:
        session, key = self._session, (moment_ns, len(self._session.events))
        if self._all_ranks is None or self._all_ranks[0] != key:
            processes, tables = find_alive_processes(session, moment_ns), session.sources["allocator"]
            by_index = read_gpu_by_allocator(session, moment_ns)
            thinned = {index for index in by_index if is_thinned_at(session, tables[index], moment_ns)}
            allocators = {
                identify_process(tables[index]): (gpu, tables[index])
                for index, gpu in by_index.items()
                if index not in thinned
            }
            used = dict.fromkeys((gpu for gpu, _ in allocators.values()), 0) | _read_used_bytes(session, moment_ns)
            resident = _read_resident_bytes(session, moment_ns, processes)
            self._all_ranks = key, _AllRanks(processes, allocators, used, resident)
        return self._all_ranks[1]


def find_last_alive(session: Session, cursor_ns: int, failure: Failure | None) -> int:
    """Return the cursor while ranks are alive; else the failure that ended them, or the last moment when all were alive."""
    tables = session.sources["begins"] + session.sources["spans"] + session.sources["allocator"]
    if find_alive_processes(session, cursor_ns) or not tables:
        return cursor_ns
    if failure is not None and failure.unix_ns <= cursor_ns and find_alive_processes(session, failure.unix_ns):
        return failure.unix_ns
    exits = read_exits_until(session, cursor_ns)
    born = (source for source in tables if source.created_ns <= cursor_ns)
    times = [exit_ns for source in born if (exit_ns := exits.find_exit(source)) is not None]
    # Ranks of one attempt exit within a minute; earlier exits are those of an attempt before.
    attempt_ns = max(times, default=cursor_ns) - 60_000_000_000
    return min((exit_ns for exit_ns in times if exit_ns > attempt_ns), default=cursor_ns + 1) - 1


def _read_used_bytes(session: Session, moment_ns: int) -> dict[GpuKey, int]:
    used: dict[GpuKey, int] = {}
    for host, (_, tick) in ranks_and_hosts.find_last_ticks(session.sources["gpus"], moment_ns).items():
        used |= {(host, gpu): size for gpu, size in tick[["gpu", "used_bytes"]].tolist()}
    return used


def _read_resident_bytes(session: Session, moment_ns: int, processes: Sequence[RankProcess]) -> dict[RankProcess, int]:
    """Return the processes' last samples; 0 if there are none."""
    resident = dict.fromkeys(processes, 0)
    for host, (_, tick) in ranks_and_hosts.find_last_ticks(session.sources["processes"], moment_ns).items():
        for pid, rank, size in tick[["pid", "rank", "rss_bytes"]].tolist():
            if (process := RankProcess(host, pid, rank)) in resident:
                resident[process] = size
    return resident


def _choose_outstanding(amounts: Mapping[Item, int], chosen: Item | None, most: int) -> list[Item]:
    """Return all items if they are few; else the chosen one, the lowest one and the highest ones, in their order."""
    order = list(amounts)
    if len(order) <= most:
        return order
    ranked = sorted(order, key=lambda item: -amounts[item])
    wanted = [item for item in (chosen, ranked[-1]) if item is not None]
    wanted += [item for item in ranked if item not in wanted][: most - len(wanted)]
    return [item for item in order if item in wanted]


def _build_gpu_lines(
    gpu: GpuLedger | None, peak: PeakLedger | None, expected: ExpectedBytes | None
) -> tuple[MemoryLine, ...]:
    if gpu is None:
        return ()
    differences = compare_ledger(gpu, expected) if expected is not None and gpu.ranks else ()
    return build_gpu_lines(gpu, peak.ledger if peak is not None else None, differences)


def _build_host_lines(host: HostLedger | None, expected: ExpectedBytes | None) -> tuple[MemoryLine, ...]:
    if host is None:
        return ()
    return build_host_lines(host, compare_ledger(host, expected) if expected is not None else ())


def _compute_rule(
    session: Session, process: RankProcess | None, peaks: RankPeaks | None, moment_ns: int
) -> RuleOfThumb | None:
    if process is None or peaks is None:
        return None
    inventory = read_inventory(session, process, moment_ns)
    return compute_rule_of_thumb(inventory, peaks) if inventory is not None else None
