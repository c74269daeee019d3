"""Training steps need more device memory than before, for good."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, Severity, build_step_finding
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows
from zerotop.analysis.annotations.support.thresholds import JUMP_BYTES
from zerotop.analysis.formatting import format_bytes
from zerotop.analysis.stats.change_points import ShiftFinder


class _ShiftFinder(ShiftFinder):
    """Of the highest that steps had allocated."""


def detect(facts: Evidence) -> Iterator[Annotation]:
    """One finding for each higher plateau, but for that of the first real step, which has a finding of its own."""
    for group in facts.groups:
        steps = group.lead.steps
        peaks = steps["allocated_peak_bytes"]
        for shift in group.lead.get_state(_ShiftFinder).find_shifts(peaks):
            before, after = steps[shift.before], steps[shift.first : shift.last + 1]
            if min(before["allocated_peak_bytes"].min(), after["allocated_peak_bytes"].min()) <= 0:
                continue
            real = bool(before["skipped"].mean() > 0.5 > after["skipped"].mean())
            if peaks[shift.first] - np.median(peaks[shift.before]) >= JUMP_BYTES and not real:
                yield _build_finding(group, before, after)


def _build_finding(group: Group, before: Rows, after: Rows) -> Annotation:
    was, becomes = float(np.median(before["allocated_peak_bytes"])), float(np.median(after["allocated_peak_bytes"]))
    tokens = float(np.median(before["tokens"])), float(np.median(after["tokens"]))
    evidence = {"before_bytes": was, "after_bytes": becomes}
    if min(tokens) > 0:
        evidence |= {"tokens_before": tokens[0], "tokens_after": tokens[1]}
    cause, advice, sure = _find_cause(tokens, after, becomes > was)
    step = int(after["step"][0])
    device = group.lead.device_bytes
    left = f", which leaves {format_bytes(device - becomes)} of the device" if device else ""
    return build_step_finding(
        after,
        name="memory_step",
        ranks=group.ranks_at(int(after["end_unix_ns"][-1])),
        severity=Severity.INFO,
        confidence=sure,
        sentence=f"From step {step} on training allocates up to {format_bytes(becomes)} instead of {format_bytes(was)}{left}: {cause}.",
        advice=advice,
        evidence=evidence,
    )


def _find_cause(tokens: tuple[float, float], after: Rows, larger: bool) -> tuple[str, str, float]:
    if min(tokens) > 0 and tokens[1] > 1.05 * tokens[0]:
        text = f"a rank's batches have {tokens[1]:.0f} tokens instead of {tokens[0]:.0f}"
        return text, "Cut sequences to a fixed length in the tokenizer (truncation=True, max_length=...).", 0.9
    for column, what in (("eval_s", "an evaluation"), ("checkpoint_s", "a checkpoint")):
        if after[0][column] > 0:
            return f"{what} came just before", 'Set "memory_breakdown": true in the DeepSpeed config to see what stays.', 0.5
    return "nothing that is recorded changed", 'Set "memory_breakdown": true in the DeepSpeed config to see what stays.', 0.4
