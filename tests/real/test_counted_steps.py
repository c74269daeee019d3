"""Real loops whose steps are so short that most of them are only counted, at the default budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from loop_runs import LOOPS
from real_jobs import build_launch_command, run_recorded
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.inside import native
from zerotop_probe.recording.directory import NATIVE_VARIABLE
from zerotop_probe.recording.events import Hello, LateNoSync, Overflow, ProbeError
from zerotop_probe.recording.tables import UNKNOWN

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

_SLOW, _EVALUATED, _SAVED, _LATE_FROM = 130, 157, 179, 60
_SKIPPED = 120, 149


class ShortRun(NamedTuple):
    """A finished run: its steps by rank, its findings, and the moments around each update that the script noted."""

    recording: Recording
    steps: list[Any]
    findings: tuple[Finding, ...]
    moments: list[Any]


def _run_counted(folder: Path, environment: dict[str, str], command: list[str]) -> ShortRun:
    run = run_recorded(command, folder, environment)
    assert run.returncode == 0, run.output
    recording = Recording.open(run.recording)
    findings = detect_findings(recording, recording.end_ns)
    steps = read_rank_steps(recording)
    moments = [np.array(json.loads((folder / f"moments-rank{rank}.json").read_bytes())) for rank in range(len(steps))]
    return ShortRun(recording, steps, findings, moments)


@pytest.fixture(scope="module", params=["C", "Python"])
def environment(request: pytest.FixtureRequest, job_environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a job that counts steps with this code."""
    if request.param == "C" and native.counted_steps is None:
        pytest.skip("the C code was not compiled")
    return job_environment | {NATIVE_VARIABLE: "1" if request.param == "C" else "0"}


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> ShortRun:
    return _run_counted(tmp_path_factory.mktemp("clean"), environment, [sys.executable, str(LOOPS / "short.py")])


