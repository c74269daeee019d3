"""fp16 skips steps until the loss scale fits; time and memory change when skipping ends.

Four findings: nothing has been updated yet; the changes when skipping ended; all later steps are skipped, which no loss
scale explains; and many of them are. Of steps that a fused optimizer skips on the GPU only the number is known. Without a
loss scale DeepSpeed skips a step whose gradients are not finite: the first one is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.engine import LOOP
from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.steps import fp16_warmup
from zerotop.analysis.findings.support.steps.runs import find_first_run
from zerotop.analysis.findings.support.steps.skipped_runs import SkippedRun, SkippedRuns, SkippedStretch, read_stretch
from zerotop.analysis.findings.support.thresholds import JUMP_BYTES
from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.samples import Rows
from zerotop_probe.recording.events import SkippedUpdates

_SKIPPING = FindingKind(
    name="steps_skipped",
    severity=Severity.INFO,
    confidence=0.99,
    headline="fp16 skipped[ {skipped_of:.0f} of] the first {first_steps:.0f} steps: a skipped step trains nothing",
    details=(
        "Gradients overflowed[ (loss scale {scale_first}, now {scale_now})].[ {soon} will change"
        "[: the first real step adds {expected_state_bytes:bytes} of optimizer state to each rank's {place}].]"
    ),
    advice="Train in bf16, which needs no loss scale, or {lower_scale}.",
    fix="{bf16_fix}",
)
_STUCK = _SKIPPING.with_changes(
    severity=Severity.WARNING,
    headline="fp16 has skipped all steps since step {since}: nothing is trained any more",
    details=(
        "{skipped_steps:count step} in a row overflowed[, while the loss scale fell from {scale_first} to"
        " {scale_now}][, {after}].[ {at_zero}]"
    ),
    advice="A loss or gradient is infinite or NaN, which no loss scale cures: look for it in the first of these steps.",
    fix="torch.autograd.set_detect_anomaly(True)",
)
_MANY = _STUCK.with_changes(
    headline=(
        "fp16 skipped {skipped_steps:.0f}[ {or_more}] of the steps {step} to {last_step}: a skipped step trains nothing"
    ),
    details="Gradients overflowed[, while the loss scale fell from {scale_first} to {scale_now}].",
    advice="Train in bf16, which needs no loss scale.",
    fix=_SKIPPING.fix,
    lost_once="wasted_s",
)
_HELPLESS = _MANY.with_changes(
    advice=(
        "A smaller loss scale did not help: in some batches the loss or a gradient is infinite or NaN. Look for it in one of"
        " these steps."
    ),
    fix=_STUCK.fix,
)
_RAISED = _MANY.with_changes(
    details=(
        "Gradients overflowed, and the loss scale was raised about as often as it fell: from {scale_first} to {scale_now} in"
        " all."
    ),
    advice="Raise it less often: GradScaler waits for 2000 steps by default. Or train in bf16, which needs no loss scale.",
    fix="GradScaler(growth_interval=2000)",
)
_ZERO = _HELPLESS.with_changes(
    headline="fp16's loss scale fell to 0 by step {last_step}: no step trains any more",
    details=(
        "{skipped_steps:.0f}[ {or_more}] of the steps from {step} on overflowed, while it fell from {scale_first} to 0. With"
        " it, the gradients are 0 or NaN."
    ),
)
_AFTER = "after steps that did not"
_AT_ZERO = "The loss scale is 0 now, with which no step trains anything."
_LOOK = (
    "Look at the batch of this step, and for a division by zero or a logarithm of zero in the loss: anomaly detection names"
    " the operation."
)
_INFINITE = FindingKind(
    name="gradients_not_finite",
    confidence=0.99,
    headline="Step {step} was skipped: its gradients are infinite or NaN",
    details="DeepSpeed updates nothing in such a step. The engine trains in {dtype}, without a loss scale.",
    advice=_LOOK,
    fix=_STUCK.fix,
)
_ALL_INFINITE = _INFINITE.with_changes(
    severity=Severity.ERROR,
    headline="All steps since step {step} were skipped: their gradients are infinite or NaN",
    details="{skipped_steps:count step} in a row updated nothing. The engine trains in {dtype}, without a loss scale.",
)
_ENDED = FindingKind(
    name="skipping_ended",
    severity=Severity.INFO,
    confidence=0.95,
    headline="Iterations take {iteration_real_s:seconds}, not {iteration_skipped_s:seconds}, since fp16 stopped skipping",
    details=(
        "[step() takes {step_real_s:seconds} instead of {step_skipped_s:seconds}. ]Step {step} was the first real one"
        " ({iteration_first_real_s:seconds}), after {skipped_steps:count skipped step}[ in which the loss scale fell from"
        " {first_scale:.0f} to {last_scale:.0f}][; the allocated peak grew from {allocated_before:bytes} to"
        " {allocated_after:bytes}][; each rank's host memory grew from {host_held_before:bytes} to {host_held_after:bytes}]"
        "[; {state_bytes:bytes} of it is optimizer state]. Nothing went wrong: these are the true time and memory."
    ),
    advice=_SKIPPING.advice,
    fix=_SKIPPING.fix,
)
# Real steps that show the time after skipping has ended. The first real one is not typical, and is left out.
REAL_STEPS = 2
# Number of steps from the first real one on, of which enough others have to be real too.
_SEARCH_STEPS = 1000
# A loss scale that grew makes one or a few steps overflow, as the first one does. This many divide it by a thousand.
_STUCK_STEPS = 10
_HELPLESS_FALL = 2.0**_STUCK_STEPS
# A finding follows its count of skipped steps: it is told again after each, and of many after this part more.
_MORE = 32


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report each once for each attempt of the job."""
    group, steps, skipped = window.subject, window.subject.lead.steps, fp16_warmup.count_skipped_first(window.subject.lead)
    if group.engine.kind != LOOP and group.engine.dtype and "fp16" not in (group.engine.dtype, group.engine.autocast):
        yield window.find_once(partial(_find_infinite, window), _INFINITE)
        yield from _follow(window, _ALL_INFINITE, _find_run(window, 0), _STUCK_STEPS)
        return
    yield from _follow(window, _STUCK, _find_run(window, skipped + 1), _STUCK_STEPS)
    yield from _find_many(window, skipped)
    yield from _find_on_gpu(window)
    if skipped < fp16_warmup.SKIPPED_STEPS or int(steps["step"][0]) != 0:
        return
    yield from _follow(window, _SKIPPING, 0, fp16_warmup.SKIPPED_STEPS, real=REAL_STEPS)
    # A few of the steps after the first real one may be skipped too.
    real = skipped + np.flatnonzero(~steps["skipped"][skipped : skipped + _SEARCH_STEPS])
    if len(real) > REAL_STEPS:
        yield window.find_once(partial(_build_end_finding, group, skipped, steps[real[: REAL_STEPS + 1]]), _ENDED)


