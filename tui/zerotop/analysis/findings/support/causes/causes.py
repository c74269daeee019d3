"""Recorded changes that coincide with a change of the iteration time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from zerotop.analysis.findings.support.causes import batch_causes, gpu_causes, host_causes, step_change, thread_causes
from zerotop.analysis.findings.support.causes.allocator_calls import check_allocator_calls, check_cache_clearing
from zerotop.analysis.findings.support.causes.pause_causes import COLLECTOR
from zerotop.analysis.findings.support.causes.recompilations import find_failed_assumption
from zerotop.analysis.findings.support.causes.subnormal_state import check_subnormal
from zerotop.analysis.findings.support.causes.training_causes import (
    check_memory,
    check_modes,
    check_repeated_training,
    check_training,
)
from zerotop.analysis.findings.support.evidence import Process, Rows
from zerotop.analysis.findings.support.lines.known_calls import RECOMPILES
from zerotop.analysis.findings.support.lines.stack_lines import BETWEEN
from zerotop.analysis.findings.support.steps.fp16_warmup import SKIPPED_STEPS, count_skipped_first
from zerotop.analysis.findings.support.steps.late_spells import begins_spell, find_late
from zerotop.analysis.findings.support.thresholds import (
    FEW_SHARE,
    HOST_GROWTH_BYTES,
    MOST_SHARE,
    STALL_SECONDS,
    STALL_SHARE,
)
from zerotop.analysis.formatting import Text, format_count, format_seconds
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS
from zerotop.analysis.stats.medians import compute_known_median
from zerotop_probe.recording import events

# The number of earlier evaluations or checkpoints that are compared.
_EARLIER = 5

_RETRY: step_change.Advice = (
    "Start with expandable segments, or lower {batch_size}.",
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_LATE_ADVICE = "See what only that rank does between the phases: do it less often, or in a thread of its own."
_COMPILING: step_change.Advice = (
    "Let it compile one graph for all shapes, or pad batches to a few lengths.",
    "torch.compile(model, dynamic=True)",
)
_COMPILING_AGAIN: step_change.Advice = (
    "See why it compiles again: with TORCH_LOGS=recompiles it prints the assumption that failed.",
    RECOMPILES,
)
_GROWTH: step_change.Advice = (
    "Look for a list that grows and that the training goes through again and again.",
    "py-spy record --pid {pid} --duration 30 -o stacks.svg",
)


def find_cause(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the most certain recorded cause of a sudden change."""
    return next((cause for check in _CHECKS if (cause := check(change)) is not None), None)


