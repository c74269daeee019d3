"""A model whose parameters are float64: often a default dtype that was left set, or weights made of NumPy's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop_probe.recording.events import Engine

_KIND = FindingKind(
    name="double_precision",
    severity=Severity.INFO,
    confidence=0.95,
    headline="The model trains in float64, which takes twice the memory of float32",
    details=(
        "Most of its parameters have 8 bytes each, and so have gradients, the optimizer's state and activations unless the"
        " script casts them. Arithmetic takes twice the time or more on CPUs and most GPUs."
    ),
    advice=(
        "If this is not meant, set the default dtype back before the model is made, and convert what NumPy made, whose"
        " numbers are float64."
    ),
    fix="torch.set_default_dtype(torch.float32)",
)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report it once, as soon as the model is known."""
    for event in window.items(window.subject.lead.events_of(Engine)):
        if event.dtype == "fp64" and not window.count_reports(_KIND):
            yield _KIND.at(window.subject, event.unix_ns, event.unix_ns, {})
