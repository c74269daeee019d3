"""A recording summarized in a few lines of text: setup, pace, peak memory, cost of recording, the worst finding."""

from __future__ import annotations

import math

import numpy as np

from zerotop.analysis.formatting import format_bytes, format_count
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.analysis.processes.phases import UNSEEN_NAME
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.steps.job_pace import measure_iteration
from zerotop.analysis.views.watching_cost import describe_share
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows


def summarize_recording(recording: Recording) -> str:
    """Return the measurements up to the recording's end, one per line."""
    run = RecordedRun(recording)
    source = run.source
    view = source.view_at(None)
    lines = [
        view.job.engine.describe_engine(),
        *_describe_steps(view, source.job_steps),
        *_describe_peaks(source.recording.at(view.cursor_ns), view),
        *_describe_cost(view),
        *_describe_gpus(view),
    ]
    lines += _describe_worst_finding(run)
    lines += [f"zerotop: {notice}" for notice in view.job.notices]
    lines += [view.cost_sentence] if view.cost_sentence else []
    if view.job.exit_text:
        lines.append(view.job.exit_text)
    return "\n".join(lines)


def _describe_steps(view: LiveView, rows: Rows) -> list[str]:
    seconds, progress = view.iterations.iteration_s, view.progress
    if np.isnan(seconds).all():
        return []
    # Fewer where the recording began later, more where a restart repeated some.
    recorded = int(rows["steps"].sum())
    others = f" ({recorded:,} recorded)" if recorded != progress.finished_steps else ""
    return [
        f"{format_count(progress.finished_steps, 'step')}{others}, {progress.skipped_steps} skipped:"
        f" median {measure_iteration(rows):.3f} s per iteration,"
        f" slowest {np.nanmax(seconds):.3f} s at step {view.iterations.step[np.nanargmax(seconds)]}",
        *_describe_phases(view),
    ]


def _describe_phases(view: LiveView) -> list[str]:
    """Return the mean of each phase over the steps that have phases, but for the first step, which prepares much."""
    phase_s = {name: values[1:] for name, values in view.iterations.phase_s.items() if name != UNSEEN_NAME}
    known = ~np.isnan(np.sum(list(phase_s.values()), axis=0)) if phase_s else np.empty(0, bool)
    if not known.any():
        return []
    means = {name: float(values[known].mean()) for name, values in phase_s.items()}
    phases = " + ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    return [f"seconds per phase (mean of {format_count(int(known.sum()), 'step')}): {phases} = {sum(means.values()):.3f}"]


def _describe_worst_finding(run: RecordedRun) -> list[str]:
    ranked = rank_findings(run.findings, run.source.job_steps, run.source.end_ns)
    if not ranked:
        return []
    worst = ranked[0].finding
    advice = [f"  -> {worst.advice}"] if worst.advice else []
    return [f"{worst.headline}.", *advice, *(f"     {line}" for line in worst.fix.splitlines())]


def _describe_peaks(at: At, view: LiveView) -> list[str]:
    lines = []
    if (rank := max(view.ranks, key=lambda rank: rank.rss_peak_bytes, default=None)) is not None and rank.rss_peak_bytes:
        whose = f" on rank {rank.rank}" if rank.rank >= 0 else ""  # a process without a rank that reports
        lines.append(f"peak host memory (RSS): {format_bytes(rank.rss_peak_bytes)}{whose}")
    peaks = read_rank_peaks(at)
    allocated = [(one.owning_peak.allocated_bytes, one.process.rank, one.owning_peak) for one in peaks]
    reserved = [(one.reserved.reserved_bytes, one.process.rank, one.reserved) for one in peaks if one.reserved is not None]
    for label, known in (("allocated", allocated), ("reserved", reserved)):
        size, number, peak = max(known, key=lambda one: one[0], default=(0, 0, None))
        if peak is not None and size > 0:
            lines.append(f"peak GPU memory {label}: {format_bytes(size)} on rank {number} {peak.place_text}")
    return lines


def _describe_cost(view: LiveView) -> list[str]:
    cost = view.cost
    if math.isnan(cost.probe_share):
        return []
    once = "" if math.isnan(cost.one_time_s) else f", and {cost.one_time_s:.2f} s once"
    records = f"{format_count(cost.records, 'record')}, {cost.lost_records} lost"
    return [f"watching costs {describe_share(cost.probe_share)}{once}; {records}"]


def _describe_gpus(view: LiveView) -> list[str]:
    return [
        f"GPU {gpu.index} {gpu.name}: {format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} in use at the end"
        for gpu in view.job_gpus
    ]
