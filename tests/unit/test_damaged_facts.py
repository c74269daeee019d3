"""Events of a damaged or foreign recording: JSON, and yet not what who reads them may rely on."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import recordings
from zerotop.analysis.reports.recording_summary import build_overview
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.session.event_schema import FACT_SHAPES
from zerotop.session.reader import Session
from zerotop_probe.recording import events

Facts = dict[str, Any]


def without(*path: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        del _within(facts, path)[path[-1]]

    return change


def with_(value: Any, *path: Any) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        _within(facts, path)[path[-1]] = value

    return change


def _within(facts: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        facts = facts[name]
    return facts


NOT_KNOWN = [
    (events.NODE, without("gpus", 0, "index")),
    (events.NODE, with_("first", "gpus", 0, "index")),
    (events.NODE, with_("0", "gpus", 0, "index")),
    (events.NODE, with_(None, "gpus", 0, "name")),
    (events.NODE, with_([None], "gpus")),
    (events.NODE, with_({"0": {}}, "gpus")),
    (events.NODE, with_(10**30, "memory_bytes")),
    (events.NODE, with_([["0-3"]], "numa")),
    (events.NODE, with_([{"node": 0}], "numa")),
    (events.HELLO, with_([1], "environment")),
    (events.HELLO, with_({"OMP_NUM_THREADS": 4}, "environment")),
    (events.HELLO, with_(math.nan, "arguments")),
    (events.ENGINE, with_({"ordinal": 0}, "devices")),
    (events.ENGINE, with_(["cuda:0"], "devices")),
    (events.ENGINE, with_("0", "devices", 0, "ordinal")),
    (events.ENGINE, with_([2], "zero_stage")),
    (events.ENGINE, with_(True, "parameters")),
    (events.ENGINE, with_(2.5, "world_size")),
    (events.ENGINE, with_({}, "model")),
    (events.ENGINE, with_("{}", "config")),
    (events.TENSORS, with_([3], "device")),
    (events.TENSORS, with_(["3"], "unclaimed_largest")),
    (events.AFFINITY, with_({"main": "0-3"}, "threads")),
    (events.RANK_FOUND, with_([], "rank")),
    (events.RANK_GONE, with_({}, "pid")),
    (events.JOB_ENDED, with_("0", "exit_code")),
]
SAYS_NOTHING = [
    (events.TOTAL_STEPS, without("steps")),
    (events.TOTAL_STEPS, with_("40", "steps")),
    (events.MICROSCOPE, with_(None, "request")),
    (events.MICROSCOPE, without("baseline")),
    (events.MICROSCOPE, with_({"requested_bytes": None}, "baseline")),
    (events.MICROSCOPE, with_(math.inf, "begin_ns")),
    (events.JOB_ENDED, with_(10**30, "time_ns")),
]


def changed_once(name: str, change: Callable[[Facts], None]) -> Session:
    """A recording whose first event of that name was damaged so."""
    left = [None]

    def damage(event: Facts) -> Facts:
        if event.get("event") == name and left:
            change(event)
            left.clear()
        return event

    return recordings.rewritten("gpu-microscope", damage)


@pytest.mark.parametrize(("name", "change"), NOT_KNOWN)
def test_a_fact_that_makes_no_sense_is_counted_and_not_known(name: str, change: Callable[[Facts], None]) -> None:
    session, before = changed_once(name, change), recordings.recording("gpu-microscope")
    assert session.damaged_lines == 1
    first, whole = session.events_named(name)[0].facts, before.events_named(name)[0].facts
    (differs,) = [fact for fact in whole if first[fact] != whole[fact]]
    assert first[differs] is None
    assert len(session.events) == len(before.events)


@pytest.mark.parametrize(("name", "change"), SAYS_NOTHING)
def test_an_event_that_says_nothing_without_it_is_passed_over(name: str, change: Callable[[Facts], None]) -> None:
    session = changed_once(name, change)
    assert session.damaged_lines == 1
    assert len(session.events_named(name)) == len(recordings.recording("gpu-microscope").events_named(name)) - 1


def test_it_is_written_down_what_all_events_must_hold() -> None:
    names = {value for name, value in vars(events).items() if name.isupper()}
    assert names - FACT_SHAPES.keys() == {events.ENTERED, events.DETACHED}  # which hold nothing


def test_what_is_not_known_is_no_damage() -> None:
    def newer(event: Facts) -> Facts:
        gone = {"gpu_notice", "rank", "torch", "devices", "parameters", "exit_code"}
        known = {fact: value for fact, value in event.items() if fact not in gone}
        return {**known, **dict.fromkeys(gone & event.keys() - {"devices"}), "of_tomorrow": [{"rank": "1"}]}

    before, session = recordings.recording("gpu-microscope"), recordings.rewritten("gpu-microscope", newer)
    assert session.damaged_lines == 0
    assert len(session.events) == len(before.events)


def test_a_writer_who_is_none_has_written_nothing() -> None:
    def foreign(line: Facts) -> Facts:
        return {**line, "writer": {**line["writer"], "rank": "first"}} if "writer" in line else line

    session = recordings.rewritten("z2", foreign)
    assert session.events == []
    assert session.damaged_lines > 0


def test_how_much_was_passed_over_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.as_directory("z2", tmp_path)
    (path,) = folder.glob("events-node*")
    line, sentence = path.read_text().splitlines()[1], "1 damaged event line was skipped or read in part."
    with path.open("a") as file:
        file.write(json.dumps(json.loads(line) | {"pid": "1", "command": 5}) + "\n")
    for command in ("annotations", "export"):
        assert main([command, str(folder)]) == 0
        assert capsys.readouterr().err == f"zerotop: {sentence}\n"
    assert main(["memory", str(folder)]) == 0
    assert sentence in capsys.readouterr().out
    assert RecordingSource(Session.open(folder)).view_at(None).job.notices == (sentence,)
    with path.open("a") as file:
        file.write("{}\n")
    assert main(["annotations", str(folder)]) == 0
    assert capsys.readouterr().err == "zerotop: 2 damaged event lines were skipped or read in part.\n"


# --- whatever is wrong with them ------------------------------------------------------------------------------------------

_ABSENT = object()
_VALUES: tuple[Any, ...] = (
    _ABSENT,
    None,
    True,
    -5,
    2**62,
    10**30,
    2.5,
    math.nan,
    "",
    "7",
    "x\x1b[2J",
    [],
    [1],
    [{"a": None}],
    {},
    {"a": 1},
)
_NAMES = ("gpu-microscope", "x4-attached", "z2-oom")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [recordings.as_directory(name, tmp_path_factory.mktemp("whole")) for name in _NAMES]


def places(value: Any, depth: int = 0) -> list[tuple[Any, ...]]:
    """All that can be replaced in an event, by the way there."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [(key, *rest) for key, part in parts for rest in ((), *(places(part, depth + 1) if depth < 3 else ()))]


