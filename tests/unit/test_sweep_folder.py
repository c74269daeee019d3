"""A sweep's folder is written and read back, and its table holds one row a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars
import pytest

from zerotop.commands.common.errors import Problem
from zerotop.commands.sweeping.sweep_folder import make_folder, reopen_sweep
from zerotop.recording import sweeps
from zerotop.recording.headers import RecordingError
from zerotop.recording.sweeps import Plan, Point, Result, Sweep

PLAN = Plan(settings={"stage": [2, 3], "seq_length": [128], "lr": ["1e-4"]}, model="tiny", price_per_hour=30.0)


def make_sweep(path: Path) -> Sweep:
    points = tuple(
        Point(number, {"stage": stage, "seq_length": 128, "lr": "1e-4"})
        for number, stage in enumerate(PLAN.settings["stage"])
    )
    return Sweep(path, PLAN, points)


def test_a_sweep_is_read_back_as_written(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path).with_result(
        1, Result(sweeps.OK, allocated_peak_bytes=5 << 30, seconds=12.0, tokens_per_s=8.5)
    )
    sweeps.write_sweep(sweep)
    assert sweeps.read_sweep(tmp_path) == sweep
    assert [point.number for point in sweep.finished] == [1]


def test_csv_and_parquet_hold_the_same_table(tmp_path: Path) -> None:
    sweep = (
        make_sweep(tmp_path)
        .with_result(0, Result(sweeps.OK, seconds=36.0))
        .with_result(1, Result(sweeps.CRASHED, "It died."))
    )
    sweeps.write_sweep(sweep)
    table = polars.read_parquet(tmp_path / "results.parquet")
    assert table.columns[:4] == ["point", "stage", "seq_length", "lr"]
    assert table["outcome"].to_list() == ["ok", "crashed"]
    assert table["cost"][0] == pytest.approx(0.3)
    assert polars.read_csv(tmp_path / "results.csv")["stage"].to_list() == [2, 3]


def test_values_of_several_types_share_a_column(tmp_path: Path) -> None:
    values: list[sweeps.Value] = [1, 0.5, "none"]
    plan = replace(PLAN, settings={"max_norm": values})
    points = tuple(Point(number, {"max_norm": value}, Result(sweeps.OK)) for number, value in enumerate(values))
    assert sweeps.build_table(Sweep(tmp_path, plan, points))["max_norm"].to_list() == ["1", "0.5", "none"]


def test_a_damaged_or_newer_sweep_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"format": 1, "plan": {"settings": {}, "colour": 3}, "points": []}')
    with pytest.raises(RecordingError, match="damaged"):
        sweeps.read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text('{"format": 99}')
    with pytest.raises(RecordingError, match="newer zerotop"):
        sweeps.read_sweep(tmp_path)


def test_a_finished_sweep_opens_where_its_jobs_cannot_run(tmp_path: Path) -> None:
    """As one that comes from another machine."""
    plan = replace(PLAN, working_directory=str(tmp_path / "gone"))
    sweep = replace(make_sweep(tmp_path), plan=plan).with_result(0, Result(sweeps.OK))
    sweeps.write_sweep(sweep)
    with pytest.raises(Problem, match="in which the sweep's jobs run, is gone"):
        reopen_sweep(tmp_path)
    sweeps.write_sweep(sweep.with_result(1, Result(sweeps.OK)))
    assert len(reopen_sweep(tmp_path).finished) == 2
    with pytest.raises(Problem, match="is gone"):  # a search goes on
        reopen_sweep(tmp_path, plan)


def test_sweeps_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("time.strftime", lambda form: "20260412-093000")
    first, second = make_folder(None, PLAN), make_folder(None, PLAN)
    assert (first.name, second.name) == ("20260412-093000-tiny", "20260412-093000-tiny-2")
    assert first.is_dir()
    assert second.is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(Problem, match=r"Cannot create the folder .*: Not a directory. Choose another one with -o DIR"):
        make_folder(None, PLAN)
