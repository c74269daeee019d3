"""A job's memory at one moment: every GPU and rank, expected against measured, peaks, and the cause of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from zerotop.analysis.engine import EngineSummary, keep_latest, parse_engine
from zerotop.analysis.failures.diagnosis import find_failure
from zerotop.analysis.failures.end import End
from zerotop.analysis.failures.out_of_memory import PostMortem, find_post_mortem
from zerotop.analysis.memory.allocator_health import AllocatorHealth, read_allocator_health
from zerotop.analysis.memory.expected import zero_model
from zerotop.analysis.memory.expected.deepspeed_estimates import RuleOfThumb
from zerotop.analysis.memory.host_ledger import HostLedger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.peak_ledger import PeakLedger, read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import RankPeaks, read_rank_peaks
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.analysis.steps.optimizer_phases import compute_medians, read_step_parts
from zerotop.analysis.views.memory_view import MemoryView, read_last_memory, read_memory_view
from zerotop.analysis.views.notices import describe_damage, describe_missing_steps, describe_thinning
from zerotop.analysis.views.recording_source import RecordingSource, StepEnd
from zerotop.recording.moments.at import At
from zerotop.recording.moments.process_exits import find_alive_processes
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import events
from zerotop_probe.recording.events import EngineFacts

_ALL = 1 << 30


@dataclass(frozen=True)
class MemoryReport:
    """The view of the lowest rank with all GPUs and hosts, and the parts about other ranks that it lacks."""

    recording: str
    notices: tuple[str, ...]  # sentences about the recording
    view: MemoryView
    engine: EngineSummary  # the lowest rank's first engine that trains
    engines: int  # how many engines that rank has
    gpu_differences: tuple[tuple[zero_model.Difference, ...], ...]  # for each GPU of the view
    host_differences: tuple[tuple[zero_model.Difference, ...], ...]  # for each host ledger of the view
    peaks: tuple[RankPeaks, ...]
    at_peak: tuple[PeakLedger, ...]
    rules: dict[int, RuleOfThumb]  # with measured values, by rank
    allocators: tuple[AllocatorHealth, ...]
    updates: dict[int, dict[str, float]]  # median seconds of the parts of step(), by rank
    post_mortem: PostMortem | None  # of an out-of-memory failure
    failure: End | None  # what ended the job, without the post-mortem


def read_report(recording: Recording, at_step: int | None = None) -> MemoryReport | None:
    """Read the report at the end of a step [the last state of training]. Return None if that step is unfinished."""
    source, until = RecordingSource(recording), recording.at(recording.last_written_ns)
    if at_step is None:
        view = read_last_memory(source, most=_ALL)
    else:
        unix_ns = source.find_step_end(at_step)
        if unix_ns is None:
            return None
        until = recording.at(unix_ns)
        view = read_memory_view(until, most=_ALL, last=StepEnd(at_step, unix_ns))
    failure = find_failure(until)
    return _build_report(recording, view, find_post_mortem(until), failure and replace(failure, memory=None))


def _build_report(
    recording: Recording, view: MemoryView, post_mortem: PostMortem | None, failure: End | None
) -> MemoryReport:
    at, before_exit = recording.at(view.moment_ns), recording.at(view.peaks_until_ns)
    processes = find_alive_processes(at)
    engines = keep_latest(at.process_events(events.Engine, processes[0])) if processes else []
    setups = zero_model.parse_setups(engines)
    expected = zero_model.sum_expected(setups)
    # The same order as parse_setups: engines that train first.
    first = min(engines, key=lambda event: not event.optimizer, default=None)
    peaks = read_rank_peaks(before_exit)
    by_process = {rank_peaks.process: rank_peaks for rank_peaks in peaks}
    inventories = {process: read_inventory(at, process) for process in processes if process in by_process}

    def compare(ledger: GpuLedger | HostLedger) -> tuple[zero_model.Difference, ...]:
        return zero_model.compare_ledger(ledger, expected) if expected is not None else ()

    notices = [*describe_damage(recording), *describe_thinning(recording.at()), describe_missing_steps(recording)]
    return MemoryReport(
        recording=recording.name,
        notices=tuple(filter(None, notices)),
        view=view,
        engine=EngineSummary(**parse_engine(first if first is not None else EngineFacts({}))),
        engines=len(setups),
        gpu_differences=tuple(compare(gpu) if gpu.ranks else () for gpu in view.gpus),
        host_differences=tuple(map(compare, view.hosts)),
        peaks=peaks,
        at_peak=read_peak_ledgers(before_exit),
        rules={
            process.rank: rule
            for process, inventory in inventories.items()
            if inventory is not None
            and (rule := zero_model.compute_rule_of_thumb(inventory, by_process[process])) is not None
        },
        allocators=read_allocator_health(before_exit, read_steps(at.recording)),
        updates=_measure_updates(at),
        post_mortem=post_mortem,
        failure=failure,
    )


def _measure_updates(at: At) -> dict[int, dict[str, float]]:
    rows = read_step_parts(at.recording)
    rows = rows[rows["begin_unix_ns"] < at.cursor_ns]
    return {int(rank): compute_medians(rows[rows["rank"] == rank]) for rank in np.unique(rows["rank"])}


def build_json(report: MemoryReport) -> dict[str, Any]:
    """Return the report as plain values: bytes, seconds and unix nanoseconds."""
    view = report.view
    return {
        "recording": report.recording,
        "unix_ns": view.moment_ns,
        "step": view.step,
        "moment": view.moment_text,
        "notices": report.notices,
        "setup": asdict(view.setup) if view.setup is not None else None,
        "engines": report.engines,
        "gpus": _build_ledgers(view.gpus, report.gpu_differences),
        "hosts": _build_ledgers(view.hosts, report.host_differences),
        "peaks": [asdict(peaks) for peaks in report.peaks],
        "at_peak": [asdict(peak) for peak in report.at_peak],
        "rules": {rank: asdict(rule) | {"bytes": rule.peak_bytes} for rank, rule in report.rules.items()},
        "estimates": [
            asdict(estimate) | {"options": estimate.option_text, "this_job": estimate in view.own_estimates}
            for estimate in view.estimates
        ],
        "allocators": [asdict(health) for health in report.allocators],
        "updates": report.updates,
        "post_mortem": asdict(report.post_mortem) if report.post_mortem is not None else None,
        "failure": asdict(report.failure) if report.failure is not None else None,
    }


def _build_ledgers(
    ledgers: Sequence[GpuLedger | HostLedger], differences: Sequence[Sequence[zero_model.Difference]]
) -> list[dict[str, Any]]:
    return [
        asdict(ledger) | {"differences": [asdict(row) | {"difference_bytes": row.difference_bytes} for row in rows]}
        for ledger, rows in zip(ledgers, differences, strict=True)
    ]
