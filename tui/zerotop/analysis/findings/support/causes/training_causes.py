"""A change in the training itself that coincides with a change of the iteration time.

A debugging mode that was switched on or off when the iteration time changed.

Steps that need more device memory from the same step on: something in the training itself became larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.findings.support.causes.code_causes import check_code
from zerotop.analysis.findings.support.causes.step_change import BREAKDOWN, Advice, Cause, StepChange
from zerotop.analysis.findings.support.causes.subnormal_state import check_subnormal
from zerotop.analysis.findings.support.memory.looks import LineGrowth, find_growth, read_looks
from zerotop.analysis.findings.support.memory.square_blocks import SquareBlocks, find_square_blocks
from zerotop.analysis.findings.support.mode_uses import NAMES, list_uses
from zerotop.analysis.findings.support.thresholds import ABOUT_AS_MUCH, NEAR_STEPS
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import LEVEL_STEPS, SETTLED_STEPS
from zerotop.analysis.steps.training_changes import (
    TrainingChange,
    describe_changes,
    describe_repeated,
    parse_counts,
)
from zerotop_probe.recording.event_values import NO_SYNC, OBJECTS, PEAK

# The least rise of the peak, in bytes and as a share of the one before; steps that show it, the first at most so many steps
# after the slowdown, as the peaks of counted steps are not known.
_LEAST_BYTES, _LEAST_SHARE, _FEWEST, _NEAR_STEPS = 64 << 20, 0.05, 2, 32
_CONFIDENCE = 0.75
_MADE_CONFIDENCE = 0.9  # where the training itself was changed between the steps that show it
_OFTEN_ADVICE = "See why that line runs more often in each step since then, as in a loop with more iterations."
_ADVICE = "See what that line does since then: it takes time and memory in each step."


def check_memory(change: StepChange) -> Cause | None:
    """Return the cause that all steps after a slowdown peak higher than all before, with the line that allocates more."""
    if change.added_s <= 0:
        return None
    rows = change.process.phased_steps_until(change.latest_ns)
    first = int(np.searchsorted(rows["step"], change.step))
    if not (rows["step"][first : first + 1] < change.step + _NEAR_STEPS).any():
        return None
    before, after = (some["allocated_peak_bytes"] for some in (rows[max(0, first - LEVEL_STEPS) : first], rows[first:]))
    if len(before) < SETTLED_STEPS or len(after) < _FEWEST or not before.min() > 0:
        return None
    most, grown = int(before.max()), int(after[:LEVEL_STEPS].min()) - int(before.max())
    if grown < max(_LEAST_BYTES, _LEAST_SHARE * most):
        return None
    made = change.process.find_changes(
        int(rows["end_unix_ns"][first - 1]), int(rows["end_unix_ns"][first]), change.latest_ns
    )
    if made := [one for one in made if one.effect >= 0]:
        both = Text(
            "{made}, and steps began to allocate {grown:bytes} more", {"made": describe_changes(made), "grown": grown}
        )
        return Cause(both, *_advise(change, made[0], change.added_s), _MADE_CONFIDENCE, finding="memory_step")
    square = find_square_blocks(change.process, int(rows["end_unix_ns"][first - 1]), rows[first], grown)
    return _describe_rise(change, grown, _find_grown_line(change), square)


def _find_grown_line(change: StepChange) -> LineGrowth | None:
    """Return the line that allocates more since a change, from the looks before and after it."""
    earlier = None
    for look in read_looks(change.process, PEAK):
        if look.first_step < change.step:
            earlier = look
        elif (
            look.known_ns <= change.latest_ns and earlier is not None and (growth := find_growth(look, earlier)) is not None
        ):
            return growth
    return None


def _describe_rise(change: StepChange, grown: int, growth: LineGrowth | None, square: SquareBlocks | None) -> Cause:
    """Return the cause that steps allocate so many bytes more: what is known of the blocks, and the line."""
    values: dict[str, Any] = {"grown": grown}
    if square is not None:
        values |= {"blocks": square.text, "line": growth.line.text if growth is not None else None}
        text = Text("steps began to allocate {grown:bytes} more[ at {line}]: {blocks}", values)
        return Cause(text, square.advice, square.fix, _MADE_CONFIDENCE, finding="memory_step")
    text, advice, fix = Text("steps began to allocate {grown:bytes} more", values), *BREAKDOWN
    if growth is not None:
        values |= {"part": min(grown, growth.grown_bytes), "line": growth.line.text}
        text = Text(f"{text.template}, at least {{part:bytes}} of it at {{line}}", values)
        advice, fix = _ADVICE, growth.line.location
        if growth.counts is not None:
            values |= dict(zip(("then", "now"), growth.counts, strict=True))
            text, advice = Text(f"{text.template}, in {{now}} blocks instead of {{then}}", values), _OFTEN_ADVICE
    return Cause(text, advice, fix, _CONFIDENCE, finding="memory_step")


def check_modes(change: StepChange) -> Cause | None:
    """Return the cause that a mode was switched on or off. It has a finding of its own if it lasts."""
    before, after = change.before, change.after
    is_slower = np.median(after["iteration_s"]) > np.median(before["iteration_s"])
    # Steps between the two were only counted, or the first one began without the mode.
    earliest_ns, latest_ns = int(before["end_unix_ns"][-1]), int(after["end_unix_ns"][0])
    known_ns = max(change.known_ns, int(after["end_unix_ns"][-1]))
    for use in list_uses(change.process):
        # Between two looks of the probe.
        if is_slower and use.begin_ns <= latest_ns and earliest_ns <= use.known_ns <= known_ns:
            return Cause(f"{NAMES[use.mode]} was switched on", "", "", 0.95, has_own_finding=True)
        end_ns, end_known_ns = use.end_ns or known_ns + 1, use.end_known_ns or known_ns + 1
        if not is_slower and end_ns <= latest_ns and earliest_ns <= end_known_ns <= known_ns:
            return Cause(f"{NAMES[use.mode]} was switched off", "", "", 0.9)
    return None


# By how many iterations a change may be off: the step in which it happened is not yet, or already, another one.
_STEPS_OFF = 2
# A change of pace by this factor is no chance where a setting changed between two looks that are far apart.
_LARGE_TIMES = 1.5
# A change that is made so often, over at least half of the time of a rise, goes on with it.
_REPEATED = 3
_NO_ADVICE: Advice = ("", "")
OPTIMIZER_REMADE = "optimizer_remade"
"""The kind of findings about optimizers that are made anew in each step."""
REMADE = (OBJECTS, "optimizers")
# A forward takes about a third of the time of forward and backward.
_TIMES_CHECKPOINTED = 4 / 3
_INPUTS: Advice = ("If inputs are not meant to be larger, keep them as in the steps before.", "")
_HOOK: Advice = ("Remove the hook once it is no longer needed: the call that adds it returns a handle.", "")
_UNSYNCED: Advice = (
    "Run forward and backward of all micro-steps but the last one of a step within no_sync().",
    "with model.no_sync():",
)
_CONVERSIONS = {"float32": "float", "float64": "double"}


def check_training(change: StepChange) -> Cause | None:
    """Return the cause that the training itself was changed, with the line that did it, or other code runs since.

    Or its numbers became such that updates take longer.
    """
    off_ns = round(_STEPS_OFF * 1e9 * change.after_s)
    earliest_ns, latest_ns = int(change.before["end_unix_ns"][-1]) - off_ns, int(change.after["end_unix_ns"][0]) + off_ns
    found = change.process.find_changes(earliest_ns, latest_ns, change.latest_ns)
    fitting = [one for one in found if one.effect_on_time * change.added_s >= 0 and not _may_be_chance(change, one)]
    fitting = [one for one in fitting if not _is_between_far_looks(change, one)] or fitting
    if not fitting:
        return check_subnormal(change) or check_code(change)
    is_told = fitting[0].effect_on_time != 0 or fitting[0].line is not None
    cause = Cause(describe_changes(fitting), *_advise(change, fitting[0], change.added_s), 0.95 if is_told else 0.85)
    cause = cause._replace(is_expected=any(map(_is_meant, fitting)) or _is_by_inputs(change, fitting))
    if all(one.name in REMADE for one in fitting):
        cause = cause._replace(finding=OPTIMIZER_REMADE)
    return cause._replace(when=_name_steps(change, fitting))


def _is_meant(one: TrainingChange) -> bool:
    """Whether the script says what it wants, and what that takes: another optimizer, or more parameters to train.

    Some optimizers, such as L-BFGS, make several passes in each step.
    """
    return one.name == "optimizers" or (one.name == "trained_parameters" and one.effect > 0)


def _is_by_inputs(change: StepChange, found: list[TrainingChange]) -> bool:
    """Whether time grew about as much as the models' inputs did, with the forwards that checkpointing repeats since then."""
    times = max(one.input_times for one in found)
    rows = [float(np.median(some["rows"])) if len(some) else 0.0 for some in change.phased]
    times *= rows[1] / rows[0] if min(rows) > 0 else 1.0
    repeated = _TIMES_CHECKPOINTED if any(one.checkpoints for one in found) else 1.0
    return times > 1 and change.after_s <= change.before_s * repeated * times**ABOUT_AS_MUCH


