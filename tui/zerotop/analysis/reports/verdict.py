"""The verdict on a recording: how the job ended, its speed, how full the GPUs were, and its costliest finding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from zerotop.analysis import formatting
from zerotop.analysis.failures.end import End
from zerotop.analysis.findings import Severity
from zerotop.analysis.live_view import JobState, LiveView
from zerotop.analysis.reports.cost_text import describe_cost
from zerotop.analysis.reports.finding_costs import GROWING, FindingCost, describe_earlier, measure_training_s
from zerotop.analysis.reports.measures import NOISE
from zerotop.analysis.steps.job_pace import (
    find_usual,
    measure_iteration,
    measure_mean,
    measure_token_rate,
    measure_whole_token_rate,
)
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.watching_cost import measure_work_in_slowest
from zerotop.recording.moments.process_exits import describe_exit_code
from zerotop.recording.samples import Ints, Rows

# Findings that cost less of the training time are not worth a line at the top.
_LEAST_SHARE = 0.01
# Memory that others hold does not matter either while much of the device was never used.
_FULL_SHARE = 0.7
# The mean is told beside the median if it is as many times the median without the slowest iteration.
_FAR_MEAN = 1.25
_MUCH_WORK = 0.25  # share of what the slowest iteration takes longer, from which zerotop's own work is told


class Outcome(str, Enum):
    """The outcome of the job."""

    GOOD = "good"
    WARNING = "warning"  # it trained, but lost time or memory that it need not lose
    FAILED = "failed"
    OPEN = "open"  # it still ran when the recording was last written


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first lines of a report."""

    outcome: Outcome
    headline: str  # a sentence: how the job ended
    sentences: tuple[str, ...]  # what it did, and what cost most


def build_verdict(source: RecordingSource, findings: Sequence[FindingCost], failure: End | None = None) -> Verdict:
    """Judge a recording at its end. ``failure``: the failure that ended the job."""
    view = source.view_at(None)
    headline, outcome = _describe_end(view, failure)
    costly = _find_costly(source, findings, failed=failure is not None)
    if outcome is Outcome.GOOD and costly is not None and costly.finding.severity is not Severity.INFO:
        outcome = Outcome.WARNING
    earlier = (describe_earlier(cost.finding, failure) for cost in findings if failure is not None)
    sentences = [
        next(filter(None, earlier), ""),
        *((failure.why, f"What to do: {failure.advice}") if failure is not None else ()),
        *describe_pace(
            source.job_steps,
            source.job_tokens,
            view.job.engine.batch_step,
            measure_work_in_slowest(source.recording.sources["probe"], source.job_steps),
        ),
        *describe_memory(view),
        _describe_costliest(costly, view) if costly is not None or failure is None else "",
        view.cost_sentence,
    ]
    return Verdict(outcome, headline, tuple(filter(None, sentences)))


def _find_costly(source: RecordingSource, findings: Sequence[FindingCost], *, failed: bool) -> FindingCost | None:
    """Return the finding that cost most, if it cost something that matters and the failure does not say it already."""
    least_s = _LEAST_SHARE * measure_training_s(source.job_steps)
    gpus = source.view_at(None).gpus
    is_full = any((gpu.reserved_peak_bytes or 0) > _FULL_SHARE * (gpu.allowed_bytes or gpu.total_bytes) for gpu in gpus)
    for cost in findings:
        severity = cost.finding.severity
        if severity is Severity.ERROR and not failed:
            return cost
        if severity is not Severity.ERROR and (cost.seconds or 0.0) >= max(least_s, 1e-9):
            return cost
        if severity is Severity.WARNING and cost.bytes and (cost.finding.name in GROWING or (is_full and not cost.on_host)):
            return cost
    return None


