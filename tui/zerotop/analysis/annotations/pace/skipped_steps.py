"""fp16 skips steps until the loss scale fits; time and memory are other ones when skipping ends.

Two findings: that nothing has been updated yet, while it is so, and what changed when it ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.fp16_warmup import count_skipped_first, estimate_state_bytes, read_loss_scales
from zerotop.analysis.annotations.support.thresholds import JUMP_BYTES, REAL_STEPS, SKIPPED_STEPS
from zerotop.analysis.formatting import format_bytes, format_count, format_seconds
from zerotop.session.samples import Rows

# Steps from the first real one on among which enough others have to be real too.
_SEARCH_STEPS = 1000


@dataclass
class _State:
    """What was told of an attempt."""

    is_skipping_reported: bool = False
    is_end_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation]:
    """For each attempt of the job that begins with skipped steps."""
    for group in facts.groups:
        steps = group.lead.steps
        skipped, told = count_skipped_first(group.lead), group.get_state(_State)
        if skipped < SKIPPED_STEPS or int(steps["step"][0]) != 0:
            continue
        if not told.is_skipping_reported:
            told.is_skipping_reported = True
            yield _build_skipping_finding(group, steps[:SKIPPED_STEPS])
        # A few more may be skipped among the first real ones.
        real = skipped + np.flatnonzero(~steps["skipped"][skipped : skipped + _SEARCH_STEPS])
        if not told.is_end_reported and len(real) > REAL_STEPS:
            told.is_end_reported = True
            yield _build_end_finding(group, skipped, steps[real[: REAL_STEPS + 1]])


def _build_skipping_finding(group: Group, rows: Rows) -> Annotation:
    lead, known_ns = group.lead, int(rows["end_unix_ns"][-1])
    scale = read_loss_scales(lead, len(rows))
    evidence = {"skipped_steps": float(len(rows))}
    text = f"The first {len(rows)} steps were skipped because fp16 gradients overflowed"
    if scale:
        evidence |= {"loss_scale_first": scale[0], "loss_scale_now": scale[-1]}
        text += f" (loss scale {scale[0]:.0f}, now {scale[-1]:.0f})"
    text += ": nothing has been learnt yet, and time and memory are not what they will be"
    expected = estimate_state_bytes(lead.engine)
    if expected:
        evidence["expected_state_bytes"] = float(expected)
        where = "host memory" if lead.engine.get("offload_optimizer") in ("cpu", "nvme") else "GPU memory"
        text += f"; with the first real step {format_bytes(expected)} of optimizer state will appear in each rank's {where}"
    return Annotation(
        name="steps_skipped",
        begin_ns=int(rows["begin_unix_ns"][0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=int(rows["step"][0]),
        ranks=group.ranks_at(known_ns),
        severity=Severity.WARNING,
        confidence=0.99,
        sentence=text + ".",
        advice=_choose_advice(lead.engine.get("config"), len(rows)),
        evidence=evidence,
    )


def _choose_advice(config: object, skipped: int) -> str:
    fp16 = config.get("fp16") if isinstance(config, dict) else None
    power = fp16.get("initial_scale_power") if isinstance(fp16, dict) else None
    if isinstance(power, int) and power > skipped:
        return f'Set "fp16.initial_scale_power" to {power - skipped} or less (now {power}), or train in bf16.'
    return 'Set "fp16.initial_scale_power" lower, or train in bf16, which needs no loss scale.'


def _build_end_finding(group: Group, steps: int, real: Rows) -> Annotation:
    """``real``: the first real step and those after it that count."""
    lead, known_ns = group.lead, int(real["end_unix_ns"][-1])
    skipped, found = lead.steps[:steps], read_loss_scales(lead, steps)
    # The first step of all warms up; without others it has to do.
    usual = skipped[1:] if len(skipped) > 1 else skipped
    evidence = {
        "skipped_steps": float(steps),
        "iteration_skipped_s": float(np.median(usual["iteration_s"])),
        "iteration_first_real_s": float(real["iteration_s"][0]),
        "iteration_real_s": float(np.median(real["iteration_s"][1:])),
        "step_skipped_s": float(np.median(usual["step_s"])),
        "step_real_s": float(np.median(real["step_s"][1:])),
        **_measure_memory(usual, real),
    }
    for place, scale in enumerate(found):
        evidence[f"loss_scale_{place}" if place < steps else "loss_scale_real"] = scale
    return Annotation(
        name="skipping_ended",
        begin_ns=int(real["begin_unix_ns"][0]),
        end_ns=known_ns,
        known_ns=known_ns,
        step=int(real["step"][0]),
        ranks=group.ranks_at(known_ns),
        severity=Severity.WARNING if evidence["iteration_real_s"] > 1.1 * evidence["iteration_skipped_s"] else Severity.INFO,
        confidence=0.95,
        sentence=_describe_finding(evidence, int(real["step"][0]), steps, found),
        advice=_choose_advice(lead.engine.get("config"), steps),
        evidence=evidence,
    )


def _measure_memory(skipped: Rows, real: Rows) -> dict[str, float]:
    """The steps' highest bytes before and after, where they are known of both."""
    found: dict[str, float] = {}
    for column in ("allocated_peak_bytes", "host_rss_bytes", "nvml_process_bytes"):
        before, after = int(skipped[column].max()), int(real[column][1:].max())
        if before > 0 and after > 0:
            name = column.removesuffix("_bytes").removesuffix("_peak")
            found |= {f"{name}_skipped_bytes": float(before), f"{name}_real_bytes": float(after)}
    return found


def _describe_finding(evidence: dict[str, float], step: int, skipped: int, loss_scales: Sequence[float]) -> str:
    text = f"After {format_count(skipped, 'skipped step')}"
    if loss_scales:
        text += f", in which the loss scale fell from {loss_scales[0]:.0f} to {loss_scales[-1]:.0f},"
    text += (
        f" step {step} was the first real one ({format_seconds(evidence['iteration_first_real_s'])}), and iterations went from"
        f" {format_seconds(evidence['iteration_skipped_s'])} to {format_seconds(evidence['iteration_real_s'])}:"
        f" step() takes {format_seconds(evidence['step_real_s'])} instead of {format_seconds(evidence['step_skipped_s'])}"
    )
    for name, what in (("allocated", "the allocated peak"), ("host_rss", "each rank's host memory")):
        before, after = evidence.get(f"{name}_skipped_bytes", 0.0), evidence.get(f"{name}_real_bytes", 0.0)
        if after - before >= JUMP_BYTES:
            text += f"; {what} grew from {format_bytes(before)} to {format_bytes(after)}"
    return text + ". Nothing went wrong: these are the true time and memory."