def _is_between_far_looks(change: StepChange, one: TrainingChange) -> bool:
    """Whether a setting changed at some time between two looks that are many steps apart."""
    return one.end_ns - one.begin_ns > 1e9 * NEAR_STEPS * max(change.before_s, change.after_s)


def _name_steps(change: StepChange, found: Sequence[TrainingChange]) -> str:
    """Return in which step, or between which, these settings changed; "" if it is about the step of the change of pace.

    Iterations on the host change a step later where it waits for the GPU only in the next one.
    """
    steps = change.process.steps
    ends = min(one.begin_ns for one in found), max(one.end_ns for one in found)
    first, last = steps["step"][np.minimum(np.searchsorted(steps["end_unix_ns"], ends), len(steps) - 1)].tolist()
    if _is_between_far_looks(change, found[0]):
        return f"between steps {first} and {last}"
    return f"in step {first}" if ends[0] == ends[1] and first < change.step else ""


def _may_be_chance(change: StepChange, one: TrainingChange) -> bool:
    """Whether a setting, which may do nothing to the pace, changed at some time around a change of pace that is small."""
    before_s, after_s = sorted((change.before_s, change.after_s))
    return one.effect_on_time == 0 and _is_between_far_looks(change, one) and after_s < _LARGE_TIMES * before_s


