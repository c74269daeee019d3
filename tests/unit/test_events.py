"""The declared events: what the probe writes and what readers ask for agree with them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import recordings
from declared_events import check_event
from zerotop.session.packed.packing import unpack_files
from zerotop_probe.recording import events
from zerotop_probe.recording.events import EVENTS

_READERS = {"events_named", "process_events", "read_events", "_read_events"}


def find_calls(folder: Path) -> Iterator[ast.Call]:
    """Every call in the Python files of a folder."""
    for path in folder.rglob("*.py"):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_constants_are_the_declared_names() -> None:
    constants = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}
    assert constants == EVENTS.keys()


def test_field_names_are_unique() -> None:
    for fields in EVENTS.values():
        names = [field.name for field in fields]
        assert len(names) == len(set(names))
        assert not {"time_ns", "event"} & set(names)


@pytest.mark.parametrize("name", recordings.list_recordings())
def test_recorded_events_match_their_declarations(name: str) -> None:
    for file, content in unpack_files(recordings.find_packed_file(name)).items():
        if file.endswith(".jsonl"):
            for line in content.splitlines()[1:]:
                check_event(json.loads(line))


def test_writers_use_declared_fields(checkout_root: Path) -> None:
    checked = set()
    for call in find_calls(checkout_root / "probe"):
        # Also both of ``events.PARTED if joined else events.JOB_ENDED``.
        constants = [
            node.attr
            for argument in call.args
            for node in ast.walk(argument)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "events"
        ]
        for constant in constants:
            name = getattr(events, constant)
            written = {keyword.arg for keyword in call.keywords if keyword.arg}
            assert written <= {field.name for field in EVENTS[name]}, f"{constant} in line {call.lineno}"
            checked.add(name)
    assert checked == EVENTS.keys()


def test_readers_ask_for_declared_events(checkout_root: Path) -> None:
    for call in find_calls(checkout_root / "tui"):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in _READERS:
            literals = {arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
            assert literals <= EVENTS.keys(), f"line {call.lineno}"
