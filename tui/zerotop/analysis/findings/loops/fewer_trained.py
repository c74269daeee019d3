"""Far fewer parameters are trained than before, as where a stage of the training frees others than were meant."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.steps.training_changes import TrainingChange, list_changes
from zerotop_probe.recording.events import TrainingChanged

_KIND = FindingKind(
    name="fewer_trained",
    severity=Severity.INFO,
    confidence=0.8,
    headline="{after:,.0f} parameters are trained instead of {before:,.0f} {since}",
    details=(
        "All others have requires_grad set to False, so no gradient is computed for them.[ {line} set it.] If more of them"
        " were meant to be trained, see which ones that code chooses."
    ),
)
_SETTING = "trained_parameters"
# So many times fewer; models that are trained in turn, as in a GAN, change more often.
_TIMES_FEWER = 10


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report it if the number had never fallen before."""
    lead = window.subject.lead
    for event in window.items(lead.events_of(TrainingChanged)):
        fallen = [one for one in list_changes(lead.events_of(TrainingChanged), lead.source.offset_ns) if _is_fall(one)]
        for change in (one for one in fallen[:1] if one.known_ns == event.unix_ns):
            before, after = int(change.before), int(change.after)
            if 0 < after * _TIMES_FEWER <= before:
                yield _build(window.subject, change, before, after)


def _is_fall(change: TrainingChange) -> bool:
    return change.name == _SETTING and change.effect < 0 and change.before.isdecimal() and change.after.isdecimal()


def _build(group: Group, change: TrainingChange, before: int, after: int) -> Finding:
    last = group.lead.step_at(change.end_ns)
    since = f"since step {last}" if change.begin_ns == change.end_ns else f"by step {last}"
    line = change.line.text if change.line is not None else None
    return _KIND.at(
        group, change.begin_ns, change.known_ns, {"before": before, "after": after}, step=last, since=since, line=line
    )
