"""DDP's no_sync() is only around the backward, so that gradients are reduced after each micro-step all the same."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.code_line import read_line
from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop_probe.recording.events import LateNoSync

_KIND = FindingKind(
    name="late_no_sync",
    confidence=0.95,
    headline="no_sync() has no effect: it begins after the forward[: {place}]",
    details=(
        "DistributedDataParallel decides in its forward whether the next backward reduces gradients. Here no_sync()"
        " begins between the two: gradients are reduced after each of the {micro_steps:count micro-step} of a step instead"
        " of once."
    ),
    advice="In all micro-steps but the last one, call the model within no_sync(), too, not only backward().",
    fix="with model.no_sync():  # around the forward, too",
)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report what the lead's probe saw, where there are other ranks to reduce with."""
    group = window.subject
    for event in window.items(group.lead.events_of(LateNoSync)):
        if len(group.processes) > 1 and event.micro_steps > 1:
            line = read_line(event)
            place, numbers = line.place if line is not None else None, {"micro_steps": event.micro_steps}
            yield _KIND.at(group, event.unix_ns, event.unix_ns, numbers, step=event.step, place=place)
