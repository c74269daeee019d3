"""The memory screen at a cursor: a chosen rank's GPU and host memory, and those of the other ranks.

After the ranks have exited it shows the end of the last step, before Python frees its tensors, or the failure that ended
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zerotop.analysis.failures.diagnosis import find_known_failure
from zerotop.analysis.failures.end import End
from zerotop.analysis.failures.last_moments import read_last_seconds
from zerotop.analysis.memory.allocator_health import AllocatorHealth, read_rank_health
from zerotop.analysis.memory.block_lines import Look, read_last_look
from zerotop.analysis.memory.expected import zero_model
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate, RuleOfThumb
from zerotop.analysis.memory.gpu_holders import find_engine_gpus
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import HostLedger, read_host_ledger
from zerotop.analysis.memory.ledger_rows import ALLOCATED, UNALLOCATED, GpuLedger
from zerotop.analysis.memory.memory_table import MemoryLine, build_gpu_lines, build_host_lines
from zerotop.analysis.memory.microscope import AllocationTrace, read_last_trace
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import RankPeaks, read_peaks
from zerotop.analysis.memory.reading_places import describe_reading
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.analysis.processes import ranks_and_hosts
from zerotop.analysis.processes.thinned import is_thinned_at
from zerotop.analysis.views.recording_source import RecordingSource, StepEnd
from zerotop.recording.keys import GpuKey, RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.moments.host_memory import HostMemory
from zerotop.recording.moments.moment import at_cursor
from zerotop.recording.moments.process_exits import find_alive_processes, find_latest, read_exits
from zerotop.recording.reader import Source
from zerotop_probe.recording.events import Engine, Goodbye, RankGone

Item = TypeVar("Item")

# Ranks of one attempt exit within this time; earlier exits are those of an attempt before.
_ATTEMPT_EXITS_NS = 60 * 10**9

MOST_SHOWN = 8
"""The number of GPUs or ranks that are shown; of more, the chosen one and those with the most and the least bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryView:
    """All that the screen shows. Bytes, unix nanoseconds."""

    cursor_ns: int
    moment_ns: int  # of the ledgers: the cursor, or an earlier time if the job was over by then
    step: int | None  # the step that ends at that moment, where it is the last one
    peaks_until_ns: int  # up to where peaks count: the cursor, or the last moment before the exit
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
    setup: zero_model.EngineSetup | None  # of the chosen rank's first engine that trains
    micro_steps: int  # in a step of that engine
    estimates: tuple[Estimate, ...]  # DeepSpeed's own, for all options
    rule: RuleOfThumb | None  # the rule of thumb with the chosen rank's measured figures
    health: AllocatorHealth | None  # of the chosen rank's allocator
    trace: AllocationTrace | None  # the chosen rank's latest
    look: Look | None  # the last at the lines that allocate, of the same rank
    failure: End | None  # what ended the job

    @property
    def moment_text(self) -> str:
        """Of which moment the ledgers are: ``at the end of step 8``; ``at the end`` where that is the cursor."""
        if self.failure is not None and self.failure.unix_ns - self.moment_ns in (0, 1):
            return "at the failure"
        if self.step is not None:
            return f"at the end of step {self.step}"
        return "at the end" if self.moment_ns == self.cursor_ns else "when the first rank exited"

    @property
    def own_estimates(self) -> tuple[Estimate, ...]:
        """DeepSpeed's estimates for the job's options."""
        if self.setup is None:
            return ()
        return tuple(estimate for estimate in self.estimates if zero_model.is_for_setup(estimate, self.setup))


@dataclass(frozen=True, slots=True, eq=False)
class _AllRanks:
    """All ranks and GPUs at a moment, whichever rank is chosen."""

    processes: tuple[RankProcess, ...]
    allocators: dict[RankProcess, tuple[GpuKey, Source]]  # the GPU of each rank's allocator, and the allocator's table
    used_bytes: dict[GpuKey, int]  # NVML's last figure
    resident_bytes: dict[RankProcess, int]  # each rank's last sample


