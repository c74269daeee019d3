"""A model whose parameters are float64: often a default dtype that was left set, or weights made of NumPy's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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


@in_each_attempt(kinds=1)
def detect(window: SearchWindow[Group]) -> Iterator[Finding | None]:
    """Report it once, as soon as the model is known."""
    for event in window.items(window.subject.lead.events_of(Engine)):
        if event.dtype == "fp64":
            yield window.find_once(partial(_build, window.subject, event))


def _build(group: Group, event: Engine) -> Finding:
    return _KIND.at(group, event.unix_ns, event.unix_ns, {})
