"""Events of a damaged or foreign recording: valid JSON with missing or wrongly typed facts."""

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
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.reports.recording_summary import build_overview
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

Facts = dict[str, Any]


def remove_fact(*path: Any) -> Callable[[Facts], None]:
    def remove_value(facts: Facts) -> None:
        del _find_container(facts, path)[path[-1]]

    return remove_value


def set_fact(value: Any, *path: Any) -> Callable[[Facts], None]:
    def set_value(facts: Facts) -> None:
        _find_container(facts, path)[path[-1]] = value

    return set_value


def _find_container(facts: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        facts = facts[name]
    return facts


INVALID = [
    (events.Node, remove_fact("gpus", 0, "index")),
    (events.Node, set_fact("first", "gpus", 0, "index")),
    (events.Node, set_fact("0", "gpus", 0, "index")),
    (events.Node, set_fact(None, "gpus", 0, "name")),
    (events.Node, set_fact([None], "gpus")),
    (events.Node, set_fact({"0": {}}, "gpus")),
    (events.Node, set_fact(10**30, "memory_bytes")),
    (events.Node, set_fact([["0-3"]], "numa")),
    (events.Node, set_fact([{"node": 0}], "numa")),
    (events.Hello, set_fact([1], "environment")),
    (events.Hello, set_fact({"OMP_NUM_THREADS": 4}, "environment")),
    (events.Hello, set_fact(math.nan, "arguments")),
    (events.Engine, set_fact({"ordinal": 0}, "devices")),
    (events.Engine, set_fact(["cuda:0"], "devices")),
    (events.Engine, set_fact("0", "devices", 0, "ordinal")),
    (events.Engine, set_fact([2], "zero_stage")),
    (events.Engine, set_fact(True, "parameters")),
    (events.Engine, set_fact(2.5, "world_size")),
    (events.Engine, set_fact({}, "model")),
    (events.Engine, set_fact("{}", "config")),
    (events.Tensors, set_fact([3], "device")),
    (events.Tensors, set_fact(["3"], "unclaimed_largest")),
    (events.Affinity, set_fact({"main": "0-3"}, "threads")),
    (events.RankFound, set_fact([], "rank")),
    (events.RankGone, set_fact({}, "pid")),
    (events.JobEnded, set_fact("0", "exit_code")),
]
INCOMPLETE = [
    (events.TotalSteps, remove_fact("steps")),
    (events.TotalSteps, set_fact("40", "steps")),
    (events.Microscope, set_fact(None, "request")),
    (events.Microscope, remove_fact("baseline")),
    (events.Microscope, set_fact({"requested_bytes": None}, "baseline")),
    (events.Microscope, set_fact(math.inf, "begin_ns")),
    (events.JobEnded, set_fact(10**30, "time_ns")),
]


def changed_once(kind: type[events.Event], change: Callable[[Facts], None]) -> Recording:
    """Return a recording in which the first event of that kind is changed."""
    pending = [None]

    def damage_event(event: Facts) -> Facts:
        if event.get("event") == kind.event_name and pending:
            change(event)
            pending.clear()
        return event

    return recordings.rewrite_events("gpu-microscope", damage_event)


@pytest.mark.parametrize(("kind", "change"), INVALID)
def test_invalid_fact_becomes_none_and_is_counted(kind: type[events.Event], change: Callable[[Facts], None]) -> None:
    recording, before = changed_once(kind, change), recordings.open_recording("gpu-microscope")
    assert recording.damaged_lines == 1
    first, whole = recording.events_of(kind)[0].facts, before.events_of(kind)[0].facts
    (differs,) = [fact for fact in whole if first[fact] != whole[fact]]
    assert first[differs] is None
    assert len(recording.events) == len(before.events)


@pytest.mark.parametrize(("kind", "change"), INCOMPLETE)
def test_event_without_required_fact_is_skipped(kind: type[events.Event], change: Callable[[Facts], None]) -> None:
    recording = changed_once(kind, change)
    assert recording.damaged_lines == 1
    assert len(recording.events_of(kind)) == len(recordings.open_recording("gpu-microscope").events_of(kind)) - 1


def test_missing_and_newer_facts_are_no_damage() -> None:
    def make_newer(event: Facts) -> Facts:
        missing = {"gpu_notice", "rank", "torch", "devices", "parameters", "exit_code"}
        rest = {fact: value for fact, value in event.items() if fact not in missing}
        return {**rest, **dict.fromkeys(missing & event.keys() - {"devices"}), "newer": [{"rank": "1"}]}

    before, recording = recordings.open_recording("gpu-microscope"), recordings.rewrite_events("gpu-microscope", make_newer)
    assert recording.damaged_lines == 0
    assert len(recording.events) == len(before.events)


@pytest.mark.parametrize("name", ["gpu-long", "held-restart", "x4-z3", "z2-fp16"])
def test_findings_need_no_process_of_an_event(name: str) -> None:
    def remove_process(line: Facts) -> Facts:
        return {fact: value for fact, value in line.items() if fact not in ("pid", "start")} if "event" in line else line

    recording = recordings.rewrite_events(name, remove_process)
    assert detect_findings(recording, recording.end_ns)


def test_file_of_invalid_writer_is_skipped() -> None:
    def rename_rank(line: Facts) -> Facts:
        return {**line, "writer": {**line["writer"], "rank": "first"}} if "writer" in line else line

    recording = recordings.rewrite_events("z2", rename_rank)
    assert recording.events == []
    assert recording.damaged_lines > 0


def test_commands_report_damaged_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.unpack_to_folder("z2", tmp_path)
    (path,) = folder.glob("events-node*")
    line, sentence = path.read_text().splitlines()[1], "1 damaged event line was skipped or read in part."
    with path.open("a") as file:
        file.write(json.dumps(json.loads(line) | {"pid": "1", "command": 5}) + "\n")
    for command in ("findings", "export"):
        assert main([command, str(folder)]) == 0
        assert capsys.readouterr().err == f"zerotop: {sentence}\n"
    assert main(["memory", str(folder)]) == 0
    assert sentence in capsys.readouterr().out
    assert RecordingSource(Recording.open(folder)).view_at(None).job.notices == (sentence,)
    with path.open("a") as file:
        file.write("{}\n")
    assert main(["findings", str(folder)]) == 0
    assert capsys.readouterr().err == "zerotop: 2 damaged event lines were skipped or read in part.\n"


# --- any damage ----------------------------------------------------------------------------------------------------------

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
def recording_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [recordings.unpack_to_folder(name, tmp_path_factory.mktemp("whole")) for name in _NAMES]


def list_paths(value: Any, depth: int = 0) -> list[tuple[Any, ...]]:
    """Return the path of every value in an event that can be replaced."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [(key, *rest) for key, part in parts for rest in ((), *(list_paths(part, depth + 1) if depth < 3 else ()))]


@settings(max_examples=40, phases=[Phase.generate])  # choices from lists need no shrinking
@given(data=st.data())
def test_no_value_in_an_event_breaks_a_command(recording_folders: list[Path], data: st.DataObject) -> None:
    folder = data.draw(st.sampled_from(recording_folders))
    lines = {
        (path, n): json.loads(line)
        for path in folder.glob("events-*")
        for n, line in enumerate(path.read_text().splitlines())
    }
    kinds = {facts.get("event", "header"): place for place, facts in reversed(lines.items())}
    path, number = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    facts = lines[path, number]
    # A recording of a newer format is refused on purpose.
    path_in_event = data.draw(st.sampled_from([keys for keys in list_paths(facts) if keys[0] != "zerotop"]))
    value = data.draw(st.sampled_from(_VALUES))
    (remove_fact(*path_in_event) if value is _ABSENT else set_fact(value, *path_in_event))(facts)
    before = path.read_text()
    damaged = before.splitlines()
    damaged[number] = json.dumps(facts)
    path.write_text("\n".join(damaged) + "\n")
    try:
        read_everything(folder)
    finally:
        path.write_text(before)


def read_everything(folder: Path) -> None:
    """Run commands and build views of a recording, without drawing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["memory", str(folder)]) == 0
        assert main(["findings", str(folder), "--json"]) == 0
        assert main(["microscope", str(folder)]) in (0, 1)
        for table in ("events", "steps"):
            assert main(["export", str(folder), "--table", table, "-o", os.devnull]) == 0
    source = RecordingSource(Recording.open(folder))
    for cursor in (None, source.begin_ns + 5_000_000_000):
        source.view_at(cursor)
    build_overview(source.recording)
