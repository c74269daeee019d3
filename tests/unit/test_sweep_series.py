"""Series, knees and lines of a sweep's results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.analysis.sweeps.line_report import describe_line, report_lines
from zerotop.analysis.sweeps.series import build_series, choose_axis, fit_lines, list_charts, read_measurement
from zerotop.demo.finetune import PRESETS
from zerotop.recording.sweeps import OK, OUT_OF_MEMORY, Plan, Point, Result, Sweep

LENGTHS = [128, 256, 512, 1024, 2048, 4096]
GIB = 1 << 30
SHAPE = ModelShape(layers=24, hidden=896, heads=14, vocabulary=151936, parameters=494_032_768, largest_layer=136_134_656)


def make_sweep(path: Path) -> Sweep:
    """Two allocators; 4 rows of each length; the knee at 2,048 tokens; the longest does not fit with the default one."""
    plan = Plan(settings={"stage": [3], "allocator": ["default", "expandable"], "seq_length": list(reversed(LENGTHS))})
    points: list[Point] = []
    for allocator in ("default", "expandable"):
        for length in reversed(LENGTHS):
            tokens = 4 * length
            size = 10 * GIB + 2_000_000 * max(0, tokens - 2048)
            result = Result(OK, micro_batch_tokens=tokens, allocated_peak_bytes=size, tokens_per_s=float(tokens))
            if allocator == "default" and length == 4096:
                result = Result(OUT_OF_MEMORY, "Rank 0 ran out of GPU memory.")
            settings = {"stage": 3, "allocator": allocator, "seq_length": length}
            points.append(Point(len(points), settings, result))
    return Sweep(path, plan, tuple(points))


def test_series_are_sorted_and_labelled(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    axis = choose_axis(sweep.plan)
    assert axis == "seq_length"
    first, second = build_series(sweep, axis)
    assert (first.label, second.label) == ("allocator default", "allocator expandable")
    assert [point.settings[axis] for point in first.points] == LENGTHS[:-1]
    assert [point.settings[axis] for point in first.out_of_memory] == LENGTHS[-1:]
    assert list(read_measurement(second, "tokens_per_s")) == [4 * length for length in LENGTHS]
    assert list_charts(sweep)[0] == "allocated_peak_bytes"


def test_the_line_is_in_bytes_for_each_token(tmp_path: Path) -> None:
    for line in fit_lines(make_sweep(tmp_path)):
        assert line.fit.slope == pytest.approx(2_000_000)
        assert line.fit.knee_x == pytest.approx(2048)
        assert line.fit.intercept == pytest.approx(10 * GIB - 2_000_000 * 2048)


def test_the_line_is_compared_with_the_rule_of_thumb(tmp_path: Path) -> None:
    report = report_lines(make_sweep(tmp_path), SHAPE)[0]
    assert report.heuristic_bytes == pytest.approx(SHAPE.estimate_activations(1024))
    text = " ".join(describe_line(report))
    assert "allocator default: Allocated memory is flat at 10.00 GiB up to 2,048 tokens a micro-batch." in text
    assert "1.9 MiB a token on top of 6.19 GiB" in text
    assert "of activations a token: measured is 1.49 times that" in text
    assert report.counted_bytes is None  # the layers of this shape are not known
    report = report_lines(make_sweep(tmp_path), parse_shape(PRESETS["qwen-0.5b"]))[0]
    assert "the loss's copies of the logits add up to 3.1 MiB: measured is 0.62 times that" in " ".join(
        describe_line(report)
    )


def test_two_points_have_a_line_without_r2(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    points = [point for point in sweep.points if point.settings["seq_length"] in (1024, 2048)]
    plan = replace(sweep.plan, settings={**sweep.plan.settings, "seq_length": [1024, 2048]})
    report = report_lines(Sweep(tmp_path, plan, tuple(points)))[0]
    (text,) = describe_line(report)
    assert text.endswith("MiB a token on top of 6.19 GiB (through only 2 points).")
