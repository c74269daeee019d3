"""The line that allocates most of an evaluation's memory, if the evaluation needs more than training does."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.memory.looks import find_growth, read_looks
from zerotop.analysis.memory.block_lines import Look
from zerotop_probe.recording.event_values import EVALUATION

_KIND = FindingKind(
    name="evaluation_peak",
    severity=Severity.INFO,
    confidence=0.9,
    headline="{line_bytes:bytes} of the evaluation's peak are allocated at {place}",
    details="At its peak the evaluation before step {step} held {peak_bytes:bytes}, {line_bytes:bytes} of them from {line}.",
    advice="{eval_outputs}",
    fix="{eval_outputs_fix}",
)


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt: the lead's first look at an evaluation that names a line."""
    for look in read_looks(window.subject.lead, EVALUATION):
        growth = find_growth(look, None)
        if growth is not None:
            yield _build_finding(window.subject, look, growth.line.place, growth.line.text, growth.grown_bytes)


def _build_finding(group: Group, look: Look, place: str, line: str, line_bytes: int) -> Finding:
    kind = _KIND if group.is_memory_short(look.known_ns) else _KIND.with_changes(advice="", fix="")
    evidence = {"peak_bytes": look.whole_bytes, "line_bytes": line_bytes}
    return kind.at(
        group,
        look.begin_ns,
        look.end_ns,
        evidence,
        known_ns=look.known_ns,
        step=look.first_step,
        place=place,
        line=line,
    )
