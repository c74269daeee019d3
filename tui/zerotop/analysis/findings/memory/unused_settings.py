"""Settings of the DeepSpeed config without effect: at another level than their own, misspelt, or of another ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.deepspeed_keys import find_unused_settings
from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop_probe.recording.events import Engine

_KIND = FindingKind(
    name="unused_settings",
    confidence=0.95,
    headline="{key}[ and {others:count other setting}] {verb} no effect",
    details="{reasons}",
    advice="Correct the DeepSpeed config.",
    fix="{setting_fix}",
)
_MOST_REASONS = 3


@in_each_attempt()
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report once for each attempt, when the first engine is there."""
    for event in window.items(window.subject.lead.events_of(Engine)[:1]):
        found = find_unused_settings(event.config, event.zero_keys) if event.config else []
        found.sort(key=lambda setting: not setting.matters)
        if not found:
            continue
        reasons = [f"{setting.key}: {setting.reason}." for setting in found[:_MOST_REASONS]]
        kind = _KIND if found[0].matters else _KIND.with_changes(severity=Severity.INFO, advice="", fix="")
        yield kind.at(
            window.subject,
            event.unix_ns,
            event.unix_ns,
            {"unused_settings": len(found)},
            key=found[0].key,
            others=len(found) - 1 or None,
            verb="has" if len(found) == 1 else "have",
            reasons=" ".join(reasons),
            setting_fix=found[0].fix,
        )
