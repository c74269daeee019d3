"""The steps whose memory and times stand for a recorded setting are of one moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recordings import FOLDER, open_recording
from zerotop.analysis.sweeps.baseline import Baseline, read_baseline
from zerotop.analysis.sweeps.recorded_moments import choose_steps, list_steady_steps
from zerotop.analysis.sweeps.what_if_time import predict_time
from zerotop.analysis.sweeps.what_if_verdict import describe_baseline
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_dtype import STEP_DTYPE


def read(name: str) -> Baseline:
    return read_baseline(Recording.open(FOLDER / f"{name}.zerotop"))


def make_steps(seconds: list[float], full: list[int], peaks: list[int] | None = None) -> Any:
    """Return a rank with a step for each time; those of ``full`` have phases."""
    rows = np.zeros(len(seconds), STEP_DTYPE)
    rows["step"] = np.arange(len(rows))
    rows["steps"] = rows["micro_steps"] = 1
    rows["iteration_s"] = seconds
    rows["allocated_peak_bytes"] = 100 if peaks is None else peaks
    return SimpleNamespace(step_rows=rows, phased_steps=rows[full])


@pytest.mark.parametrize(
    ("name", "seconds", "change"),
    [("gpu-counted-data", 0.151, 26), ("gpu-counted-pause", 0.144, 24), ("hand-fp32", 0.088, 100), ("gpu-slow", 0.082, 20)],
)
def test_time_and_memory_are_from_after_the_change_of_pace(name: str, seconds: float, change: int) -> None:
    base = read(name)
    assert base.times is not None
    assert base.steps is not None
    assert base.times.iteration == pytest.approx(seconds, rel=0.03)
    assert base.pace_change == change <= base.steps[0]
    assert f"after the median step changed at step {change}" in describe_baseline(base)


def test_pauses_are_no_part_of_the_time_and_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    base = read("hand-rank0")
    assert base.mean_s == pytest.approx(0.121, rel=0.02)
    assert main(["what-if", str(FOLDER / "hand-rank0.zerotop")]) == 0
    assert "With longer ones and pauses, steps took 121 ms on average in the recording." in capsys.readouterr().out
    assert main(["what-if", str(FOLDER / "z2.zerotop")]) == 0
    assert "on average" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpu-counted-cores", "outside-blocks"])
def test_the_time_of_a_step_is_that_of_the_run_where_few_steps_have_phases(name: str) -> None:
    recording, base = open_recording(name), read(name)
    assert base.times is not None
    steps = RecordingSource(recording).job_steps
    later = steps[(steps["step"] >= (base.pace_change or 0)) & (steps["steps"] == 1)]
    assert base.times.iteration == pytest.approx(float(np.nanmedian(later["iteration_s"])), rel=0.01)
    time = predict_time(base, base.setup, base.work, base.nodes)
    assert time.seconds == pytest.approx([base.times.iteration] * 3, rel=0.02)


def test_memory_that_grows_is_that_of_its_last_step() -> None:
    base = read("gpu-lines-leak")
    assert base.steps == (549, 549)
    assert base.timed_steps is not None
    assert base.timed_steps[0] < 549
    assert "memory of step 549, times of steps" in describe_baseline(base)


def test_both_are_from_before_if_no_later_step_has_phases() -> None:
    process = make_steps([0.1] * 60 + [0.3] * 60, list(range(40)))
    stretches = list_steady_steps(process.step_rows)
    assert [one.begin for one in stretches] == [0, 60]
    chosen = choose_steps(process, stretches, None)
    assert list(chosen.rows["step"]) == list(chosen.timed["step"]) == list(range(32, 40))
    assert chosen.pace_change == 60


def test_a_step_slower_than_those_around_it_tells_no_time() -> None:
    process = make_steps([0.1] * 60 + [0.3] * 30 + [0.9] + [0.3] * 29, [*range(40), 90])
    chosen = choose_steps(process, list_steady_steps(process.step_rows), None)
    assert (list(chosen.rows["step"]), list(chosen.timed["step"])) == ([90], [])


def test_a_small_change_of_pace_is_none() -> None:
    process = make_steps([0.1] * 60 + [0.11] * 60, list(range(120)))
    assert len(list_steady_steps(process.step_rows)) == 1


def test_a_change_that_does_not_last_is_not_told() -> None:
    """The first steps of another pace, that tell it, take longer than those after them."""
    process = make_steps([0.1] * 29 + [0.13] * 6 + [0.11] * 60, list(range(95)))
    stretches = list_steady_steps(process.step_rows)
    assert [one.begin for one in stretches] == [0, 29]
    assert choose_steps(process, stretches, None).pace_change is None
