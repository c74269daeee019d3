"""Two ranks with several engines that train in turn, and with one that only looks."""

from __future__ import annotations

import json

import pytest

from loop_runs import LOOPS, Counted
from real_jobs import build_launch_command, make_environment, run_recorded
from zerotop.analysis.reports.memory import read_report
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.commands.common.memory_text import format_report
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import BOUNDARY, EVAL

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

BOTH = pytest.mark.parametrize("number", [0, 1])
PARAMETERS = 2 * (1024 * 1024 + 1024)


def record_odd_job(factory: pytest.TempPathFactory, *options: str) -> Counted:
    command = build_launch_command("bare", [str(LOOPS / "odd.py"), *options])
    done = run_recorded(command, factory.mktemp("odd"), make_environment())
    assert done.returncode == 0, done.output
    lines = [json.loads(line[8:]) for line in done.output.splitlines() if line.startswith("COUNTED ")]
    return Counted(done.recording, done.output, {line["rank"]: line for line in lines})


@pytest.fixture(scope="module")
def several_engines(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return record_odd_job(tmp_path_factory, "--engines", "2", "--stage", "1")


@pytest.fixture(scope="module")
def without_optimizer(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return record_odd_job(tmp_path_factory, "--no-optimizer")


@BOTH
def test_engines_that_train_in_turn(several_engines: Counted, number: int) -> None:
    rank, own = several_engines.read_rank(number)
    assert own["steps"] == [4, 4]
    steps = rank.select_phases("step")
    assert steps[["engine", "step"]].tolist() == [(engine, step) for step in range(4) for engine in range(2)]
    assert (steps["flags"] & BOUNDARY == BOUNDARY).all()
    inventories = [(event["engine"], event["when"]) for event in rank.find_events("tensors")]
    moments = ("after_update", "before_forward", "before_update", "init")
    assert sorted(inventories) == [(e, when) for e in (0, 1) for when in moments]
    assert not rank.find_events("probe_error")


def test_their_memory_is_shown_together(several_engines: Counted) -> None:
    recording = Recording.open(several_engines.recording)
    view = read_memory_view(recording.at(recording.last_written_ns), 1)
    parts = {line.key: line for line in view.host_lines}
    assert parts["master_weights"].expected_bytes == 2 * 4 * PARAMETERS // 2
    assert parts["optimizer_state"].expected_bytes == 2 * 8 * PARAMETERS // 2
    assert parts["optimizer_state"].now_bytes == pytest.approx(2 * 8 * PARAMETERS // 2, rel=0.01)
    report = read_report(recording)
    assert report is not None
    assert "each rank has 2 engines" in format_report(report)[0]


@BOTH
def test_an_engine_without_optimizer(without_optimizer: Counted, number: int) -> None:
    rank, own = without_optimizer.read_rank(number)
    assert own["steps"] == [0]
    (engine,) = rank.find_events("engine")
    assert (engine["optimizer"], engine["trainable_parameters"]) == ("", PARAMETERS)
    assert [event["when"] for event in rank.find_events("tensors")] == ["init", "before_forward"]
    forwards = rank.select_phases("forward")
    assert (len(forwards), set(forwards["flags"])) == (4, {EVAL})
    assert not len(rank.select_phases("step", "backward"))
    assert not rank.find_events("probe_error")


def test_memory_of_an_engine_without_an_optimizer(without_optimizer: Counted) -> None:
    recording = Recording.open(without_optimizer.recording)
    view = read_memory_view(recording.at(recording.last_written_ns))
    assert view.setup is not None
    assert not view.setup.trains
    parts = {line.key: line for line in view.host_lines}
    assert parts["parameters"].expected_bytes == 4 * PARAMETERS
    assert not any(line.expected_bytes for key, line in parts.items() if key != "parameters")