def _find_infinite(window: SearchWindow[Group]) -> Finding | None:
    """Return the finding about the first step that was skipped without a loss scale."""
    group, steps = window.subject, window.subject.lead.steps
    fresh = window.steps(steps, of=_INFINITE)
    first = find_first_run(steps["skipped"][fresh], 1)
    return _build(group, _INFINITE, steps[fresh.start + first :][:1]) if first is not None else None


def _find_run(window: SearchWindow[Group], begin: int) -> int | None:
    """Return the first of many steps that are skipped in a row, from a step on."""

    def find() -> int | None:
        steps = window.subject.lead.steps
        fresh = window.steps(steps, _STUCK_STEPS - 1)
        first = find_first_run(steps["skipped"][fresh], _STUCK_STEPS)
        return fresh.start + first if first is not None and fresh.start + first >= begin else None

    return window.find_once(find, _STUCK)


def _find_many(window: SearchWindow[Group], begin: int) -> Iterator[Finding | None]:
    """Yield the findings about many skipped steps from a step on, among others that were not."""
    lead, runs = window.subject.lead, window.keep(SkippedRuns, _MANY)
    fresh = window.steps(lead.steps, of=_MANY)
    rows = lead.steps[max(begin, fresh.start) : fresh.stop]
    for row in rows[rows["skipped"]]:
        run = runs.add(SkippedStretch(int(row["step"]), int(row["step"]), 1, 1, None))
        if run is None or run.all_skipped >= _STUCK_STEPS:
            continue
        if window.has_grown(run.skipped, _STUCK_STEPS, 1 / _MORE, (_MANY, run.first_step)):
            those = _select_steps(lead.steps, run)
            scales = fp16_warmup.read_loss_scales(lead, those[those["skipped"]])
            run.scales = (scales[0], scales[-1]) if scales else None
            yield _build_many(window.subject, run, int(row["end_unix_ns"]))


