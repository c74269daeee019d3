"""Updates on the CPU that take longer because the optimizer's state holds more and more subnormal numbers."""

from __future__ import annotations

from zerotop.analysis.findings.support.causes.step_change import Cause, StepChange
from zerotop_probe.recording.event_values import SUBNORMAL
from zerotop_probe.recording.events import TrainingChanged

# The part of the change that is in the step phase at least, and by how much that is longer while forward and backward are
# at most so much longer: neither cores nor clocks are the reason then.
_UPDATES_PART, _LONGER_TIMES, _ALIKE_TIMES = 0.6, 1.15, 1.1


def check_subnormal(change: StepChange) -> Cause | None:
    """Return the cause if only the updates take longer, and the optimizer's state is known to hold such numbers."""
    known = [
        one
        for event in change.process.events_of(TrainingChanged)
        if event.unix_ns <= change.latest_ns
        for one in event.changes
        if one.name == SUBNORMAL
    ]
    if change.added_s <= 0 or not known or known[-1].after != "True":
        return None
    levels = change.measure_levels()
    if not levels:
        return None
    before, after = levels["step_s"]
    others = [sum(levels[name][side] for name in ("forward_s", "backward_s")) for side in (0, 1)]
    if after - before < _UPDATES_PART * change.added_s or after < _LONGER_TIMES * before:
        return None
    if others[1] > _ALIKE_TIMES * others[0]:
        return None
    return Cause(
        "the optimizer's state holds subnormal numbers, with which the CPU computes more slowly",
        "Let the CPU treat such small numbers as 0: call this once at the start of the script, in each rank.",
        "torch.set_flush_denormal(True)",
        0.85,
    )