@pytest.fixture(scope="module")
def planted_run(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> ShortRun:
    """With a slow step, an evaluation after a step, and a checkpoint after another."""
    options = [f"--slow={_SLOW}", f"--evaluate={_EVALUATED}", f"--save={_SAVED}"]
    return _run_counted(tmp_path_factory.mktemp("planted"), environment, [sys.executable, str(LOOPS / "short.py"), *options])


@pytest.fixture(scope="module")
def scaled_run(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> ShortRun:
    """With a loss scaler that skips two updates, and two micro-steps in each step."""
    options = ["--overflow", *map(str, _SKIPPED)]
    return _run_counted(tmp_path_factory.mktemp("scaled"), environment, [sys.executable, str(LOOPS / "short.py"), *options])


@pytest.fixture(scope="module")
def late_run(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> ShortRun:
    """Two ranks, of which the second is late from a step on, with a no_sync() that begins after the forward."""
    options = [f"--late-from={_LATE_FROM}", "--steps=400", "--late-no-sync"]
    command = build_launch_command("torchrun", [str(LOOPS / "short.py"), *options])
    return _run_counted(tmp_path_factory.mktemp("late"), job_environment, command)


def test_counted_steps_have_exact_numbers_and_times(
    clean_run: ShortRun, planted_run: ShortRun, scaled_run: ShortRun, environment: dict[str, str]
) -> None:
    for run in (clean_run, planted_run, scaled_run):
        (steps,), moments = run.steps, run.moments[0]
        (hello,) = run.recording.events_of(Hello)
        assert hello.facts["native"] is (environment[NATIVE_VARIABLE] == "1")
        assert steps["step"].tolist() == list(range(200))
        assert steps["counted"].sum() > 100
        assert not steps["counted"][:5].any()
        ends_ns = steps["end_unix_ns"] - run.recording.sources["spans"][0].offset_ns
        assert (moments[:, 0] <= ends_ns).all()
        assert (ends_ns <= moments[:, 1]).all()
        seconds = steps["iteration_s"] + steps["eval_s"] + steps["checkpoint_s"]
        assert seconds[1:] == pytest.approx(np.diff(ends_ns) / 1e9)


def test_phases_and_sizes_of_counted_steps_are_unknown(clean_run: ShortRun) -> None:
    (steps,) = clean_run.steps
    counted, phased = steps[steps["counted"]], steps[~steps["counted"]]
    assert all(np.isnan(counted[f"{name}_s"]).all() for name in ("data", "forward", "backward", "step", "optimizer"))
    assert all((counted[name] == UNKNOWN).all() for name in ("micro_steps", "rows", "tokens"))
    assert set(phased["micro_steps"]) == {1}
    assert set(phased["rows"]) == {4}
    assert (phased["backward_s"] > 0).all()


@pytest.mark.alone  # other jobs on the cores may slow it down
def test_a_clean_loop_has_no_finding(clean_run: ShortRun) -> None:
    # The loop sleeps between its phases: that is the only thing to say about it.
    assert {finding.name for finding in clean_run.findings} <= {"time_between_phases"}


def test_a_slow_step_an_evaluation_and_a_checkpoint_are_found_at_their_steps(planted_run: ShortRun) -> None:
    (steps,) = planted_run.steps
    assert int(steps["iteration_s"].argmax()) == _SLOW
    assert steps["iteration_s"][_SLOW] > 0.5
    assert np.flatnonzero(steps["eval_s"] > 0).tolist() == [_EVALUATED + 1]
    assert 0.03 < steps["eval_s"][_EVALUATED + 1] < 0.5
    assert np.flatnonzero(steps["checkpoint_s"] > 0).tolist() == [_SAVED + 1]
    (pause,) = [finding for finding in planted_run.findings if finding.name == "checkpoint_pause"]
    assert pause.step == _SAVED
    # Others on the cores may slow it down for a while.
    told = {"time_between_phases", "checkpoint_pause", "iteration_shift", "cores_taken"}
    assert {finding.name for finding in planted_run.findings} <= told


def test_skipped_updates_and_micro_steps(scaled_run: ShortRun) -> None:
    (steps,) = scaled_run.steps
    assert np.flatnonzero(steps["skipped"]).tolist() == [*_SKIPPED]
    overflows = [event.facts for event in scaled_run.recording.events_of(Overflow)]
    assert [(one["step"], one["loss_scale_before"], one["loss_scale_after"]) for one in overflows] == [
        (_SKIPPED[0], 2.0**16, 2.0**15),
        (_SKIPPED[1], 2.0**15, 2.0**14),
    ]
    assert set(steps["micro_steps"][~steps["counted"]]) == {2}


@pytest.mark.alone  # longer steps are recorded in full
def test_a_straggler_is_found(late_run: ShortRun) -> None:
    assert all(steps["counted"].any() for steps in late_run.steps)  # how many depends on what they cost here
    (straggler,) = [finding for finding in late_run.findings if finding.name == "straggler"]
    assert straggler.ranks == (1,)
    # Where others use the cores a step before may be as late.
    assert _LATE_FROM - 3 <= (straggler.step or 0) < _LATE_FROM + 32
    assert straggler.evidence["late_s"] == pytest.approx(0.03, rel=0.5)


def test_no_sync_after_the_forward_is_found_at_its_line(late_run: ShortRun) -> None:
    (late,) = [finding for finding in late_run.findings if finding.name == "late_no_sync"]
    (line,) = [
        number
        for number, text in enumerate((LOOPS / "short.py").read_text().splitlines(), 1)
        if text.endswith("model.no_sync():")
    ]
    assert late.headline == f"no_sync() has no effect: it begins after the forward: short.py:{line}"
    assert late.evidence["micro_steps"] == 2
    assert {event.micro_steps for event in late_run.recording.events_of(LateNoSync)} == {2}


def test_odd_loops_train_as_if_alone_and_lose_no_step(tmp_path: Path, environment: dict[str, str]) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    command = [sys.executable, str(LOOPS / "odd_steps.py")]
    subprocess.run(command, cwd=alone, env=environment, check=True, timeout=300)
    run = run_recorded(command, tmp_path, environment)
    assert run.returncode == 0, run.output
    facts, facts_alone = (json.loads((folder / "odd-steps.json").read_bytes()) for folder in (tmp_path, alone))
    assert facts == facts_alone
    recording = Recording.open(run.recording)
    assert not recording.events_of(ProbeError)
    steps = max(read_rank_steps(recording), key=len)  # the forked child has few
    assert steps["step"].tolist() == list(range(facts["updates"]))
    assert steps["counted"].sum() > 100