def _find_on_gpu(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Yield the findings about steps that a fused optimizer skipped: what is known of them comes later than they do."""
    group, runs = window.subject, window.keep(SkippedRuns, SkippedUpdates)
    for event in window.items(group.lead.events_of(SkippedUpdates)):
        run = runs.add(read_stretch(event))
        if run is None or not len(_select_steps(group.lead.steps, run)):
            continue
        is_stuck = run.all_skipped >= _STUCK_STEPS
        # A scale that falls from the first step on is on its way to one that fits.
        is_at_start = run.first_step == 0 == int(group.lead.steps["step"][0]) and not _is_raised(run)
        state = run.first_step, is_stuck, run.is_scale_zero
        if is_at_start and (run.scales is None or run.scales[1] >= 1):
            if window.has_grown(run.skipped, fp16_warmup.SKIPPED_STEPS, 1 / _MORE, state):
                yield _build_at_start(group, run, event.unix_ns)
        elif window.has_grown(run.skipped, _STUCK_STEPS, 1 / _MORE, state):
            yield (_build_stuck if is_stuck else _build_many)(group, run, event.unix_ns, or_more="or more")


def _select_steps(steps: Rows, run: SkippedRun) -> Rows:
    first, last = np.searchsorted(steps["step"], [run.first_step, run.last_step + 1])
    selected: Rows = steps[int(first) : int(last)]
    return selected


def _measure_wasted(group: Group, run: SkippedRun) -> dict[str, float | None]:
    """Return the skipped steps, and the time that they took."""
    iteration_s = compute_known_median(_select_steps(group.lead.steps, run)["iteration_s"])
    evidence = {"skipped_steps": float(run.skipped), "last_step": float(run.last_step)}
    return {**evidence, "wasted_s": None if np.isnan(iteration_s) else run.skipped * iteration_s}


def _build_at_start(group: Group, run: SkippedRun, known_ns: int) -> Finding:
    count = run.last_step + 1
    evidence, texts = _describe_scales(run.scales)
    return _SKIPPING.with_changes(lost_once="wasted_s").at_steps(
        group,
        _select_steps(group.lead.steps, run),
        {**_measure_wasted(group, run), **evidence},
        known_ns=known_ns,
        first_steps=count,
        skipped_of=run.skipped if run.skipped < count else None,
        **texts,
    )


def _build_stuck(group: Group, run: SkippedRun, known_ns: int, **texts: Any) -> Finding:
    evidence, scales = _describe_scales(run.all_scales)
    evidence |= {**_measure_wasted(group, run), "skipped_steps": float(run.all_skipped)}
    after = _AFTER if run.all_since > int(group.lead.steps["step"][0]) else None
    texts |= {**scales, **({"at_zero": _AT_ZERO} if run.is_scale_zero else {})}
    rows = _select_steps(group.lead.steps, run)
    kind = _STUCK.with_changes(lost_once="wasted_s")
    return kind.at_steps(group, rows, evidence, known_ns=known_ns, since=run.all_since, after=after, **texts)


def _is_raised(run: SkippedRun) -> bool:
    """Whether the loss scale was raised about as often as it fell, which it does once for each skipped step."""
    if run.scales is None or run.skipped < _STUCK_STEPS or min(run.scales) <= 0:
        return False
    return float(np.log2(run.scales[1] / run.scales[0])) >= -run.skipped / 4


def _build_many(group: Group, run: SkippedRun, known_ns: int, **texts: Any) -> Finding:
    scales, is_raised = run.scales, _is_raised(run)
    is_helpless = scales is not None and scales[0] >= _HELPLESS_FALL * scales[1]
    evidence, values = _describe_scales(scales if scales is not None and (is_raised or scales[1] < scales[0]) else None)
    kind = _ZERO if run.is_scale_zero else _RAISED if is_raised else _HELPLESS if is_helpless else _MANY
    return kind.at_steps(
        group,
        _select_steps(group.lead.steps, run),
        {**_measure_wasted(group, run), **evidence},
        known_ns=known_ns,
        last_step=run.last_step,
        **values,
        **texts,
    )


def _describe_scales(scales: tuple[float, float] | None) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return evidence and texts about the first and the last loss scale."""
    if scales is None:
        return {}, {}
    first, now = scales
    texts = {"scale_first": _format_scale(first), "scale_now": _format_scale(now)}
    return {"loss_scale_first": first, "loss_scale_now": now}, texts


def _follow(
    window: SearchWindow[Group], kind: FindingKind, first: int | None, least: int, real: int = 0
) -> Iterator[Finding]:
    """Yield the finding about ``least`` steps from ``first`` on, and again with each skipped one until more were real."""
    if first is not None:
        steps = window.subject.lead.steps[first:]
        for count in window.extend(partial(_count_on, steps["skipped"], least, real), 0, kind):
            yield _build(window.subject, kind, steps[:count])


def _count_on(skipped: NDArray[np.bool_], least: int, real: int, last: int | None) -> int | None:
    """Return up to which step to tell of the skipped ones next, after ``last``; None before it is over."""
    if last is None:
        return least
    begin = last + last // _MORE
    skipped = skipped[: begin + _SEARCH_STEPS]
    ends = np.flatnonzero(~skipped)[real:]
    later = np.flatnonzero(skipped[begin : ends[0] if len(ends) else None])
    return begin + int(later[0]) + 1 if len(later) else None


def _build(group: Group, kind: FindingKind, rows: Rows) -> Finding:
    engine, skipped = group.lead.engine, rows[rows["skipped"]]
    # The loss scale after the last one of many is known later.
    scales = fp16_warmup.read_loss_scales(group.lead, skipped[:-1] if kind is _STUCK else skipped)
    evidence: dict[str, float | None] = {"skipped_steps": len(skipped)}
    if kind in (_INFINITE, _ALL_INFINITE):
        return kind.at_steps(group, rows, evidence, dtype=engine.autocast or engine.dtype)
    texts: dict[str, Any] = {}
    if scales:
        found, texts = _describe_scales((scales[0], scales[-1]))
        evidence |= found
    if kind is _STUCK:
        return kind.at_steps(group, rows, evidence, since=int(rows["step"][0]), after=_AFTER, **texts)
    evidence["expected_state_bytes"] = fp16_warmup.estimate_state_bytes(engine) or None
    is_first = len(skipped) == len(rows)  # no step was real before
    return _with_advice(kind, engine.config, None).at_steps(
        group,
        rows,
        evidence,
        first_steps=len(rows),
        skipped_of=None if is_first else len(skipped),
        soon="Time and memory" if is_first else None,
        place="host memory" if engine.offload_optimizer in ("cpu", "nvme") else "GPU memory",
        **texts,
    )


def _format_scale(scale: float) -> str:
    return f"{scale:.0f}" if scale >= 1 or not scale else f"{scale:.2g}"


def _with_advice(kind: FindingKind, config: object, fitting: float | None) -> FindingKind:
    """Add advice with a power for DeepSpeed's loss scale; a fitting one is known only after a step that was not skipped."""
    fp16 = config.get("fp16") if isinstance(config, dict) else None
    power = fp16.get("initial_scale_power") if isinstance(fp16, dict) else None
    if not isinstance(power, int):
        return kind
    fitting_power = int(np.log2(fitting)) if fitting is not None and fitting >= 1 else power
    target = f"to {fitting_power} or less" if fitting_power < power else "lower"
    lower = f'set "fp16.initial_scale_power" {target} (now {power})'
    return kind.with_changes(advice=kind.advice.replace("{lower_scale}", lower))


def _measure_update(skipped: Rows, real: Rows) -> dict[str, float]:
    """Return the seconds of step() in skipped and in real steps; empty where they are unknown."""
    seconds = [compute_known_median(rows["step_s"]) for rows in (skipped, real)]
    return {} if np.isnan(seconds).any() else dict(zip(("step_skipped_s", "step_real_s"), seconds, strict=True))


def _build_end_finding(group: Group, steps: int, real: Rows) -> Finding:
    """``real``: the first real step and those after it that count."""
    lead = group.lead
    skipped = lead.steps[:steps]
    scales = fp16_warmup.read_loss_scales(lead, skipped)
    # The first step of all warms up; it counts only if there is no other.
    usual = skipped[1:] if len(skipped) > 1 else skipped
    evidence = {
        "skipped_steps": float(steps),
        "iteration_skipped_s": float(np.median(usual["iteration_s"])),
        "iteration_first_real_s": float(real["iteration_s"][0]),
        "iteration_real_s": float(np.median(real["iteration_s"][1:])),
        **_measure_update(usual, real[1:]),
    }
    growth: dict[str, int] = {}
    for column in ("allocated_peak_bytes", "host_held_bytes", "nvml_process_bytes"):
        before, after = int(usual[column].max()), int(real[column][1:].max())
        if before > 0 and after > 0:
            name = column.removesuffix("_bytes").removesuffix("_peak")
            evidence |= {f"{name}_skipped_bytes": float(before), f"{name}_real_bytes": float(after)}
            if after - before >= JUMP_BYTES:
                growth |= {f"{name}_before": before, f"{name}_after": after}
    for index, scale in enumerate(scales):
        evidence[f"loss_scale_{index}" if index < steps else "loss_scale_real"] = scale
    state = fp16_warmup.read_state_bytes(fp16_warmup.find_inventory(lead, "after_update"))
    evidence |= {f"optimizer_state_{place}_bytes": float(size) for place, size in state.items()}
    # A loss scale that soon fits is how fp16 begins.
    misled = steps >= _STUCK_STEPS and evidence["iteration_real_s"] > 1.1 * evidence["iteration_skipped_s"]
    kind = _with_advice(_ENDED, lead.engine.config, scales[-1] if scales else None)
    return kind.with_changes(severity=Severity.WARNING if misled else Severity.INFO).at_steps(
        group,
        real,
        evidence,
        first_scale=scales[0] if scales else None,
        last_scale=scales[-1] if scales else None,
        state_bytes=sum(state.values()) or None,
        **growth,
    )
