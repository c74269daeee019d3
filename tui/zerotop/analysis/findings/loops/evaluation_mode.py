"""A model that trains in evaluation mode, as one does that stays in it after an evaluation: dropout and batch norm are off.

The probe looks at the modules right after an optimizer's step, and only now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.analysis.steps.training_changes import TrainingChange, list_changes
from zerotop_probe.recording.events import ChangedSetting, TrainingChanged

_KIND = FindingKind(
    name="evaluation_mode",
    confidence=0.9,
    headline="Step {step} trained the model in evaluation mode[: {place}]",
    details=(
        "It was in training mode after step {before_step}.[ {line} changed that.] {layers}: in evaluation mode dropout drops"
        " nothing, and batch normalization uses its running statistics and learns none."
    ),
    advice="Call train() again after each evaluation.",
    fix="model.train()",
)
_OVER = _KIND.with_changes(
    headline="Step {step} trained the model in evaluation mode, and step {later_step} did not[: {place}]"
)
# At most this part of the modules stays in training mode, such as losses; those who freeze a kind of layer leave more.
_LEFT_SHARE = 0.25


class _Stay(NamedTuple):
    """A stay in evaluation mode."""

    event: TrainingChanged
    change: TrainingChange
    layers: str


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each look that found this mode, and the next one that did not."""
    lead, stays = window.subject.lead, window.keep(list[_Stay])
    for event in window.items(lead.events_of(TrainingChanged)):
        layers = next((one for one in event.changes if one.name == "training_layers"), None)
        if layers is None:
            continue
        if layers.after:
            yield from (_build(window.subject, stay, event) for stay in stays)
            stays.clear()
        elif (stay := _read_stay(event, layers, lead.source.offset_ns)) is not None:
            stays[:] = [stay]
            yield _build(window.subject, stay)


def _read_stay(event: TrainingChanged, layers: ChangedSetting, offset_ns: int) -> _Stay | None:
    """Return the change by which nearly all modules went into evaluation mode; None for another."""
    for change in list_changes([event], offset_ns):
        counts = change.before, change.after
        if change.name == "module.training" and all(count.isdecimal() for count in counts):
            return _Stay(event, change, layers.before) if int(counts[1]) <= _LEFT_SHARE * int(counts[0]) else None
    return None


def _build(group: Group, stay: _Stay, end: TrainingChanged | None = None) -> Finding:
    line, known_ns = stay.change.line, (end or stay.event).unix_ns
    values: dict[str, Any] = {"step": stay.event.step, "before_step": stay.event.last_step, "layers": stay.layers}
    values |= {"place": line.place if line is not None else None, "line": line.text if line is not None else None}
    if end is not None:
        values["later_step"] = end.step
    kind = _KIND if end is None else _OVER
    return kind.at(group, stay.change.begin_ns, known_ns, {}, **values)
