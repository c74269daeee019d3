"""Steps that need more device memory from the same step on: something in the training itself became larger."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.step_change import BREAKDOWN, Cause, StepChange
from zerotop.analysis.findings.support.memory.looks import find_growth, read_looks
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS
from zerotop_probe.recording.event_values import PEAK

# The least rise of the peak, in bytes and as a share of the one before; steps that show it, the first at most so many steps
# after the slowdown, as the peaks of counted steps are not known.
_LEAST_BYTES, _LEAST_SHARE, _FEWEST, _NEAR_STEPS = 64 << 20, 0.05, 2, 32
_CONFIDENCE = 0.75
_ADVICE = "See what that line does since then: it takes time and memory in each step."


def check_memory(change: StepChange) -> Cause | None:
    """Return the cause that all steps after a slowdown peak higher than all before, with the line that allocates more."""
    if np.median(change.after["iteration_s"]) <= np.median(change.before["iteration_s"]):
        return None
    known_ns = max(change.known_ns, int(change.after["end_unix_ns"][-1]))
    rows = change.process.phased_steps_until(known_ns)
    first = int(np.searchsorted(rows["step"], change.after["step"][0]))
    if not (rows["step"][first : first + 1] < change.after["step"][0] + _NEAR_STEPS).any():
        return None
    before, after = (some["allocated_peak_bytes"] for some in (rows[max(0, first - LEVEL_STEPS) : first], rows[first:]))
    if len(before) < SETTLED_STEPS or len(after) < _FEWEST or not before.min() > 0:
        return None
    most, grown = int(before.max()), int(after[:LEVEL_STEPS].min()) - int(before.max())
    if grown < max(_LEAST_BYTES, _LEAST_SHARE * most):
        return None
    earlier = None
    for look in read_looks(change.process, PEAK):
        if look.first_step < change.after["step"][0]:
            earlier = look
        elif look.known_ns <= known_ns and earlier is not None and (growth := find_growth(look, earlier)) is not None:
            text = "steps began to allocate {grown:bytes} more, at least {part:bytes} of it at {line}"
            values = {"grown": grown, "part": min(grown, growth.grown_bytes), "line": growth.line.text}
            return Cause(Text(text, values), _ADVICE, growth.line.location, _CONFIDENCE, finding="memory_step")
    text = "steps began to allocate {grown:bytes} more"
    return Cause(Text(text, {"grown": grown}), *BREAKDOWN, _CONFIDENCE, finding="memory_step")
