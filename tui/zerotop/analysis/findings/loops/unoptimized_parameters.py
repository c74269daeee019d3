"""Parameters that are trained and in no optimizer any more, as after layers or a model were made anew beside the optimizer.

The probe tells it only where an optimizer held all parameters before, and some steps later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.analysis.steps.training_changes import TrainingChange, list_changes, parse_counts
from zerotop_probe.recording.event_values import UNOPTIMIZED
from zerotop_probe.recording.events import TrainingChanged

_KIND = FindingKind(
    name="unoptimized_parameters",
    confidence=0.95,
    headline="No optimizer updates {elements:,.0f} parameters since step {step}[: {place}]",
    details=(
        "{tensors:count tensor} with gradients are in no optimizer, so no step changes them; up to step {before_step} an"
        " optimizer held each trained parameter.[ {line} {did}.]"
        "[ The optimizer still holds {left:count tensor} without gradients, of no model in use.]"
    ),
    advice=(
        "Make the optimizer anew over the present parameters, or add them to it; or keep the parameters, and copy new values"
        " into them."
    ),
    fix='optimizer.add_param_group({"params": new_parameters})',
)
_BETWEEN = _KIND.with_changes(
    headline="Since a step between {step} and {last_step}, no optimizer updates {elements:,.0f} parameters"
)
# What the line did, if an optimizer held all of them before, or they were not trained.
_DID = {"dropped": "made an optimizer without them", "unfrozen": "set them to be trained"}


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report when parameters lost their optimizer, as the lead's probe saw it."""
    lead = window.subject.lead
    for event in window.items(lead.events_of(TrainingChanged)):
        for change in list_changes([event], lead.source.offset_ns):
            counts = parse_counts(change.after) if change.name == UNOPTIMIZED else {}
            if counts.get("tensors") and counts.get("elements"):
                yield _build(window.subject, event, change, counts)


def _build(group: Group, event: TrainingChanged, change: TrainingChange, counts: dict[str, int]) -> Finding:
    line, first = change.line, group.lead.step_at(change.begin_ns) or 0
    values: dict[str, Any] = {"step": first, "before_step": first - 1, "last_step": event.last_step}
    values |= {"tensors": counts["tensors"], "left": counts.get("left") or None}
    values |= {"place": line.place if line is not None else None, "line": line.text if line is not None else None}
    did = (text for name, text in _DID.items() if counts.get(name) == counts["tensors"])
    values["did"] = next(did, "made the first of them")
    is_exact = change.begin_ns == change.end_ns or first >= event.last_step
    kind = _KIND if is_exact else _BETWEEN
    return kind.at(group, change.begin_ns, event.unix_ns, {"elements": counts["elements"]}, **values)
