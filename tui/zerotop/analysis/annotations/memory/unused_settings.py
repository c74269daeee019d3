"""Settings of the DeepSpeed config without effect: at another level than their own, misspelt, or of another ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.analysis.deepspeed_keys import find_unused_settings
from zerotop_probe.recording.events import Engine

_KIND = FindingKind(
    name="unused_settings",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="{key}[ and {others:count other setting}] {verb} no effect",
    details="{reasons}",
    advice="Correct the DeepSpeed config.",
    fix="{setting_fix}",
)
_MOST_REASONS = 3


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report once for each attempt, when the first engine is there."""
    for group in recording.groups:
        for event in group.lead.events_of(Engine)[:1]:
            config = event.config
            if _KIND.name in group.reported or not isinstance(config, dict) or not config:
                continue
            group.reported.add(_KIND.name)
            zero_keys = event.zero_keys
            found = find_unused_settings(config, zero_keys if isinstance(zero_keys, list) else None)
            found.sort(key=lambda setting: not setting.matters)
            if not found:
                continue
            reasons = [f"{setting.key}: {setting.reason}." for setting in found[:_MOST_REASONS]]
            kind = _KIND if found[0].matters else _KIND.with_changes(severity=Severity.INFO, advice="", fix="")
            yield kind.at(
                group,
                event.unix_ns,
                event.unix_ns,
                {"unused_settings": len(found)},
                key=found[0].key,
                others=len(found) - 1 or None,
                verb="has" if len(found) == 1 else "have",
                reasons=" ".join(reasons),
                setting_fix=found[0].fix,
            )
