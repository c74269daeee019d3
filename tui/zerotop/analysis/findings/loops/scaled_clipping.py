"""Gradients are clipped while they are still multiplied by the loss scale, so that nearly nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.code_line import read_line
from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop_probe.recording.events import ScaledClipping

_KIND = FindingKind(
    name="scaled_clipping",
    confidence=0.95,
    headline="Gradients are clipped before they are unscaled[: {place}]",
    details=(
        "In each of {updates:count update}, clip_grad_norm_ limited a norm to {max_norm:,.4g} while GradScaler had"
        " multiplied the gradients by {loss_scale:,.0f}: it is at most {left:.2g} once they are unscaled. With SGD, weights"
        " hardly move then."
    ),
    advice="Call scaler.unscale_(optimizer) after backward, before the gradients are clipped.",
    fix="scaler.unscale_(optimizer)",
)


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report what the lead's probe saw."""
    group = window.subject
    for event in window.items(group.lead.events_of(ScaledClipping)):
        if not event.loss_scale > event.max_norm > 0:
            continue
        line = read_line(event)
        numbers = {"updates": event.updates, "max_norm": event.max_norm, "loss_scale": event.loss_scale}
        place = line.place if line is not None else None
        left = event.max_norm / event.loss_scale
        yield _KIND.at(group, event.unix_ns, event.unix_ns, numbers, step=event.step, place=place, left=left)
