"""Training steps need more device memory than before, for good."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Rows
from zerotop.analysis.annotations.support.thresholds import JUMP_BYTES
from zerotop.analysis.stats.change_points import ShiftFinder

_KIND = FindingKind(
    name="memory_step",
    severity=Severity.INFO,
    confidence=0.4,
    sentence=(
        "Training allocates up to {after_bytes:bytes} instead of {before_bytes:bytes} from step {step} on[, {left:bytes} of"
        " the device are left]: {cause}."
    ),
    advice="{memory_breakdown} to see what stays allocated.",
)
_TOKENS = _KIND.with_changes(
    confidence=0.9, advice="Cut sequences to a fixed length in the tokenizer (truncation=True, max_length=...)."
)
_AFTER_PAUSE = _KIND.with_changes(confidence=0.5)


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each higher plateau, except that of the first real step, which has a finding of its own."""
    for group in recording.groups:
        steps = group.lead.steps
        peaks = steps["allocated_peak_bytes"]
        for shift in group.lead.get_state(ShiftFinder, _KIND.name).find_shifts(peaks):
            before, after = steps[shift.before], steps[shift.first : shift.last + 1]
            if min(before["allocated_peak_bytes"].min(), after["allocated_peak_bytes"].min()) <= 0:
                continue
            is_first_real = bool(before["skipped"].mean() > 0.5 > after["skipped"].mean())
            is_jump = peaks[shift.first] - np.median(peaks[shift.before]) >= JUMP_BYTES and not is_first_real
            if is_jump and group.count_report(_KIND.name):
                yield _build_finding(group, before, after)


def _build_finding(group: Group, before: Rows, after: Rows) -> Annotation:
    (before_bytes, after_bytes), tokens = (
        [float(np.median(rows[column])) for rows in (before, after)] for column in ("allocated_peak_bytes", "tokens")
    )
    kind, cause = _find_cause(tokens, after)
    evidence = {"before_bytes": before_bytes, "after_bytes": after_bytes}
    if min(tokens) > 0:
        evidence |= {"tokens_before": tokens[0], "tokens_after": tokens[1]}
    device = group.lead.device_bytes
    return kind.at_steps(group, after, evidence, left=device - after_bytes if device else None, cause=cause)


def _find_cause(tokens: list[float], after: Rows) -> tuple[FindingKind, str]:
    if min(tokens) > 0 and tokens[1] > 1.05 * tokens[0]:
        return _TOKENS, f"a rank's batches have {tokens[1]:.0f} tokens instead of {tokens[0]:.0f}"
    for column, name in (("eval_s", "an evaluation"), ("checkpoint_s", "a checkpoint")):
        if after[0][column] > 0:
            return _AFTER_PAUSE, f"{name} came just before"
    return _KIND, "no other change was recorded"