@settings(max_examples=40, phases=[Phase.generate])  # what is chosen from lists need not be made smaller
@given(data=st.data())
def test_nothing_in_an_event_ends_a_command(folders: list[Path], data: st.DataObject) -> None:
    folder = data.draw(st.sampled_from(folders))
    lines = {
        (path, n): json.loads(line)
        for path in folder.glob("events-*")
        for n, line in enumerate(path.read_text().splitlines())
    }
    kinds = {facts.get("event", "header"): place for place, facts in reversed(lines.items())}
    path, number = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    facts = lines[path, number]
    # A recording of a newer format is refused, and told to be one.
    way = data.draw(st.sampled_from([way for way in places(facts) if way[0] != "zerotop"]))
    value = data.draw(st.sampled_from(_VALUES))
    (without(*way) if value is _ABSENT else with_(value, *way))(facts)
    before = path.read_text()
    told = before.splitlines()
    told[number] = json.dumps(facts)
    path.write_text("\n".join(told) + "\n")
    try:
        look(folder)
    finally:
        path.write_text(before)


def look(folder: Path) -> None:
    """What commands and screens do with a recording, short of drawing it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["memory", str(folder)]) == 0
        assert main(["annotations", str(folder), "--json"]) == 0
        assert main(["microscope", str(folder)]) in (0, 1)
        for table in ("events", "steps"):
            assert main(["export", str(folder), "--table", table, "-o", os.devnull]) == 0
    source = RecordingSource(Session.open(folder))
    for cursor in (None, source.begin_ns + 5_000_000_000):
        source.view_at(cursor)
    build_overview(source.session)
