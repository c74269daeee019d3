"""The line that allocates most of an evaluation's memory, if the evaluation needs more than training does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.links import Kinds, is_simultaneous
from zerotop.analysis.findings.support.memory.looks import find_growth, read_looks
from zerotop_probe.recording.event_values import EVALUATION

_KIND = FindingKind(
    name="evaluation_peak",
    severity=Severity.INFO,
    confidence=0.9,
    headline="{line_bytes:bytes} of the evaluation's peak are allocated at {place}",
    details="At its peak the evaluation before step {step} held {peak_bytes:bytes}, {line_bytes:bytes} of them from {line}.",
    advice="{eval_outputs}",
    fix="{eval_outputs_fix}",
    explained_by=(Kinds(is_simultaneous, "unused_graphs"),),
)


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt: the lead's first look at an evaluation that names a line."""
    for look in read_looks(window.subject.lead, EVALUATION):
        growth = find_growth(look, None)
        if growth is not None:
            sizes = {"peak_bytes": look.whole_bytes, "line_bytes": growth.grown_bytes}
            values: dict[str, Any] = {"step": look.first_step, "place": growth.line.place, "line": growth.line.text}
            kind = window.subject.keep_saving_advice(_KIND, look.known_ns)
            yield kind.at(window.subject, look.begin_ns, look.end_ns, sizes, known_ns=look.known_ns, **values)
