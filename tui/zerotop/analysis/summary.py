"""A session in a few lines of text: what was trained, how long it took, what it held."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.source import RecordingSource
from zerotop.analysis.steps import Rows, StepTable
from zerotop.analysis.view import Job, LiveView
from zerotop.session.reader import Session

_GIB = 1 << 30


def summary(session: Session) -> str:
    """What was measured, up to the recording's end; one fact a line."""
    view = RecordingSource(session).view(None)
    table = StepTable(session)
    table.update()
    parts = list(table.by_rank().values())
    lines = [_job_line(view.job)]
    if parts:
        lines += _step_lines(view, np.concatenate(parts))
    lines += _gpu_lines(view)
    lines += [f"zerotop: {notice}" for notice in view.job.notices]
    if view.job.exit_text:
        lines.append(view.job.exit_text)
    return "\n".join(lines)


def _job_line(job: Job) -> str:
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


def _step_lines(view: LiveView, rows: Rows) -> list[str]:
    iterations = view.iterations
    lines = []
    if len(iterations.step):
        seconds = iterations.iteration_s
        phases = ", ".join(f"{name} {np.median(values):.3f}" for name, values in iterations.phase_s.items())
        lines.append(
            f"{len(seconds)} steps, {view.progress.skipped_steps} skipped: median {np.median(seconds):.3f} s an iteration,"
            f" slowest {seconds.max():.3f} s at step {iterations.step[seconds.argmax()]}"
        )
        lines.append(f"seconds in each phase (median, slowest rank): {phases}")
    for column, what in (
        ("host_rss_bytes", "host memory (RSS)"),
        ("allocated_peak_bytes", "GPU memory allocated"),
        ("reserved_peak_bytes", "GPU memory reserved"),
    ):
        if (rows[column] > 0).any():
            peak = rows[rows[column].argmax()]
            lines.append(f"peak {what}: {peak[column] / _GIB:.2f} GiB on rank {peak['rank']} at step {peak['step']}")
    if view.cost.probe_share == view.cost.probe_share:
        lines.append(
            f"cost of watching: {view.cost.probe_us_per_step:.0f} us a step, {view.cost.probe_share:.2%} of the time;"
            f" {view.cost.records} records, {view.cost.lost_records} lost"
        )
    return lines


def _gpu_lines(view: LiveView) -> list[str]:
    return [
        f"GPU {gpu.index} {gpu.name}: {gpu.used_bytes / _GIB:.2f} of {gpu.total_bytes / _GIB:.1f} GiB in use at the end"
        for gpu in view.gpus
    ]