def find_drift_cause(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the most certain recorded cause of a slow change."""
    return next((cause for check in _DRIFT_CHECKS if (cause := check(change)) is not None), None)


def _check_skipping(change: step_change.StepChange) -> step_change.Cause | None:
    before, after = float(change.before["skipped"].mean()), float(change.after["skipped"].mean())
    if before > MOST_SHARE and after < MOST_SHARE:
        at_start = count_skipped_first(change.process) >= SKIPPED_STEPS and change.before["step"][0] < SKIPPED_STEPS
        advice = "Train in bf16: no step is skipped then."
        return step_change.Cause("fp16 stopped skipping steps", advice, "{bf16_fix}", 0.95, has_own_finding=bool(at_start))
    if before < FEW_SHARE and after > MOST_SHARE:
        advice = "Skipped steps train nothing: train in bf16, or {rarer_growth}."
        return step_change.Cause("fp16 began to skip steps", advice, "{bf16_fix}", 0.95)
    return None


def _check_data(change: step_change.StepChange) -> step_change.Cause | None:
    before, data = (compute_known_median(rows["data_s"]) for rows in change.phased)
    waited, iteration = data - before, change.after_s
    slower = iteration - change.before_s
    # Unknown times are NaN, which compares false.
    if slower <= 0 or not waited >= slower / 2 or not data >= max(STALL_SECONDS, STALL_SHARE * iteration):
        return None
    return step_change.Cause("iterations began to wait for data", "", "", 0.95, has_own_finding=True)


def _check_retries(change: step_change.StepChange) -> step_change.Cause | None:
    samples = change.read_samples(change.process.records("allocator"))
    if samples is None:
        return None
    flushes = int(samples[1].rows["retries"][-1]) - int(samples[0].rows["retries"][-1])
    if flushes < step_change.count_iterations(change.after):
        return None
    text = f"PyTorch's allocator had to flush its cache {format_count(flushes, 'time')}"
    return step_change.Cause(text, *_RETRY, 0.9, finding="allocator_retries")


def _check_collector(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that garbage collection accounts for at least half of the added iteration time.

    A collection that pauses only a few iterations does not make the others longer.
    """
    before, after = (step_change.measure_collecting(change.process, rows) for rows in (change.before, change.after))
    in_pauses = float(change.after["iteration_s"].mean() - change.after_s)
    if change.added_s <= 0 or after - before < change.added_s / 2 or in_pauses > (after - before) / 2:
        return None
    text = f"Python's garbage collector takes {format_seconds(after)} of each iteration instead of {format_seconds(before)}"
    return step_change.Cause(text, *COLLECTOR, 0.8)


def _check_compiling(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that torch.compile explains half of the difference or more: it began to compile, or finished."""
    if not change.process.events_of(events.Compiled):
        return None
    before, after = (step_change.measure_compiling(change.process, rows) for rows in (change.before, change.after))
    if after.graphs and after.seconds - before.seconds >= change.added_s / 2 > 0:
        is_by_shapes = any(len(np.unique(change.phased[1][name])) > 1 for name in ("tokens", "rows"))
        shapes, advice = (" for batches of other shapes", _COMPILING) if is_by_shapes else ("", _COMPILING_AGAIN)
        steps = step_change.count_iterations(change.after)
        text = f"torch.compile compiled {format_count(after.graphs, 'graph')} in {steps} steps{shapes}"
        rows = change.after
        span = int(rows["begin_unix_ns"][0]), int(rows["end_unix_ns"][-1])
        failed = find_failed_assumption(change.process, *span, change.latest_ns)
        if failed is not None and not is_by_shapes:
            text, advice = f"{text}, where the last check that failed was {failed.text}", failed.advice
        return step_change.Cause(text, *advice, 0.9)
    if after.seconds - before.seconds <= change.added_s / 2 < 0:
        return step_change.Cause(f"torch.compile had compiled {format_count(before.graphs, 'graph')} before", "", "", 0.9)
    return None


def _check_late_rank(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that another rank's own work takes longer, and the lead waits for it where ranks synchronize."""
    known_ns, delays, after = change.latest_ns, [], []
    if not all(len(part) for part in change.phased):
        return None
    for process in change.group.processes:
        rows = process.phased_steps_until(known_ns)
        parts = [rows[step_change.match_steps(rows, part)] for part in change.phased]
        own = [step_change.compute_own_seconds(part) for part in parts]
        if min(len(part) for part in own) > 0:
            delays.append((float(np.median(own[1]) - np.median(own[0])), process))
            after.append(parts[1])
    if len(delays) < 2 or change.added_s <= 0:
        return None
    (others, _), (late, culprit) = sorted(delays, key=lambda delay: delay[0])[-2:]
    if late - others < change.added_s / 2 or culprit is change.process:
        return None
    is_long = bool(find_late(np.array(late), np.array(change.after_s)))
    return build_late_cause(culprit, late)._replace(has_own_finding=is_long and _begins_spell(change, after))


def _begins_spell(change: step_change.StepChange, after: Sequence[Rows]) -> bool:
    """Whether the straggler finding tells of the rank: the steps after the change that all ranks have recorded show it."""
    known = reduce(np.intersect1d, [rows["step"] for rows in after])
    if len(known) < min(SETTLED_STEPS, len(change.after)):
        return False  # most are only counted
    steps = [rows[np.isin(rows["step"], known)] for rows in after]
    own = np.sort([step_change.compute_own_seconds(rows) for rows in steps], axis=0)
    return begins_spell(own[-1] - own[-2], np.max([rows["iteration_s"] for rows in steps], axis=0))


def build_late_cause(culprit: Process, late_s: float, where: str = BETWEEN) -> step_change.Cause:
    """Return the cause that the others wait for a rank, which takes longer at a place of stacks."""
    text = f"rank {culprit.rank} began to arrive {format_seconds(late_s)} later where ranks synchronize"
    fix = f"py-spy dump --pid {culprit.source.pid}"
    return step_change.Cause(text, _LATE_ADVICE, fix, 0.85, finding="straggler", culprit=culprit, where=where)


def _check_growth(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that host memory grew by the size of a list that each step may iterate over."""
    before, after = int(change.before["host_held_bytes"].min()), int(change.after["host_held_bytes"].max())
    if before <= 0 or after - before < HOST_GROWTH_BYTES:
        return None
    text = Text("the lead rank's host memory grew by {grown:bytes}", {"grown": after - before})
    return step_change.Cause(text, *_GROWTH, 0.5, finding="host_growth")


def _check_interruption(change: step_change.StepChange) -> step_change.Cause | None:
    """Return the cause that an evaluation or a checkpoint came just before.

    While other processes use the cores return None: then that may well be a coincidence.
    """
    if any(load is not None and load.is_disturbed for load in host_causes.measure_change_loads(change)):
        return None
    for column, name in (("checkpoint_s", "a checkpoint was saved"), ("eval_s", "an evaluation was run")):
        if change.after[0][column] > 0 and _changed_pace_before(change, column):
            return step_change.Cause(f"{name} just before", *step_change.BREAKDOWN, 0.4)
    return None


def _changed_pace_before(change: step_change.StepChange, column: str) -> bool:
    """Whether the pace also changed, and stayed so, after each earlier interruption of the kind; true if there was none.

    The first steps after one may be slower. So the pace is that of up to LEVEL_STEPS just before the next one.
    """
    steps = change.process.steps[: np.searchsorted(change.process.steps["step"], change.step)]
    change_s, paused = change.added_s, np.flatnonzero(steps[column] > 0)[-_EARLIER:].tolist()
    for last, index, following in zip([-1, *paused], paused, [*paused[1:], len(steps)], strict=False):
        before, after = (
            steps["iteration_s"][max(begin + 1, end - LEVEL_STEPS) : end]
            for begin, end in ((last, index), (index, following))
        )
        if min(len(before), len(after)) < SETTLED_STEPS:
            continue
        if float(np.nanmedian(after) - np.nanmedian(before)) * np.sign(change_s) < abs(change_s) / 2:
            return False
    return True


_Check = Callable[[step_change.StepChange], step_change.Cause | None]
_CHECKS: tuple[_Check, ...] = (
    _check_skipping,
    batch_causes.check_batch,
    batch_causes.check_other_batches,
    check_training,
    batch_causes.check_other_forwards,
    _check_data,
    _check_retries,
    check_modes,
    check_cache_clearing,
    check_allocator_calls,
    _check_collector,
    _check_compiling,
    thread_causes.check_threads,
    gpu_causes.check_clocks,
    check_memory,
    host_causes.check_paging,
    host_causes.check_others,
    host_causes.check_crowding,
    _check_late_rank,
    thread_causes.check_slow_cores,
    gpu_causes.check_neighbours,
    host_causes.check_core_clock,
    _check_interruption,
)
_DRIFT_CHECKS: tuple[_Check, ...] = (
    batch_causes.check_batch,
    batch_causes.check_other_batches,
    check_repeated_training,
    check_subnormal,
    _check_retries,
    _check_collector,
    thread_causes.check_drift_threads,
    gpu_causes.check_clocks,
    gpu_causes.check_slower_clock,
    host_causes.check_paging,
    host_causes.check_others,
    host_causes.check_crowding,
    _check_late_rank,
    gpu_causes.check_neighbours,
    _check_growth,
)
