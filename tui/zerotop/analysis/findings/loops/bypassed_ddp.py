"""The model is called without the DistributedDataParallel that wraps it, as after ``model = model.module``.

Its hooks reduce gradients only after a forward of its own, so from then on each rank trains a model of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop_probe.recording.event_values import BYPASSED, NO_SYNC
from zerotop_probe.recording.events import ChangedSetting, TrainingChanged

_KIND = FindingKind(
    name="bypassed_ddp",
    confidence=0.95,
    headline="Gradients are not reduced since step {step}[ {earlier}]: model called without DDP",
    details=(
        "DistributedDataParallel was last seen in step {last_step}; it reduces gradients only after a call of its own."
        " Unless the script reduces them itself, each rank trains on its own data, and the weights of the ranks drift apart."
    ),
    advice="Call the wrapped model in training, and keep the module within it under another name.",
    fix="module = model.module  # model stays the DDP",
)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report it as the lead's probe has seen it: after some steps without DDP."""
    lead = window.subject.lead
    for event in window.items(lead.events_of(TrainingChanged)):
        for change in event.changes:
            if (change.name, change.after) == (NO_SYNC, BYPASSED) and len(window.subject.processes) > 1:
                yield _build(window.subject, event, change)


def _build(group: Group, event: TrainingChanged, change: ChangedSetting) -> Finding:
    offset_ns = group.lead.source.offset_ns
    first_ns, last_ns = ((time_ns or event.begin_ns) + offset_ns for time_ns in (change.changed_ns, change.begin_ns))
    step, last_step = group.lead.step_at(first_ns), group.lead.step_at(last_ns)
    # Otherwise the steps between these were only counted.
    is_exact = step is not None and last_step is not None and step <= last_step + 1
    values: dict[str, Any] = {"step": step, "last_step": last_step, "earlier": None if is_exact else "or earlier"}
    return _KIND.at(group, first_ns, event.unix_ns, {}, known_ns=event.unix_ns, **values)
