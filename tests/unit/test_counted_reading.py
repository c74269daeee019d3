"""What is read of counted steps in small recordings: their times are exact, what is in them is unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.ranks.matrix import RankMatrices, RankMetric
from zerotop.analysis.steps.job_pace import estimate_tokens
from zerotop.analysis.timeline.step_lane import StepTimes
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.restarts import merge_before
from zerotop.analysis.waveform.alignment import choose_iterations
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import StepTable, read_steps
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.live.iteration import draw_iteration
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, COUNTED, END, PHASE_CODE, SKIPPED, SPANS, TICK, UNKNOWN

END_OF_COUNTED = BOUNDARY | COUNTED


def write_steps(folder: Path, rank: int = 0) -> Recording:
    """Ten steps of 10 s; of 3 to 8 only the end is recorded, 5 has an evaluation and 6 a part of its forward."""
    spans = []
    for step in range(10):
        at = 10 * step
        if 3 <= step <= 8:
            if step == 5:
                spans.append(make_span(at + 1, at + 4, "eval", step))
            if step == 6:
                spans.append(make_span(at + 5, at + 6, "forward", step, tokens=7))
            flags = END_OF_COUNTED | (SKIPPED if step == 7 else 0)
            spans.append(make_span(at + 9, at + 10, "step", step, flags))
        else:
            spans += [
                make_span(at, at + 1, "data", step),
                make_span(at + 1, at + 3, "forward", step, tokens=100),
                make_span(at + 3, at + 8, "backward", step),
                make_span(at + 8, at + 10, "step", step, BOUNDARY),
            ]
    write_table(folder, SPANS, make_identity(rank), *spans).close()
    return read_recording(folder)


def test_columns(tmp_path: Path) -> None:
    steps = read_steps(write_steps(tmp_path))
    counted = steps["counted"]
    assert np.flatnonzero(counted).tolist() == [3, 4, 5, 6, 7, 8]
    assert steps["iteration_s"].tolist() == [10, 10, 10, 10, 10, 7, 10, 10, 10, 10]
    assert steps["eval_s"].tolist() == [0, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert np.flatnonzero(steps["skipped"]).tolist() == [7]
    for name, value in (("data_s", 1), ("forward_s", 2), ("backward_s", 5), ("step_s", 2), ("optimizer_s", 0)):
        assert np.isnan(steps[name][counted]).all()
        assert (steps[name][~counted] == value).all()
    for name, value in (("micro_steps", 1), ("rows", 2), ("tokens", 100)):
        assert (steps[name][counted] == UNKNOWN).all()
        assert (steps[name][~counted] == value).all()


def test_steps_with_phases_are_apart(tmp_path: Path) -> None:
    table = StepTable(write_steps(tmp_path))
    for until_s in (25, 55, 1000):  # as a growing recording is read
        table.update(BEGIN_NS + until_s * S)
        (process,) = table.rank_steps
        assert len(process.recorded_steps) == len(process.step_rows)
        assert process.phased_steps["step"].tolist() == [step for step in process.step_rows["step"] if step < 3 or step > 8]


def test_the_peak_of_several_counted_steps_is_that_of_the_last(tmp_path: Path) -> None:
    who = make_identity(0)
    readings = [
        make_record(
            ALLOCATOR, time_ns=int(at * S), allocated_bytes=5, allocated_peak_bytes=peak, edge=edge, phase=PHASE_CODE["step"]
        )
        for at, peak, edge in ((10, 10, END), (20, 11, END), (30, 12, END), (44, 70, TICK), (90, 80, END), (100, 13, END))
    ]
    write_table(tmp_path, ALLOCATOR, who, *readings, peaks="window").close()
    steps = read_steps(write_steps(tmp_path))
    assert steps["allocated_peak_bytes"].tolist() == [10, 11, 12, *[UNKNOWN] * 5, 80, 13]


def test_merged_steps_have_the_phases_of_those_that_have_some(tmp_path: Path) -> None:
    steps = read_steps(write_steps(tmp_path))
    merged = merge_before(steps, 8, 4)
    assert merged["steps"].tolist() == [4, 4, 1, 1]
    assert merged["counted"].tolist() == [False, True, True, False]
    assert merged["iteration_s"][:2].tolist() == [10, 9.25]
    assert merged["forward_s"][0] == 2
    assert merged["tokens"].tolist() == [100, UNKNOWN, UNKNOWN, 100]
    assert np.isnan(merged["forward_s"][1])


def test_tokens_of_counted_steps_are_estimated_by_the_others(tmp_path: Path) -> None:
    steps = read_steps(write_steps(tmp_path))
    assert estimate_tokens(steps, steps["tokens"]) == 1000
    whole = steps[~steps["counted"]]
    assert estimate_tokens(whole, np.array([100, 0, 100, 100])) == 300


def test_the_job_as_a_whole(tmp_path: Path) -> None:
    view = RecordingSource(write_steps(tmp_path)).view_at(BEGIN_NS + 100 * S)
    iterations = view.iterations
    assert iterations.phase_s["unknown"].tolist() == [0, 0, 0, 10, 10, 7, 10, 10, 10, 0]
    assert np.isnan(iterations.phase_s["forward"][3:9]).all()
    assert view.progress.tokens_per_s == pytest.approx(100 / iterations.iteration_s[~iterations.skipped].mean())
    text = "\n".join("".join(part for part, _ in row) for row in draw_iteration(view, 80, 14, BLOCKS))
    assert "step 9" in text
    assert "counted" in text
    pointed = "\n".join("".join(part for part, _ in row) for row in draw_iteration(view, 80, 14, BLOCKS, pointed=4))
    assert "step 4" in pointed
    assert "■ counted" in pointed
    assert "forward" not in pointed


def test_ranks_timeline_and_fold_leave_counted_steps_out(tmp_path: Path) -> None:
    table = StepTable(write_steps(tmp_path))
    table.update()
    (process,) = table.rank_steps
    matrix = RankMatrices().matrix_at([process], BEGIN_NS + 100 * S, 10, meets_in_forward=False)
    assert np.isnan(matrix.times[RankMetric.FORWARD][0, 3:9]).all()
    assert np.isnan(matrix.times[RankMetric.OTHER][0, 3:9]).all()
    assert matrix.times[RankMetric.ITERATION][0, 4] == 10
    # A counted step takes the parts of the step nearest in duration: six of 10 s have 2 s of forward, that of 7 s has 1.4.
    assert matrix.usual_times[RankMetric.FORWARD].tolist() == pytest.approx([(8 * 2 + 1.4) / 9])
    times = StepTimes(process)
    times.update()
    seconds = times.measure_phases(BEGIN_NS + np.array([30, 50, 60, 90, 100]) * S)
    assert seconds[PHASE_CODE["eval"]].tolist() == [0, pytest.approx(3), 0, 0]
    assert seconds.sum(axis=0).tolist() == pytest.approx([0, 3, 0, 10])
    chosen = choose_iterations(process.step_rows, None)
    assert chosen.indices.tolist() == [0, 1, 2, 9]
    assert chosen.left_out["counted"] == 5