def check_repeated_training(change: StepChange) -> Cause | None:
    """Return the cause that the same setting of the training was changed again and again while iterations became longer."""
    same = _list_repeated(change)
    if not same:
        return None
    cause = Cause(describe_repeated(same), *_advise(change, same[0], change.added_s), 0.95)
    return cause._replace(is_expected=_is_meant(same[0]))


def find_repeated_steps(change: StepChange) -> tuple[int, int] | None:
    """Return the steps between which the first of these changes was made, the same ones if known; None if unknown."""
    same, process = _list_repeated(change), change.process
    made = process.find_changes(0, change.latest_ns, change.latest_ns) if same else ()
    first = next((one for one in made if (one.name, one.line) == (same[0].name, same[0].line)), None)
    steps = [process.step_at(at_ns) for at_ns in (first.begin_ns, first.end_ns)] if first is not None else []
    return (steps[0], steps[1]) if len(steps) == 2 and steps[0] is not None and steps[1] is not None else None


def _list_repeated(change: StepChange) -> list[TrainingChange]:
    """Return the changes of one setting that were made again and again in some steps; none without these."""
    begin_ns, end_ns = int(change.before["begin_unix_ns"][0]), int(change.after["end_unix_ns"][-1])
    by_place: dict[tuple[str, CodeLine | None], list[TrainingChange]] = {}
    for one in change.process.find_changes(begin_ns, end_ns, change.latest_ns):
        if one.effect_on_time * change.added_s > 0:
            by_place.setdefault((one.name, one.line), []).append(one)
    for same in by_place.values():
        # Of several between two looks, the time of the first one is known.
        if len(same) >= _REPEATED and same[-1].known_ns - same[0].end_ns >= (end_ns - begin_ns) / 2:
            return same
    return []


def _advise(change: StepChange, first: TrainingChange, slower: float) -> Advice:
    if slower <= 0:
        return _NO_ADVICE
    if first.name == "hooks":
        return _HOOK
    if first.input_times > 1:
        return _INPUTS
    if first.name == NO_SYNC:
        return _UNSYNCED
    if first.name == "dtypes" and first.effect > 0 and first.line is not None:
        return _advise_copy(first.after, first.line)
    if first.name in ("optimizer.foreach", "optimizer.fused") and change.process.is_on_gpu:
        names = {one.class_ for one in change.process.engine.optimizers or () if one.package == "torch"}
        if len(names) == 1:
            return "Leave foreach at its default, or let one kernel update all parameters.", "fused=True"
    return _NO_ADVICE


def _advise_copy(after: str, line: CodeLine) -> Advice:
    """Return what to do where a line converts the model, but may need only a copy of it."""
    kinds = list(parse_counts(after))
    method = _CONVERSIONS.get(kinds[0]) if len(kinds) == 1 else None
    needed = f"a {kinds[0]} copy" if method is not None else "a copy"
    advice = (
        f"If {line.text} needs {needed}, convert a copy of the model, or the tensors of its state_dict(): float(), double()"
        " and to() change the module itself."
    )
    return advice, f"copy.deepcopy(model).{method}()" if method is not None else line.location
