"""Runs over time: what counts as the same command, the table, summaries shared by a team, and the last runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

import long_recording
import recordings
from zerotop.analysis.reports.same_command import build_command_key
from zerotop.cli import main
from zerotop.commands.common.past_runs import describe_past
from zerotop_probe.recording import directory

DAY_NS = 86400 * 10**9
PHASES = long_recording.PHASE_NAMES


@pytest.fixture
def recording_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = Path(directory.find_default_root())
    folder.mkdir(parents=True)
    return folder


def run_history(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run it with ``--json``; return the commands, and what was said on standard error."""
    assert main(["history", "--json", *arguments]) == 0
    captured = capfd.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python3.11 train.py --seed 1 --out /runs/a", "/opt/venv/bin/python train.py --seed 2 --out /runs/b/1"),
        ("torchrun --master-port=29501 train.py lr=1e-4", "torchrun --master-port=29777 train.py lr=3e-5"),
        ("deepspeed train.py --deepspeed_config /a/ds.json", "deepspeed train.py --deepspeed_config ds.json"),
    ],
)
def test_paths_and_numbers_do_not_make_another_command(one: str, other: str) -> None:
    assert build_command_key(one.split(), "/home/ann/vision") == build_command_key(other.split(), "/home/bob/git/vision")


@pytest.mark.parametrize(
    "other",
    [
        "python eval.py --seed 1",
        "python train.py --seed 1 --bf16",
        "python ../speech/train.py --seed 1",
        "python train.py --seed 1 --deepspeed ds3.json",
        "python train.py --name N1",
    ],
)
def test_other_programs_options_and_projects_do(other: str) -> None:
    key = build_command_key(["python", "train.py", "--seed", "1"], "/home/ann/vision")
    assert build_command_key(other.split(), "/home/ann/vision") != key
    assert build_command_key(["python", "train.py", "--seed", "1"], "/home/ann/speech") != key


