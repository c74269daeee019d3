"""Check events against their declarations in :mod:`zerotop_probe.recording.events`."""

from __future__ import annotations

from typing import Any

from zerotop.recording.events.event_schema import drop_invalid_facts
from zerotop_probe.recording import events  # noqa: F401  # declares them
from zerotop_probe.recording.event_base import EVENTS, read_fields


def check_event(event: dict[str, Any]) -> None:
    """Fail unless an event's line has declared fields only, each of its declared type."""
    facts = {name: value for name, value in event.items() if name not in ("time_ns", "event")}
    name = event["event"]
    declared = EVENTS[name]
    undeclared = facts.keys() - {key for key, _, _ in read_fields(declared).values()}
    assert not undeclared, f"{name} has undeclared fields: {undeclared}"
    assert not drop_invalid_facts(declared, facts), f"{name} has fields of other types than declared: {event}"
