"""Recordings side by side: right figures, differences beyond noise, as a table and as JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import recordings
from zerotop.analysis.live_view import Gpu
from zerotop.analysis.reports.comparison import compare_paths
from zerotop.analysis.reports.measures import Comparison, Measure, Unit
from zerotop.analysis.views.gpus import read_gpus
from zerotop.cli import main
from zerotop.recording.moments.at import At
from zerotop.ui.compare.drawing import draw_head, draw_rows, format_values
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.drawing.rows import row_text, row_width

GIB = 1 << 30


@pytest.fixture(scope="module")
def offload_comparison() -> Comparison:
    """The same model and batch, the optimizer on the GPU and on the CPU."""
    return compare_paths([recordings.open_recording("z2"), recordings.open_recording("z2-offload")])


def find_measure(comparison: Comparison, name: str) -> Measure:
    (measure,) = [measure for measure in comparison.measures if measure.name.strip() == name]
    return measure


def test_setup_time_memory_and_findings_are_beside_one_another(offload_comparison: Comparison) -> None:
    assert find_measure(offload_comparison, "optimizer offload").values == ("none", "cpu")
    assert find_measure(offload_comparison, "optimizer").values == ("FusedAdam", "DeepSpeedCPUAdam")
    assert find_measure(offload_comparison, "--deepspeed").values == (
        "ds_configs/zero2_bf16.json",
        "ds_configs/zero2_offload_optimizer_bf16.json",
    )
    step = find_measure(offload_comparison, "step")
    assert step.values == pytest.approx((0.0347, 0.1438), abs=1e-4)
    assert step.compute_factor(1) == pytest.approx(4.15, abs=0.01)
    before, after = find_measure(offload_comparison, "GPU 0, allocated").values
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert (before / GIB, after / GIB) == pytest.approx((12.65, 7.42), abs=0.01)
    assert find_measure(offload_comparison, "double spike").values == (None, "step 1")
    assert find_measure(offload_comparison, "end").values == ("exit code 0", "exit code 0")


def test_equal_measures_do_not_differ(offload_comparison: Comparison) -> None:
    differing = {measure.name.strip() for measure in offload_comparison.different_measures}
    same = {"model", "ZeRO stage", "data type", "micro-batch", "torch", "parameters", "end", "forward", "steps"}
    assert not same & differing
    assert {"optimizer offload", "step", "GPU 0, allocated", "iteration", "tokens, in iterations"} <= differing


def test_a_recording_does_not_differ_from_itself() -> None:
    twice = compare_paths([recordings.open_recording("story"), recordings.open_recording("story")])
    assert not twice.different_measures
    assert len(twice.measures) > 30
    assert [row_text(found).strip() for found in draw_rows(twice, 80, BLOCKS, only_differing=True)] == [
        "No difference beyond noise."
    ]


@pytest.mark.parametrize(
    ("unit", "values", "differs"),
    [
        (Unit.SECONDS, (1.0, 1.04), False),
        (Unit.SECONDS, (1.0, 1.06), True),
        (Unit.BYTES, (100, None), True),
        (Unit.COUNT, (100, 101), True),
        (Unit.TEXT, ("a", "a"), False),
        (Unit.TEXT, ("a", None), True),
        (Unit.SECONDS, (0.0, 0.0), False),
    ],
)
def test_measures_differ_only_by_more_than_their_noise(unit: Unit, values: tuple[object, ...], differs: bool) -> None:
    assert Measure("", "", unit, values).is_different is differs  # type: ignore[arg-type]


def test_factors_need_two_numbers() -> None:
    assert Measure("", "", Unit.BYTES, (2, 3)).compute_factor(1) == 1.5
    for unit, values in ((Unit.BYTES, (0, 3)), (Unit.TEXT, ("2", "3")), (Unit.BYTES, (None, 3)), (Unit.BYTES, (2, None))):
        assert math.isnan(Measure("", "", unit, values).compute_factor(1))


@pytest.mark.parametrize(("second", "told"), [(8.3, "8.30×"), (1.4, "+40 %"), (0.12, "−88 %"), (0.001, "−99 %")])
def test_a_change_is_reported_in_percent_or_as_a_multiple(second: float, told: str) -> None:
    comparison = Comparison(("a", "b"), (Measure("Time", "step", Unit.SECONDS, (1.0, second)),))
    text = row_text(draw_rows(comparison, 50, BLOCKS)[-1])
    assert told in text
    assert len(text) == 50


def test_one_row_has_one_unit_unless_too_few_digits_are_left() -> None:
    assert format_values(Measure("", "", Unit.SECONDS, (3.2, 0.0547, 0.0))) == ["3.20 s", "54.7 ms", "0.00 s"]
    assert format_values(Measure("", "", Unit.SECONDS, (0.0007, 0.3))) == ["0.70 ms", "300 ms"]
    assert format_values(Measure("", "", Unit.SECONDS, (0.1, 2.75))) == ["0.10 s", "2.75 s"]
    assert format_values(Measure("", "", Unit.BYTES, (GIB, None))) == ["1.00 GiB", "–"]


@pytest.mark.parametrize("width", [1, 20, 40, 80, 120, 200, 300])
@pytest.mark.parametrize("number", [2, 3, 9])
def test_every_row_has_the_requested_width(width: int, number: int) -> None:
    comparison = compare_paths([recordings.open_recording("z2"), recordings.open_recording("z2-oom")])
    many = Comparison(
        tuple(f"recording {place}" for place in range(number)),
        tuple(Measure(m.section, m.name, m.unit, (m.values * number)[:number]) for m in comparison.measures),
    )
    for glyphs in (BLOCKS, ASCII):
        drawn = [draw_head(many, width, glyphs), *draw_rows(many, width, glyphs)]
        assert {row_width(found) for found in drawn} == {width}
        if glyphs is ASCII:
            assert all(row_text(found).isascii() for found in drawn)


def test_recordings_of_other_kinds_are_compared_too() -> None:
    comparison = compare_paths(
        [recordings.open_recording("story"), recordings.open_recording("cpu-dead"), recordings.open_recording("z2-oom")]
    )
    assert find_measure(comparison, "end").values == ("exit code 0", "exit code 247 (SIGKILL)", "exit code 1")
    assert find_measure(comparison, "GPU 3, reserved").values[1:] == (None, None)


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(recordings.find_packed_file("z2")), str(recordings.find_packed_file("z2-offload"))]
    assert main(["compare", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["z2.zerotop", "z2-offload.zerotop"]
    (step,) = [line for line in lines if line.startswith("  step ")]
    assert step.split() == ["step", "34.7", "ms", "4.15×", "144", "ms"]
    assert main(["compare", "--json", *paths]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recordings"] == ["z2.zerotop", "z2-offload.zerotop"]
    (measure,) = [found for found in result["rows"] if found["name"] == "GPU 0, reserved"]
    assert measure["differs"] is True
    assert measure["unit"] == "bytes"


def test_one_recording_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(recordings.find_packed_file("z2"))]) == 2
    assert capsys.readouterr().err == "zerotop: compare needs two or more recordings\n"


def test_a_folder_without_a_recording(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compare", str(recordings.find_packed_file("z2")), str(tmp_path)]) == 1
    assert "holds no recording" in capsys.readouterr().err


def test_phases_are_of_one_rank_so_that_they_add_up() -> None:
    """Rank 0 delays rank 1: in one the time is between the phases, in the other in step()."""
    recording = recordings.open_recording("held-straggler")
    rows = {measure.name: measure.values[0] for measure in compare_paths([recording, recording]).measures}
    parts = [rows[name] for name in rows if name.startswith("  ")]
    assert sum(part for part in parts if isinstance(part, float)) == pytest.approx(rows["iteration"], rel=0.1)


def test_phases_are_of_the_steps_around_the_median_iteration() -> None:
    """Most steps with phases are from before the slowdown."""
    comparison = compare_paths([recordings.open_recording("gpu-slow"), recordings.open_recording("gpu-clean")])
    assert find_measure(comparison, "phases in steps").values == ("20 to 39", "all")
    phases = ("data", "forward", "backward", "step", "outside DeepSpeed")
    total = sum(float(find_measure(comparison, name).values[0] or 0) for name in phases)
    iteration = find_measure(comparison, "iteration").values[0]
    assert isinstance(iteration, float)
    assert total == pytest.approx(iteration, rel=0.05)


def test_runs_on_different_gpus_are_compared_all_the_same() -> None:
    """One ran on GPU 0 and the other on GPU 3 of its machine: rows with a dash each would compare nothing."""
    comparison = compare_paths([recordings.open_recording(name) for name in ("hand-clean0", "hand-generate")])
    assert not [row.name for row in comparison.measures if re.match(r"GPU \d, allocated", row.name)]
    assert None not in find_measure(comparison, "GPU, allocated").values


def test_the_memory_of_ranks_that_share_a_gpu_is_called_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(at: At) -> tuple[Gpu, ...]:
        return tuple(replace(gpu, ranks=(0, 1)) for gpu in read_gpus(at))

    monkeypatch.setattr("zerotop.analysis.views.recording_source.read_gpus", share)
    comparison = compare_paths([recordings.open_recording(name) for name in ("gpu-linear", "gpu-linear")])
    assert find_measure(comparison, "GPU 0, allocated, summed").values[0]