def test_a_command_has_its_runs_pace_findings_and_gpu_time(recording_root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("gpu-long", "gpu-leak", "story", "cpu-dead"):
        shutil.copy(recordings.find_packed_file(name), recording_root)
    shutil.copy(recordings.find_packed_file("story"), recording_root / "copy.zerotop")
    found, _ = run_history(capfd)
    story = next(one for one in found if "llama-8b" in one["command"])
    assert (story["runs"], story["failed"]) == (1, 0)  # its copy counts once
    assert story["findings"] == {"skipping_ended": 1, "double_spike": 1}
    assert story["lost_s"] == pytest.approx(10.57, abs=0.01)
    assert story["gpu_hours"] == pytest.approx(4 * 75.05 / 3600, rel=0.001)
    assert 0 < story["idle_gpu_hours"] < story["gpu_hours"]
    dead = next(one for one in found if one["failed"])
    assert (dead["gpu_hours"], dead["peak_on_host"]) == (None, True)
    main(["history"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == [
        "runs",
        "failed",
        "iteration",
        "peak",
        "lost",
        "GPU",
        "hours",
        "idle",
        "found",
        "in",
        "command",
    ]
    assert len(lines) == 1 + len(found) == 5


def test_no_recordings_and_damaged_ones(recording_root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["history"]) == 0
    assert "No recordings yet" in capfd.readouterr().out
    (recording_root / "broken.zerotop").write_bytes(b"PK nothing of ours")
    (recording_root / "empty").mkdir()
    (recording_root / "empty" / "session.json").write_text("{")
    shutil.copy(recordings.find_packed_file("story"), recording_root)
    (one,), said = run_history(capfd)
    assert (one["runs"], said) == (1, "")


def test_a_second_call_opens_no_recording(
    recording_root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(recordings.find_packed_file("story"), recording_root)
    before = run_history(capfd)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("it was opened again")

    monkeypatch.setattr("zerotop.analysis.reports.recording_index.open_glimpse", refuse)
    monkeypatch.setattr("zerotop.analysis.reports.recording_index.RecordedRun", refuse)
    assert run_history(capfd) == before


def test_a_team_shares_summaries_without_recordings(
    recording_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    team = tmp_path / "team"
    team.mkdir()
    shutil.copy(recordings.find_packed_file("story"), recording_root)
    shutil.copy(recordings.find_packed_file("gpu-leak"), team)  # left there for everybody
    mine, _ = run_history(capfd, "--history", str(team))
    assert len(mine) == 2
    monkeypatch.setattr("zerotop.commands.history._name_member", lambda: "somebody-else")
    (recording_root / "story.zerotop").unlink()
    theirs, said = run_history(capfd, "--history", str(team))
    assert (theirs, said) == (mine, "")
    (team / "zerotop-runs-mallory.parquet").write_bytes(b"PAR1")
    polars.DataFrame({"name": ["x"]}).write_parquet(team / "zerotop-runs-old.parquet")
    good = next(team.glob("zerotop-runs-somebody*"))
    for column, value in (("begin_ns", "yesterday"), ("command", "[1, 2]"), ("findings", "[1]"), ("exit_code", [3])):
        wrong = polars.read_parquet(good).with_columns(polars.lit(value).alias(column))
        wrong.write_parquet(team / f"zerotop-runs-{column}.parquet")
    again, said = run_history(capfd, "--history", str(team))
    assert again == mine
    assert said.count("is not a file of summaries that this version can read") == 6


def test_a_shared_folder_that_is_missing_or_not_ours(
    recording_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["history", "--history", str(tmp_path / "none")]) == 2
    assert "There is no folder" in capfd.readouterr().err
    shutil.copy(recordings.find_packed_file("story"), recording_root)

    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "file"))

    monkeypatch.setattr("zerotop.commands.history.write_shared_runs", refuse)
    found, said = run_history(capfd, "--history", str(tmp_path))
    assert len(found) == 1
    assert "were not left in" in said


def write_run(
    folder: Path, day: int, slower: float = 1.0, *, phase: str = "", level: float = 0.002, batch: int = 12
) -> Path:
    """Write a run of 100 steps on a busy GPU; one that is ``slower`` in all phases or only in one."""
    random = np.random.default_rng(day)
    noise = 1 + random.normal(0, level) + random.normal(0, 0.004, 100)

    def vary_levels(seconds: np.ndarray, rank: int) -> None:
        seconds *= noise[:, None]
        if phase:
            seconds[:, PHASES.index(phase)] += (slower - 1) * seconds.sum(axis=1)
        else:
            seconds *= slower

    def keep_busy(rows: np.ndarray) -> None:
        rows["utilization_percent"] = 97

    trouble = long_recording.Trouble(paces=vary_levels, tables={"gpus": keep_busy}, engine={"micro_batch": batch})
    path = long_recording.write_recording(folder / f"day{day}", 100, trouble)
    session = path / directory.SESSION_FILE
    info = json.loads(session.read_text())
    info["working_directory"] = "/home/ann/vision"
    session.write_text(json.dumps(info))
    for file in path.glob("*"):
        if file.is_file():
            move_days(file, day)
    return path


def move_days(file: Path, days: int) -> None:
    """Let a file have been written some days later."""
    head, newline, rest = file.read_bytes().partition(b"\n")
    info = json.loads(head + rest if file.suffix == ".json" else head)
    info["clock"]["unix_ns"] += days * DAY_NS
    file.write_bytes(json.dumps(info).encode() + (b"" if file.suffix == ".json" else newline + rest))


def test_a_slower_run_is_reported_with_phase_and_setting(recording_root: Path) -> None:
    for day in range(3):
        write_run(recording_root, day)
    (text,) = describe_past(str(write_run(recording_root, 4, 1.08, phase="forward", batch=8)))
    assert text in [
        f"{percent} % slower than your last three runs: forward; micro-batch 8 instead of 12." for percent in (7, 8, 9)
    ]


def test_a_faster_run_is_reported_too(recording_root: Path) -> None:
    for day in range(2):
        write_run(recording_root, day)
    (text,) = describe_past(str(write_run(recording_root, 4, 0.9)))
    assert text in [f"{percent} % faster than your last two runs." for percent in (9, 10, 11)]


def test_silence_without_a_difference_that_counts(recording_root: Path, tmp_path: Path) -> None:
    """Equal runs; only one earlier run; earlier runs that differ as much themselves."""
    first = write_run(recording_root, 0)
    assert describe_past(str(first)) == []
    assert describe_past(str(write_run(tmp_path, 1, 1.2))) == []  # of one earlier run nobody knows the spread
    for day in range(2, 12):
        write_run(recording_root, day)
    assert [text for path in sorted(recording_root.iterdir()) for text in describe_past(str(path))] == []
    shutil.rmtree(recording_root)
    for day, slower in enumerate((0.9, 1.0, 1.1)):
        write_run(recording_root, day, slower)
    assert describe_past(str(write_run(recording_root, 4, 1.15))) == []


def test_other_commands_later_runs_and_damaged_ones_do_not_count(recording_root: Path, tmp_path: Path) -> None:
    for day in range(3):
        write_run(recording_root, day)
    slow = write_run(recording_root, 4, 1.2)
    for file in (recording_root / "day0").iterdir():
        file.write_bytes(b"\x00" * 100)
    assert "last two runs" in describe_past(str(slow))[0]
    session = recording_root / "day1" / directory.SESSION_FILE
    session.write_text(session.read_text().replace("/home/ann/vision", "/home/ann/speech"))
    write_run(recording_root, 9)
    assert describe_past(str(slow)) == []
