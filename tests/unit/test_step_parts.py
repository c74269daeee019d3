"""The inside of step(): its parts, by the device's clock where that was asked, and how long the GPU has nothing to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import recordings
from memory_recording import PlantedRecording, make_record
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.steps.optimizer_phases import PARTS, PARTS_DTYPE, compute_medians, read_step_parts
from zerotop_probe.recording import tables
from zerotop_probe.recording.tables import BOUNDARY, FAILED, PHASE_CODE, SKIPPED


def record_update(folder: Path, *inside: Any, times: tuple[tuple[float, str, float], ...] = ()) -> PlantedRecording:
    """One update from second 10 to 20, and a step that only accumulates before it."""
    recording = PlantedRecording(folder)
    spans = [make_span(1, 2, "step"), *inside, make_span(10, 20, "step", 3, BOUNDARY)]
    recording.write_records(tables.SPANS, make_identity(0), sorted(spans, key=lambda row: row[1]))
    told = [
        make_record(
            tables.DEVICE_TIMES, 30, begin_ns=int(begin * S), device_ns=int(took * S), phase=PHASE_CODE[name], depth=1
        )
        for begin, name, took in times
    ]
    recording.write_records(tables.DEVICE_TIMES, make_identity(0), told)
    return recording


OFFLOADED = (
    make_span(10, 12, "grads_to_cpu", 3, depth=1),
    make_span(12, 16, "cpu_optimizer", 3, depth=1),
    make_span(16, 17, "params_to_gpu", 3, depth=1),
)


def test_host_times_give_the_parts_of_a_step(tmp_path: Path) -> None:
    (row,) = read_step_parts(record_update(tmp_path, *OFFLOADED).open_recording())
    assert (row["rank"], row["step"], row["begin_unix_ns"], row["step_s"]) == (0, 3, BEGIN_NS + 10 * S, 10)
    assert (row["grads_to_cpu_s"], row["cpu_optimizer_s"], row["params_to_gpu_s"], row["allgather_s"]) == (2, 4, 1, 0)
    assert row["gpu_idle_s"] == 7


def test_the_device_knows_better_what_was_only_launched(tmp_path: Path) -> None:
    (row,) = read_step_parts(record_update(tmp_path, *OFFLOADED, times=((16, "params_to_gpu", 3),)).open_recording())
    assert (row["params_to_gpu_s"], row["gpu_idle_s"]) == (3, 5)


def test_where_not_all_moves_are_recorded_idle_is_what_the_cpu_computes(tmp_path: Path) -> None:
    (row,) = read_step_parts(record_update(tmp_path, OFFLOADED[1]).open_recording())
    assert row["gpu_idle_s"] == 4


def test_where_the_gpu_computes_the_update_nothing_is_known(tmp_path: Path) -> None:
    (row,) = read_step_parts(record_update(tmp_path, make_span(11, 12, "optimizer", 3, depth=1)).open_recording())
    assert row["optimizer_s"] == 1
    assert math.isnan(row["gpu_idle_s"])
    (tmp_path / "plain").mkdir()
    assert compute_medians(read_step_parts(record_update(tmp_path / "plain").open_recording())) == {"step_s": 10}


def test_parts_in_parts_and_of_other_phases_are_not_counted(tmp_path: Path) -> None:
    others = (
        make_span(3, 4, "reduce", depth=1),
        make_span(13, 14, "allgather", 3, depth=2),
        make_span(20, 21, "optimizer", 4, depth=1),
    )
    failed = make_span(22, 23, "step", 4, BOUNDARY | FAILED)
    (row,) = read_step_parts(record_update(tmp_path, *OFFLOADED, *others, failed).open_recording())
    assert (row["reduce_s"], row["allgather_s"], row["optimizer_s"]) == (0, 0, 0)


def test_skipped_updates_are_not_usual(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    spans = [make_span(t, t + 1, "step", t, BOUNDARY | SKIPPED) for t in range(3)] + [make_span(5, 9, "step", 3, BOUNDARY)]
    recording.write_records(tables.SPANS, make_identity(0), spans)
    rows = read_step_parts(recording.open_recording())
    assert rows["skipped"].tolist() == [True, True, True, False]
    assert compute_medians(rows) == {"step_s": 4}


def test_without_steps_there_are_no_parts(tmp_path: Path) -> None:
    assert read_step_parts(PlantedRecording(tmp_path).open_recording()).dtype == PARTS_DTYPE
    assert compute_medians(read_step_parts(PlantedRecording(tmp_path).open_recording())) == {}


IDLE = [("z2-offload", 0.079), ("story", 1.22), ("z3-offload-all", 0.084), ("z2", None)]


@pytest.mark.parametrize(("name", "idle_s"), IDLE)
def test_real_updates(name: str, idle_s: float | None) -> None:
    rows = read_step_parts(recordings.open_recording(name))
    medians = compute_medians(rows[-5:])
    assert medians.get("gpu_idle_s") == (pytest.approx(idle_s, rel=0.02) if idle_s is not None else None)
    parts = sum(rows[f"{part}_s"] for part in PARTS)
    assert (parts <= rows["step_s"] * 1.1).all()
