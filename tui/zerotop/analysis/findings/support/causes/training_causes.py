"""A change in the training itself that coincides with a change of the iteration time."""

from __future__ import annotations

import numpy as np

from zerotop.analysis.findings.support.causes.step_change import Advice, Cause, StepChange
from zerotop.analysis.steps.training_changes import TrainingChange, describe_changes

# By how many iterations a change may be off: the step in which it happened is not yet, or already, another one.
_STEPS_OFF = 2
_NO_ADVICE: Advice = ("", "")
_HOOK: Advice = ("Remove the hook once it is no longer needed: the call that adds it returns a handle.", "")


def check_training(change: StepChange) -> Cause | None:
    """Return the cause that the training itself was changed, with the line that did it."""
    slower = float(np.median(change.after["iteration_s"]) - np.median(change.before["iteration_s"]))
    off_ns = round(_STEPS_OFF * 1e9 * float(np.median(change.after["iteration_s"])))
    earliest_ns, latest_ns = int(change.before["end_unix_ns"][-1]) - off_ns, int(change.after["end_unix_ns"][0]) + off_ns
    known_ns = max(change.known_ns, int(change.after["end_unix_ns"][-1]))
    found = change.process.find_changes(earliest_ns, latest_ns, known_ns)
    fitting = [one for one in found if one.effect * slower >= 0]
    if not fitting:
        return None
    is_told = fitting[0].effect != 0 or fitting[0].line is not None
    return Cause(describe_changes(fitting), *_advise(change, fitting[0], slower), 0.95 if is_told else 0.85)


def _advise(change: StepChange, first: TrainingChange, slower: float) -> Advice:
    if slower <= 0:
        return _NO_ADVICE
    if first.name == "hooks":
        return _HOOK
    if first.name in ("optimizer.foreach", "optimizer.fused") and change.process.is_on_gpu:
        names = {one.class_ for one in change.process.engine.optimizers or () if one.package == "torch"}
        if len(names) == 1:
            return "Leave foreach at its default, or let one kernel update all parameters.", "fused=True"
    return _NO_ADVICE