def _describe_end(view: LiveView, failure: End | None) -> tuple[str, Outcome]:
    job, progress = view.job, view.progress
    steps, elapsed = (
        formatting.format_count(progress.finished_steps, "step"),
        formatting.format_long_time(max(0.0, progress.elapsed_s) // 1),  # cut, like the clock of all screens
    )
    after = f"after {steps} in {elapsed}" if progress.finished_steps else f"after {elapsed}, before the first step"
    if failure is not None:
        return f"{failure.what[:-1]}, {after}.", Outcome.FAILED
    if job.state is JobState.ENDED and job.exit_code == 0:
        ran = f"Finished {steps} in" if progress.finished_steps else "Ended without a recorded step after"
        return f"{ran} {elapsed}.", Outcome.GOOD
    if job.state is JobState.ENDED and job.exit_code is None:
        return f"Ended {after}; the exit code is not known.", Outcome.OPEN
    if job.state is JobState.ENDED and job.exit_code is not None:
        return f"Ended with {describe_exit_code(job.exit_code, job.exit_signal)} {after}.", Outcome.FAILED
    if job.state is JobState.DETACHED:
        return f"The recording was ended {after}, and the job went on.", Outcome.OPEN
    if job.state is JobState.LOST:
        return f"The recording stops {after}. The job's exit status is unknown.", Outcome.OPEN
    return f"Still running {after}.", Outcome.OPEN


def describe_pace(rows: Rows, token_counts: Ints, batch_step: int | None = None, work_s: float = 0.0) -> Iterator[str]:
    """Yield a sentence about the speed of the steps of a job (STEP_DTYPE) with these tokens each.

    ``batch_step``: the step from which on batches have another size; the pace since then is told beside that of all steps.
    """
    recorded = ~np.isnan(rows["iteration_s"])
    if not recorded.any():
        yield "No finished step was recorded, so there is no iteration time."
        return
    seconds = rows["iteration_s"]
    slowest, median = int(np.nanargmax(seconds)), measure_iteration(rows)
    skipped = int(rows["steps"][rows["skipped"]].sum())
    is_less = 0 < skipped < int(rows["steps"].sum())
    text = (
        f"An iteration takes {formatting.format_seconds(median)} (median{f' without {skipped} skipped' if is_less else ''})"
    )
    usual = rows[find_usual(seconds, rows["skipped"])]
    mean, count = measure_mean(usual), len(usual)
    if mean * count - usual["iteration_s"].max() > _FAR_MEAN * median * (count - 1) > 0:
        text += f", {formatting.format_seconds(mean)} on average"
    if seconds[slowest] > 1.5 * median:
        text += f", the slowest {formatting.format_seconds(float(seconds[slowest]))} in step {rows['step'][slowest]}"
        if work_s > _MUCH_WORK * (seconds[slowest] - median):
            text += f" ({formatting.format_seconds(work_s)} of it zerotop's own work, once)"
    if not math.isnan(rate := measure_token_rate(rows, token_counts)):
        whole = measure_whole_token_rate(rows, token_counts)
        is_longer = whole < (1 - NOISE) * rate  # evaluation, checkpoints and pauses between iterations
        text += f"; {rate:,.0f} tokens per second"
        text += f" in iterations, {whole:,.0f} over all the time" if is_longer else " on average"
    yield f"{text}{'' if batch_step is None else _describe_later_pace(rows, token_counts, batch_step)}."


def _describe_later_pace(rows: Rows, token_counts: Ints, batch_step: int) -> str:
    later = find_usual(rows["iteration_s"], rows["skipped"]) & (rows["step"] >= batch_step)
    if not later.any():
        return ""
    text = f". From step {batch_step} on, with another batch, {formatting.format_seconds(measure_iteration(rows[later]))}"
    rate = measure_token_rate(rows, token_counts, later)
    return text if math.isnan(rate) else f"{text}; {rate:,.0f} tokens per second on average"


def describe_memory(view: LiveView, units: formatting.ByteUnits = formatting.BINARY) -> Iterator[str]:
    """Yield a sentence about the peak of memory, if any was recorded."""
    known = [gpu for gpu in view.gpus if gpu.reserved_peak_bytes]
    if known:
        gpu = max(known, key=lambda gpu: gpu.reserved_peak_bytes or 0)
        peak = gpu.reserved_peak_bytes or 0
        share, total = "", gpu.allowed_bytes or gpu.total_bytes
        if total:
            which_total = " that it may use" if gpu.allowed_bytes else ""
            share = f" of {formatting.format_bytes(total, units)}{which_total} ({formatting.format_percent(peak / total)})"
        which = f" on GPU {gpu.index}" if len(view.gpus) > 1 else ""
        yield f"GPU memory peaked at {formatting.format_bytes(peak, units)}{share} reserved{which}."
    elif view.ranks:
        rank = max(view.ranks, key=lambda rank: rank.rss_peak_bytes)
        where = f" in rank {rank.rank}" if rank.rank >= 0 else ""  # a process without a rank that reports
        host = f"Host memory peaked at {formatting.format_bytes(rank.rss_peak_bytes, units)}{where}"
        yield f"{host}; {_describe_unread(view)}."


def _describe_unread(view: LiveView) -> str:
    """Return what is known of the GPUs of a job whose allocators were not read."""
    if not view.gpus:
        return "no GPU was recorded"
    used = [f"GPU {gpu.index}" for gpu in view.gpus if gpu.process_bytes]
    if not used:
        return "no rank recorded PyTorch's allocator on a GPU"
    return f"the job used {formatting.join_words(used)}, but no rank recorded PyTorch's allocator there"


def _describe_costliest(cost: FindingCost | None, view: LiveView) -> str:
    if cost is None:
        return "No finding has a cost in time or memory."
    price = describe_cost(cost, view)
    return f"What cost most: {cost.finding.headline}{f' ({price})' if price else ''}."
