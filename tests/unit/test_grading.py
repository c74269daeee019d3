"""Predictions beside what was measured: ``zerotop run --expect`` and ``zerotop estimate --grade``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recordings import FOLDER, unpack_to_folder
from zerotop.analysis.sweeps.baseline import read_baseline
from zerotop.analysis.sweeps.grading import describe_errors, grade_formulas, grade_kept, parse_expectation
from zerotop.analysis.sweeps.measurement import measure_point
from zerotop.cli import main
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.expectation import ask_expectation
from zerotop.commands.sweeping import point_job
from zerotop.recording.reader import Recording
from zerotop.recording.sweeps import Plan, Point, Value

Z2 = str(FOLDER / "z2.zerotop")


def grade(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["estimate", *words, "--grade", "--json"]) == 0
    grades: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return grades


def keep(folder: Path, expected: object) -> Path:
    """Write what was expected into a recording's recording file."""
    path = folder / "session.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"expected": expected}))
    return folder


def test_saved_predictions_are_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run with offload, expected from the one without."""
    expected = ask_expectation(f"what-if {Z2} --offload optimizer")
    assert expected["question"].startswith("what-if ")
    folder = keep(unpack_to_folder("z2-offload", tmp_path), expected)
    (kept,) = [one for one in grade(capsys, str(folder)) if one["source"] == "kept"]
    base = read_baseline(Recording.open(folder))
    (_, likely, _), truth = kept["figures"]["allocated"]
    assert truth == base.peak
    assert likely == pytest.approx(truth, rel=0.05)
    assert likely != truth
    assert set(kept["figures"]) == {"allocated", "reserved", "NVML", "host", "time"}
    assert main(["estimate", str(folder), "--grade"]) == 0
    assert "run --expect" in capsys.readouterr().out


def test_a_point_of_a_sweep_has_both(tmp_path: Path) -> None:
    expected = ask_expectation(f"what-if {Z2} --offload optimizer")
    folder = keep(unpack_to_folder("z2-offload", tmp_path), expected)
    result = measure_point(Recording.open(folder), 3)
    assert result["expected_allocated_bytes"] == round(expected["figures"]["allocated"][1])
    assert result["expected_reserved_bytes"] == round(expected["figures"]["reserved"][1])
    assert "expected_allocated_bytes" not in measure_point(Recording.open(FOLDER / "z2-offload.zerotop"), 3)


def test_a_prediction_of_another_setting_is_not_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, difference in (
        ("--offload none", "offload none, and it ran with optimizer"),
        ("--offload optimizer --micro-batch 8", "micro-batch 8, and it ran with 4"),
        ("--offload optimizer --gpus 2", "ranks 2, and it ran with 1"),
        ("--offload optimizer --stage 1", "stage 1, and it ran with 2"),
    ):
        into = tmp_path / difference
        into.mkdir()
        folder = unpack_to_folder("z2-offload", into)
        keep(folder, ask_expectation(f"what-if {Z2} {options}"))
        (kept,) = [one for one in grade(capsys, str(folder)) if one["source"] == "kept"]
        assert kept["refusal"].endswith(difference)
        assert not kept["figures"]


@pytest.mark.parametrize(
    "expected",
    ["text", 7, [], {}, {"figures": 3}, {"stage": "many", "figures": {}}, {"figures": {"allocated": [1, 2]}}],
)
def test_a_damaged_prediction_is_none(tmp_path: Path, expected: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_expectation(expected) is None
    folder = keep(unpack_to_folder("z2-offload", tmp_path), expected)
    assert {one["source"] for one in grade(capsys, str(folder))} == {"formulas"}


def test_all_recordings_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpu-trainer-gpt2", "z2", "z2-offload", "cpu-clean"):
        shutil.copy(FOLDER / f"{name}.zerotop", tmp_path)
    (tmp_path / "damaged.zerotop").write_bytes(b"no recording")
    grades = grade(capsys, str(tmp_path))
    pairs = {(one["recording"], one["asked"]) for one in grades if one["source"] == "what-if"}
    assert pairs == {("z2", "z2-offload"), ("z2-offload", "z2")}
    refusals = {one["recording"]: one["refusal"] for one in grades if one["source"] == "formulas"}
    assert refusals["gpu-trainer-gpt2"] == ""
    assert "on a CPU" in refusals["cpu-clean"]
    assert refusals["z2"] == "the sizes of its layers were not recorded"
    assert refusals["damaged"]
    assert main(["estimate", str(tmp_path), "--grade"]) == 0
    text = capsys.readouterr().out
    assert "4 predictions not made:" in text
    assert "z2, z2-offload: the sizes" in text or "z2-offload, z2: the sizes" in text


def test_the_formulas_know_the_arithmetic_of_a_recording() -> None:
    """A Trainer without autocast computes in fp32: with 16 bits its activations would be a quarter too small."""
    for name in ("gpu-trainer-gpt2", "gpu-trainer-gpt2-small"):
        base = read_baseline(Recording.open(FOLDER / f"{name}.zerotop"))
        (_, likely, _), truth = grade_formulas(base).figures["allocated"]
        assert likely == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("nonsense", "--expect takes a question"),
        ("what-if 'open", "this one cannot be read"),
        ("sweep --stage 3", "--expect takes a question"),
        ("what-if nowhere", "There is no recording 'nowhere'"),
        (f"what-if {Z2} --offload params", "only stage 3 can offload them"),
        (f"what-if {FOLDER / 'cpu-clean.zerotop'}", "as on a CPU"),
        ("estimate llama-8b", "--expect needs one setting"),
        ("estimate llama-8b --stage 9", "invalid choice"),
    ],
)
def test_a_question_without_an_answer_starts_nothing(question: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=sentence):
        ask_expectation(question)
    path = tmp_path / "one"
    assert main(["run", "--headless", "--recording", str(path), "--expect", question, "--", "true"]) == 2
    assert not path.exists()


def test_a_run_keeps_its_prediction(tmp_path: Path) -> None:
    path = tmp_path / "one"
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(path)]
    command += ["--expect", f"zerotop what-if {Z2} --micro-batch 8", "--", "true"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kept = parse_expectation(json.loads((path / "session.json").read_text())["expected"])
    assert kept is not None
    assert (kept.stage, kept.micro_batch) == (2, 8)
    assert "time" in kept.figures
    assert "The prediction cannot be compared with the run" in done.stderr
    base = read_baseline(Recording.open(FOLDER / "z2.zerotop"))
    assert grade_kept(base, kept).refusal == "asked was micro-batch 8, and it ran with 4"


def test_a_run_as_recorded_has_no_errors() -> None:
    base = read_baseline(Recording.open(FOLDER / "z2.zerotop"))
    kept = parse_expectation(ask_expectation(f"what-if {Z2}"))
    assert kept is not None
    assert describe_errors(grade_kept(base, kept)).startswith(
        "allocated +0.0%, reserved +0.0%, NVML +0.0%, host +0.0%, time "
    )


def test_points_of_a_sweep_keep_an_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point_job, "count_visible_gpus", lambda: 1)
    settings: dict[str, Value] = {"stage": 3, "offload": "optimizer", "seq_length": 128, "gradient_checkpointing": "on"}
    plan = Plan({name: [value] for name, value in settings.items()}, model="qwen-0.5b")
    job = point_job.prepare_job(tmp_path, plan, Point(0, settings))
    kept = parse_expectation(ask_expectation(job.question))
    assert kept is not None
    assert (kept.stage, kept.offload, kept.ranks, kept.micro_batch, kept.sequence) == (3, "optimizer", 1, 4, 128)
    of_user = Plan({"stage": [3]}, command=("python", "train.py", "{deepspeed}"))
    assert point_job.prepare_job(tmp_path, of_user, Point(0, {"stage": 3})).question == ""
