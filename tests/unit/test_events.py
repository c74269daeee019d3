"""The declared events: what the probe writes and what readers ask for agree with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotop_probe.recording import events
from zerotop_probe.recording.event_base import EVENTS, Event, read_fields
from zerotop_probe.recording.writer import Identity


def find_calls(folder: Path) -> Iterator[ast.Call]:
    """Every call in the Python files of a folder."""
    for path in folder.rglob("*.py"):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_all_classes_of_events_are_declared_by_name() -> None:
    classes = [value for value in vars(events).values() if isinstance(value, type) and issubclass(value, Event)]
    assert {one for one in classes if not one.__name__.endswith("Event")} == set(EVENTS.values())
    assert events.OutOfMemory.event_name == "out_of_memory"
    assert EVENTS["out_of_memory"] is events.OutOfMemory


def test_fields_are_not_hidden_by_those_of_every_event() -> None:
    for event in EVENTS.values():
        assert not {"time_ns", "event", "facts", "unix_ns", "writer", "event_name"} & read_fields(event).keys()


def test_each_field_says_what_it_means() -> None:
    text = Path(events.__file__).read_text()
    lines = text.splitlines()
    for field in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AnnAssign)):
        assert "  # " in lines[field.lineno - 1] or lines[field.lineno - 2].startswith("    # "), lines[field.lineno - 1]


def test_facts_are_converted_and_cannot_change() -> None:
    facts = {"pid": 7, "threads": {"8": "0-3"}, "unknown": 1}
    affinity = events.Affinity(facts, 5, Identity("node", -1, "node1", 3, 4, "boot"))
    assert (affinity.pid, affinity.cpus, affinity.threads, affinity.facts) == (7, None, {8: "0-3"}, facts)
    with pytest.raises(AttributeError):
        affinity.unknown  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        affinity.pid = 8
    stacks = events.RankStacks({"stacks": [{"frames": [1], "count": 2}]}, 5, affinity.writer)
    assert [(stack.frames, stack.count, stack.thread) for stack in stacks.stacks] == [([1], 2, None)]


def test_writers_use_declared_fields(checkout_root: Path) -> None:
    checked = set()
    for call in [*find_calls(checkout_root / "probe"), *find_calls(checkout_root / "tui" / "zerotop" / "commands")]:
        # Also both of ``events.Parted if joined else events.JobEnded``.
        constants = [
            node.attr
            for argument in call.args
            for node in ast.walk(argument)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "events"
            if isinstance(getattr(events, node.attr), type)
        ]
        for constant in constants:
            event = getattr(events, constant)
            written = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert written <= read_fields(event).keys(), f"{constant} in line {call.lineno}"
            checked.add(event)
    assert checked == set(EVENTS.values())
