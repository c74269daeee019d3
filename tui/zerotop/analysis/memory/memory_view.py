"""Where memory is at a cursor, as one screen shows it: a chosen rank's GPU and its host memory, and the others beside.

After the ranks have gone it is the last moment at which all of them were there, or that of the failure which ended them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zerotop.analysis.failures.diagnosis import Failures
from zerotop.analysis.failures.failure import Failure
from zerotop.analysis.failures.oom_kills import HostMemory, last_seconds
from zerotop.analysis.memory.allocator_health import AllocatorHealth, of_source
from zerotop.analysis.memory.deepspeed_estimates import Estimate, Rule
from zerotop.analysis.memory.gpu_ledger import ledger, lies_on, told_on
from zerotop.analysis.memory.host_ledger import HostLedger, of_process
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_table import Line, gpu_lines, host_lines
from zerotop.analysis.memory.microscope import Look, Looks
from zerotop.analysis.memory.nvml_snapshot import Key
from zerotop.analysis.memory.peak_ledger import PeakLedger, ledger_at_peak
from zerotop.analysis.memory.phase_peaks import RankPeaks, peaks_of
from zerotop.analysis.memory.tensor_inventory import inventory
from zerotop.analysis.memory.zero_model import (
    Expected,
    Setup,
    compare,
    estimates,
    expected_of,
    is_of,
    rule_of_thumb,
    setups_of,
)
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.alive_ranks import Process, events_of, living, process_of
from zerotop.analysis.processes.process_exits import Ends
from zerotop.session.reader import Event, Session, Source

Item = TypeVar("Item")

MOST = 8
"""GPUs or ranks that are shown beside one another: of more the chosen one and those that stand out."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """What there is to show. Bytes, unix nanoseconds."""

    cursor_ns: int
    moment_ns: int  # which the ledgers are of: the cursor, or before it when ranks had gone by then
    rank: int | None  # the chosen one; None where no rank has made its engine
    gpus: tuple[GpuLedger, ...]  # by host and index: all, or the chosen one and those that stand out
    gpus_beside: int  # how many there are beside these
    gpu: GpuLedger | None  # the chosen rank's, one of ``gpus``
    lines: tuple[Line, ...]  # of that one
    peak: PeakLedger | None  # of that one
    peaks: RankPeaks | None  # the chosen rank's highest by phase
    hosts: tuple[HostLedger, ...]  # by rank: all, or the chosen one and those that stand out
    hosts_beside: int
    host: HostLedger | None  # the chosen rank's, one of ``hosts``
    host_lines: tuple[Line, ...]
    node: HostMemory | None  # of the chosen rank's node
    setup: Setup | None  # of the chosen rank's first engine that trains
    micro_steps: int  # of a step of that engine
    estimates: tuple[Estimate, ...]  # DeepSpeed's own, in all their option rows
    rule: Rule | None  # the rule of thumb with what was measured of the chosen rank
    health: AllocatorHealth | None  # of the chosen rank's allocator
    look: Look | None  # the chosen rank's last through the microscope
    failure: Failure | None  # what ended the job

    @property
    def own_estimates(self) -> tuple[Estimate, ...]:
        """DeepSpeed's for what the job does."""
        return tuple(each for each in self.estimates if self.setup is not None and is_of(each, self.setup))


@dataclass(frozen=True, slots=True, eq=False)
class _Everyone:
    """What is known at a moment of all ranks and GPUs, whichever rank was chosen."""

    processes: list[Process]
    on: dict[Process, tuple[Key, Source]]  # the GPU that each rank's allocator lies on, and the allocator's table
    used: dict[Key, int]  # what NVML said last of each GPU
    resident: dict[Process, int]  # what each rank was seen to hold last