@at_cursor
def read_memory_view(
    at: At, rank: int | None = None, most: int = MOST_SHOWN, *, last: StepEnd | None = None, is_over: bool = False
) -> MemoryView:
    """Return the view with ``rank`` chosen, or the first rank where there is no such rank.

    ``last``: the last step, whose end is shown after a job without a failure; with ``is_over``, also where no end of the
    ranks was recorded.
    """
    failure = find_known_failure(at)
    alive = at.at(find_last_alive(at, failure))
    is_step_shown = failure is None and _has_ended_since(alive, at.cursor_ns, last)
    step = last if is_step_shown or (is_over and alive.cursor_ns == at.cursor_ns) else None
    moment = at.at(step.unix_ns) if step is not None else alive
    ranks = _read_all_ranks(moment)
    processes = ranks.processes
    process = next((p for p in processes if p.rank == rank), next(iter(processes), None))
    key, source = ranks.allocators.get(process, (None, None)) if process is not None else (None, None)
    if key is None and process is not None:
        key = find_engine_gpus(moment).get((process.host, process.pid))
    key = key if key is not None else min(ranks.used_bytes, default=None)
    gpus = read_ledgers(moment, _choose_outstanding(ranks.used_bytes, key, most))
    if last is not None and last.unix_ns == moment.cursor_ns:
        gpus = tuple(_add_reading_note(moment, ledger, ranks, last.step) for ledger in gpus)
    gpu = next((ledger for ledger in gpus if (ledger.host, ledger.index) == key), None)
    peak = next(iter(read_peak_ledgers(alive, [key])), None) if key is not None else None
    engines = moment.process_events(Engine, process) if process is not None else []
    setups = zero_model.parse_setups(engines)
    setup, expected = next(iter(setups), None), zero_model.sum_expected(setups)
    peaks = read_peaks(alive, source) if source is not None else None
    peaks = peaks if peaks is not None and peaks.phases else None
    shown = sorted(_choose_outstanding(ranks.resident_bytes, process, most), key=lambda p: (p.rank, p.host))
    ledgers = (read_host_ledger(moment, shown_process) for shown_process in shown)
    hosts = tuple(ledger for ledger in ledgers if ledger is not None)
    host = next((ledger for ledger in hosts if process is not None and ledger.rank == process.rank), None)
    node_memory = read_last_seconds(moment, process.host) if process is not None else ()
    return MemoryView(
        cursor_ns=at.cursor_ns,
        moment_ns=moment.cursor_ns,
        step=last.step if last is not None and last.unix_ns == moment.cursor_ns else None,
        peaks_until_ns=alive.cursor_ns,
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
        estimates=zero_model.estimate_job(setup, nodes=len({p.host for p in processes})) if setup is not None else (),
        rule=_compute_rule(moment, process, peaks),
        health=_read_health(at, alive, source) if source is not None else None,
        trace=read_last_trace(at, process.rank) if process is not None else None,
        look=read_last_look(at, process) if process is not None else None,
        failure=failure,
    )


def _add_reading_note(at: At, ledger: GpuLedger, ranks: _AllRanks, step: int) -> GpuLedger:
    """Return the ledger at the end of a step with a note for allocators that were not read at that end."""
    if not ledger.sum_bytes(*ALLOCATED, UNALLOCATED):
        return ledger
    sources = (source for key, source in ranks.allocators.values() if key == (ledger.host, ledger.index))
    notes = list(filter(None, (describe_reading(at, source, step) for source in sources)))
    return replace(ledger, notes=(*notes[:1], *ledger.notes))


def read_last_memory(source: RecordingSource, rank: int | None = None, most: int = MOST_SHOWN) -> MemoryView:
    """Return the view at the end of a recording; of a job that still runs, at the end of its last step."""
    return read_memory_view(source.recording.at(source.end_ns), rank, most, last=source.last_step_end, is_over=True)


def _has_ended_since(alive: At, cursor_ns: int, last: StepEnd | None) -> bool:
    """Whether all ranks of the last moment before an exit were there at the end of the last step."""
    return (
        last is not None
        and last.unix_ns <= alive.cursor_ns < cursor_ns
        and find_alive_processes(alive.at(last.unix_ns)) == find_alive_processes(alive)
    )


