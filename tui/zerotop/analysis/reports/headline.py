"""A session in a few lines of text: what was trained, how long it took, what it held."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zerotop.analysis.live_view import Job, LiveView
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.session.reader import Session

_GIB = 1 << 30


def summarize_session(session: Session) -> str:
    """What was measured, up to the recording's end; one fact a line."""
    source = RecordingSource(session, memory=True)
    view = source.view_at(None)
    lines = [
        _describe_job(view.job),
        *_describe_steps(view),
        *_describe_peaks(source.rank_steps),
        *_describe_cost(view),
        *_describe_gpus(view),
    ]
    lines += [f"zerotop: {notice}" for notice in view.job.notices]
    if view.job.exit_text:
        lines.append(view.job.exit_text)
    return "\n".join(lines)


def _describe_job(job: Job) -> str:
    if job.zero_stage is None:
        return "No rank made a DeepSpeed engine: there are no steps to show."
    size = f" {job.parameters / 1e6:.1f} M parameters," if job.parameters else ""
    offload = "".join(
        f", {what} on {place}"
        for what, place in (("optimizer", job.offload_optimizer), ("parameters", job.offload_parameters))
        if place not in (None, "none")
    )
    batch = f"{job.micro_batch} x {job.gradient_accumulation} x {job.ranks}"
    return f"{job.model}:{size} ZeRO-{job.zero_stage}{offload}, {job.dtype}, batch {batch} (micro x accumulation x ranks)"


def _describe_steps(view: LiveView) -> list[str]:
    seconds = view.iterations.iteration_s
    if not len(seconds):
        return []
    phases = ", ".join(f"{name} {np.median(values):.3f}" for name, values in view.iterations.phase_s.items())
    return [
        f"{len(seconds)} steps, {view.progress.skipped_steps} skipped: median {np.median(seconds):.3f} s an iteration,"
        f" slowest {seconds.max():.3f} s at step {view.iterations.step[seconds.argmax()]}",
        f"seconds in each phase (median, slowest rank): {phases}",
    ]


def _describe_peaks(processes: Sequence[RankSteps]) -> list[str]:
    lines = []
    for column, what in (
        ("host_rss_bytes", "host memory (RSS)"),
        ("allocated_peak_bytes", "GPU memory allocated"),
        ("reserved_peak_bytes", "GPU memory reserved"),
    ):
        peaks = [process.step_rows[process.step_rows[column].argmax()] for process in processes if len(process.step_rows)]
        peak = max(peaks, key=lambda row: int(row[column]), default=None)
        if peak is not None and peak[column] > 0:
            lines.append(f"peak {what}: {peak[column] / _GIB:.2f} GiB on rank {peak['rank']} at step {peak['step']}")
    return lines


def _describe_cost(view: LiveView) -> list[str]:
    cost = view.cost
    if math.isnan(cost.probe_share):
        return []
    return [
        f"cost of watching: {cost.probe_us_per_step:.0f} us a step, {cost.probe_share:.2%} of the time;"
        f" {cost.records} records, {cost.lost_records} lost"
    ]


def _describe_gpus(view: LiveView) -> list[str]:
    return [
        f"GPU {gpu.index} {gpu.name}: {gpu.used_bytes / _GIB:.2f} of {gpu.total_bytes / _GIB:.1f} GiB in use at the end"
        for gpu in view.gpus
    ]