class MemoryViews:
    """The view at any cursor. The same view again where nothing has come to it since."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._failures = Failures(session)
        self._looks = Looks(session)
        self._last: tuple[tuple[object, ...], MemoryView] | None = None
        self._everyone: tuple[tuple[int, ...], _Everyone] | None = None

    def at(self, cursor_ns: int, rank: int | None = None, most: int = MOST) -> MemoryView:
        """What was known at the cursor of ``rank``, or of the first one there is."""
        # A cursor stands still only where all that was known at it has been read.
        key = (cursor_ns, rank, most, len(self._session.events))
        if self._last is None or self._last[0] != key:
            self._last = key, self._view(cursor_ns, rank, most)
        return self._last[1]

    def _view(self, cursor_ns: int, rank: int | None, most: int) -> MemoryView:
        session, died = self._session, self._failures.at(cursor_ns)
        moment_ns = last_alive(session, cursor_ns, died)
        everyone = self._everyone_at(moment_ns)
        processes, on = everyone.processes, everyone.on
        process = next((one for one in processes if one.rank == rank), processes[0] if processes else None)
        key, source = on.get(process, (None, None)) if process is not None else (None, None)
        if key is None and process is not None:
            key = told_on(session, moment_ns).get((process.host, process.pid))
        used = everyone.used
        key = key if key is not None else min(used, default=None)
        shown = _standing_out(used, key, most)
        gpus = ledger(session, moment_ns, shown)
        gpu = next((one for one in gpus if (one.host, one.index) == key), None)
        peak = next(iter(ledger_at_peak(session, moment_ns, [key])), None) if key is not None else None
        engines = events_of(session, "engine", process, moment_ns) if process is not None else []
        setups = setups_of(engines)
        known, said = next(iter(setups), None), expected_of(setups)
        peaks = peaks_of(session, source, moment_ns) if source is not None else None
        peaks = peaks if peaks is not None and peaks.phases else None
        hosts, beside = self._hosts(moment_ns, everyone.resident, process, most)
        host = next((one for one in hosts if process is not None and one.rank == process.rank), None)
        nodes = len({one.host for one in processes})
        return MemoryView(
            cursor_ns=cursor_ns,
            moment_ns=moment_ns,
            rank=process.rank if process is not None else None,
            gpus=gpus,
            gpus_beside=len(used) - len(gpus),
            gpu=gpu,
            lines=_gpu_lines(gpu, peak, said),
            peak=peak,
            peaks=peaks,
            hosts=hosts,
            hosts_beside=beside,
            host=host,
            host_lines=host_lines(host, compare(host, said) if said is not None else ()) if host is not None else (),
            node=next(iter(last_seconds(session, process.host, moment_ns)[-1:]), None) if process is not None else None,
            setup=known,
            micro_steps=_micro_steps(engines[0]) if engines else 1,
            estimates=estimates(known, nodes=nodes) if known is not None else (),
            rule=_rule(session, process, peaks, moment_ns),
            health=of_source(session, source, moment_ns) if source is not None else None,
            look=self._looks.at(cursor_ns, process.rank) if process is not None else None,
            failure=died,
        )

    def _everyone_at(self, moment_ns: int) -> _Everyone:
        key = moment_ns, len(self._session.events)
        if self._everyone is None or self._everyone[0] != key:
            processes, on = living(self._session, moment_ns), _placed(self._session, moment_ns)
            used = dict.fromkeys((place for place, _ in on.values()), 0) | _used(self._session, moment_ns)
            self._everyone = key, _Everyone(processes, on, used, _resident(self._session, moment_ns, processes))
        return self._everyone[1]

    def _hosts(
        self, moment_ns: int, resident: Mapping[Process, int], chosen: Process | None, most: int
    ) -> tuple[tuple[HostLedger, ...], int]:
        """The ranks' ledgers, and how many more there are."""
        shown = sorted(_standing_out(resident, chosen, most), key=lambda one: (one.rank, one.host))
        found = [of_process(self._session, process, moment_ns) for process in shown]
        ledgers = tuple(one for one in found if one is not None)
        return ledgers, len(resident) - len(shown)


def last_alive(session: Session, cursor_ns: int, died: Failure | None) -> int:
    """The cursor while ranks are there; else the failure that ended them, or the last moment when all were."""
    tables = session.sources["begins"] + session.sources["spans"] + session.sources["allocator"]
    if living(session, cursor_ns) or not tables:
        return cursor_ns
    if died is not None and died.unix_ns <= cursor_ns and living(session, died.unix_ns):
        return died.unix_ns
    ends = Ends(event for event in session.events if event.unix_ns <= cursor_ns)
    born = [source for source in tables if source.born_ns <= cursor_ns]
    over = {process_of(source): end for source in born if (end := ends.of(source)) is not None}
    if not over:
        return cursor_ns
    # Ranks of one attempt leave within a minute; those of an attempt before are not meant.
    last = max(over.values())
    return min(end for end in over.values() if end > last - 60_000_000_000) - 1


def _placed(session: Session, moment_ns: int) -> dict[Process, tuple[Key, Source]]:
    """The GPU that each rank's allocator lies on, and the allocator's table."""
    tables = session.sources["allocator"]
    return {process_of(tables[place]): (key, tables[place]) for place, key in lies_on(session, moment_ns).items()}


def _used(session: Session, moment_ns: int) -> dict[Key, int]:
    """What NVML said last of each GPU."""
    found = {}
    for host, (_, tick) in ranks_and_hosts.last_ticks(session.sources["gpus"], moment_ns).items():
        for gpu, used in zip(tick["gpu"].tolist(), tick["used_bytes"].tolist(), strict=True):
            found[host, gpu] = used
    return found


def _resident(session: Session, moment_ns: int, processes: Sequence[Process]) -> dict[Process, int]:
    """What the processes were seen to hold last; 0 where they were not."""
    found = dict.fromkeys(processes, 0)
    for host, (_, tick) in ranks_and_hosts.last_ticks(session.sources["processes"], moment_ns).items():
        columns = (tick[name].tolist() for name in ("pid", "rank", "rss_bytes"))
        for pid, number, size in zip(*columns, strict=True):
            if (one := Process(host, pid, number)) in found:
                found[one] = size
    return found


def _standing_out(amounts: Mapping[Item, int], chosen: Item | None, most: int) -> list[Item]:
    """All where they are few; else the chosen one, the one with the least and those with the most, in their order."""
    order = list(amounts)
    if len(order) <= most:
        return order
    ranked = sorted(order, key=lambda item: -amounts[item])
    wanted = [item for item in (chosen, ranked[-1]) if item is not None]
    wanted += [item for item in ranked if item not in wanted][: most - len(wanted)]
    return [item for item in order if item in wanted]


def _micro_steps(engine: Event) -> int:
    told = engine.facts.get("gradient_accumulation")
    return told if isinstance(told, int) else 1


def _gpu_lines(gpu: GpuLedger | None, peak: PeakLedger | None, said: Expected | None) -> tuple[Line, ...]:
    if gpu is None:
        return ()
    differences = compare(gpu, said) if said is not None and gpu.ranks else ()
    return gpu_lines(gpu, peak.ledger if peak is not None else None, differences)


def _rule(session: Session, process: Process | None, peaks: RankPeaks | None, moment_ns: int) -> Rule | None:
    told = inventory(session, process, moment_ns) if process is not None and peaks is not None else None
    return rule_of_thumb(told, peaks) if told is not None and peaks is not None else None