@at_cursor
def _read_all_ranks(at: At) -> _AllRanks:
    processes = find_alive_processes(at)
    located = locate_allocators(at).items()
    allocators = {identify_process(source): (gpu, source) for source, gpu in located if not is_thinned_at(at, source)}
    used = dict.fromkeys((gpu for gpu, _ in allocators.values()), 0) | _read_used_bytes(at)
    return _AllRanks(processes, allocators, used, _read_resident_bytes(at, processes))


def find_last_alive(at: At, failure: End | None) -> int:
    """Return the cursor while ranks report; else the failure that ended them, or the last moment when all reported."""
    tables = at.sources["begins"] + at.sources["spans"] + at.sources["allocator"]
    exits = read_exits(at)
    if not tables or any(exits.reported_until(source) is None for source in find_latest(at)):
        return at.cursor_ns
    if failure is not None and failure.unix_ns <= at.cursor_ns and find_alive_processes(at.at(failure.unix_ns)):
        return min([failure.unix_ns, *(time_ns - 1 for time_ns in _find_vanished(at, failure.unix_ns))])
    born = (source for source in tables if source.created_ns <= at.cursor_ns)
    times = [exit_ns for source in born if (exit_ns := exits.reported_until(source)) is not None]
    attempt_ns = max(times, default=at.cursor_ns) - _ATTEMPT_EXITS_NS
    return min((exit_ns for exit_ns in times if exit_ns > attempt_ns), default=at.cursor_ns + 1) - 1


def _find_vanished(at: At, until_ns: int) -> list[int]:
    """Return when ranks of the attempt that ended at ``until_ns`` were found gone without a goodbye."""
    left = {event.process_key for event in at.events_of(Goodbye)}
    times = [event.unix_ns for event in at.events_of(RankGone) if event.process_key not in left]
    return [time_ns for time_ns in times if until_ns - _ATTEMPT_EXITS_NS < time_ns <= until_ns]


def _read_used_bytes(at: At) -> dict[GpuKey, int]:
    used: dict[GpuKey, int] = {}
    for host, (_, tick) in ranks_and_hosts.find_last_ticks(at.sources["gpus"], at.cursor_ns).items():
        used |= {(host, gpu): size for gpu, size in tick[["gpu", "used_bytes"]].tolist()}
    return used


def _read_resident_bytes(at: At, processes: Sequence[RankProcess]) -> dict[RankProcess, int]:
    """Return the processes' last samples; 0 if there are none."""
    resident = dict.fromkeys(processes, 0)
    for host, (_, tick) in ranks_and_hosts.find_last_ticks(at.sources["processes"], at.cursor_ns).items():
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


def _read_health(at: At, moment: At, source: Source) -> AllocatorHealth | None:
    """Return the counts up to the rank's exit: the last reading comes after an error. The peak is the ledger's."""
    health, before = (read_rank_health(one, source) for one in (at, moment))
    return replace(health, at_peak=before.at_peak) if health is not None and before is not None else health


def _build_gpu_lines(
    gpu: GpuLedger | None, peak: PeakLedger | None, expected: zero_model.ExpectedBytes | None
) -> tuple[MemoryLine, ...]:
    if gpu is None:
        return ()
    differences = zero_model.compare_ledger(gpu, expected) if expected is not None and gpu.ranks else ()
    return build_gpu_lines(gpu, peak.ledger if peak is not None else None, differences)


def _build_host_lines(host: HostLedger | None, expected: zero_model.ExpectedBytes | None) -> tuple[MemoryLine, ...]:
    if host is None:
        return ()
    return build_host_lines(host, zero_model.compare_ledger(host, expected) if expected is not None else ())


def _compute_rule(at: At, process: RankProcess | None, peaks: RankPeaks | None) -> RuleOfThumb | None:
    if process is None or peaks is None:
        return None
    inventory = read_inventory(at, process)
    return zero_model.compute_rule_of_thumb(inventory, peaks) if inventory is not None else None
