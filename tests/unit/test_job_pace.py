"""The speed of a whole job: every place that tells it tells the same."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from recordings import open_recording
from zerotop.analysis.checks.budget import Budget
from zerotop.analysis.checks.checks import check_run
from zerotop.analysis.formatting import format_seconds
from zerotop.analysis.reports.comparison import compare_paths
from zerotop.analysis.reports.headline import summarize_recording
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.reports.recording_index import judge_recording
from zerotop.analysis.reports.recording_summary import build_overview
from zerotop.analysis.reports.verdict import describe_pace
from zerotop.analysis.steps.job_pace import (
    measure_iteration,
    measure_mean,
    measure_token_rate,
    measure_whole_step,
    measure_whole_token_rate,
)
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.watching_cost import measure_work_in_slowest
from zerotop.recording.samples import Ints, Rows
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.table_files import Source


def make_steps(seconds: list[float], *, skipped: int = 0) -> Rows:
    rows = np.zeros(len(seconds), STEP_DTYPE)
    rows["iteration_s"], rows["steps"], rows["step"] = seconds, 1, np.arange(len(seconds))
    rows["skipped"][:skipped] = True
    return rows


def test_skipped_steps_do_not_tell_how_long_an_iteration_takes() -> None:
    rows = make_steps([1.0, 1.0, 1.0, math.nan, 3.0, 3.2], skipped=3)
    assert measure_iteration(rows) == pytest.approx(3.1)
    (text,) = describe_pace(rows, np.full(6, 46))
    # Over the same steps as the median.
    assert text == "An iteration takes 3.10 s (median without 3 skipped); 15 tokens per second on average."
    only_skipped = make_steps([1.0, 2.0, 3.0], skipped=3)
    assert measure_iteration(only_skipped) == 2.0
    assert next(describe_pace(only_skipped, np.zeros(3, np.int64))).startswith("An iteration takes 2.00 s (median).")
    assert math.isnan(measure_iteration(make_steps([math.nan])))
    assert math.isnan(measure_token_rate(make_steps([1.0]), np.zeros(1, np.int64)))


def test_the_speed_over_all_the_time_counts_what_is_between_iterations() -> None:
    """As a checkpoint after each second step, which takes as long as both."""
    rows = make_steps([1.0] * 10)
    begins = np.arange(10) + 2 * (np.arange(10) // 2)
    rows["begin_unix_ns"], rows["end_unix_ns"] = begins * 10**9, (begins + 1) * 10**9
    tokens = np.full(10, 180)
    assert measure_whole_step(rows) == pytest.approx(1.8)
    assert measure_whole_token_rate(rows, tokens) == pytest.approx(100)
    (text,) = describe_pace(rows, tokens)
    assert text == "An iteration takes 1.00 s (median); 180 tokens per second in iterations, 100 over all the time."
    rows["iteration_s"][5] = math.nan
    assert math.isnan(measure_whole_token_rate(rows, tokens))


def test_the_pace_since_the_batch_grew_is_told_with_its_steps() -> None:
    rows = make_steps([1.0] * 12 + [2.0] * 8)
    (text,) = describe_pace(rows, np.array([100] * 12 + [400] * 8), 12)
    assert text == (
        "An iteration takes 1.00 s (median), 1.40 s on average, the slowest 2.00 s in step 12;"
        " 157 tokens per second on average. From step 12 on, with another batch, 2.00 s; 200 tokens per second on average."
    )


def test_the_mean_is_reported_where_many_iterations_take_far_longer() -> None:
    """As where each tenth waits until the GPU has done what the nine before gave it."""
    turns = ([0.1] * 9 + [2.1]) * 5
    assert next(describe_pace(make_steps(turns), np.zeros(50, np.int64))).startswith(
        "An iteration takes 100 ms (median), 300 ms on average, the slowest 2.10 s in step 9"
    )
    start = next(describe_pace(make_steps([60.0, *[0.1] * 49]), np.zeros(50, np.int64)))
    assert "on average" not in start


@pytest.mark.parametrize(("other_s", "work_s"), [(0.03, 0.09), (0.1, 0.0)])
def test_own_work_is_told_of_the_slowest_step_if_no_other_can_hold_it(other_s: float, work_s: float) -> None:
    rows = make_steps([0.03] * 10)
    rows["iteration_s"][[5, 6]] = 0.14, other_s
    rows["end_unix_ns"] = np.cumsum(rows["iteration_s"]) * 1e9
    rows["begin_unix_ns"] = rows["end_unix_ns"] - rows["iteration_s"] * 1e9
    records = np.array([(0, 0), (10**8, 0), (4 * 10**8, 9 * 10**7)], [("time_ns", "i8"), ("one_time_ns", "i8")])
    probe = cast(Source, SimpleNamespace(rank=0, array=records, unix_times=lambda rows: rows["time_ns"]))
    assert measure_work_in_slowest([probe], rows) == pytest.approx(work_s)
    (text,) = describe_pace(rows, np.zeros(10, np.int64), work_s=work_s)
    assert ("in step 5 (90 ms of it zerotop's own work, once)" in text) == bool(work_s)


def test_no_figure_takes_more_time_than_the_steps_did() -> None:
    """Where the pause of one rank is the next iteration of another, the slowest rank of each step takes longer."""
    rows = make_steps([2.0] * 10)
    rows["begin_unix_ns"] = np.arange(10) * 1_500_000_000
    rows["end_unix_ns"] = rows["begin_unix_ns"] + 1_500_000_000
    assert measure_mean(rows) == pytest.approx(1.5)
    assert measure_iteration(rows) == pytest.approx(1.5)
    assert measure_token_rate(rows, np.full(10, 30)) == pytest.approx(20.0)


@pytest.mark.parametrize("name", ["story", "cpu-hang", "gpu-slow"])
def test_header_summary_list_and_comparison_agree_at_the_end(name: str) -> None:
    source = RecordingSource(open_recording(name))
    progress = source.view_at(None).progress
    (sentence,) = describe_pace(source.job_steps, source.job_tokens)
    assert f"takes {format_seconds(progress.iteration_s)} (median" in sentence
    assert f"; {progress.tokens_per_s:,.0f} tokens per second on average." in sentence
    assert build_overview(open_recording(name)).iteration_s == pytest.approx(progress.iteration_s, rel=0.02)  # of one rank
    rows = {row.name: row.values for row in compare_paths([open_recording(name), open_recording("z2")]).measures}
    assert rows["iteration"][0] == progress.iteration_s


def make_counted(sizes: list[int], rows: list[int]) -> tuple[Rows, Ints]:
    """Return steps of a second each; those of no tokens were only counted."""
    steps = make_steps([1.0] * len(sizes))
    tokens = np.array(sizes)
    steps["counted"], steps["rows"] = tokens == 0, rows
    return steps, tokens


def test_counted_steps_have_the_tokens_of_the_known_ones_around_them() -> None:
    assert measure_token_rate(*make_counted([100] * 10 + [0] * 70 + [100, 0, 100, 0], [4] * 84)) == pytest.approx(100)
    # As without padding, all in the same time: too unlike to tell those of the others.
    steps, tokens = make_counted([100, 0, 120] * 10 + [0] * 60 + [280, 300] * 5, [4] * 100)
    assert math.isnan(measure_token_rate(steps, tokens))
    assert measure_token_rate(steps, tokens, slice(-10, None)) == pytest.approx(290)


def test_counted_steps_of_varying_length_have_the_tokens_of_known_ones_in_the_same_time() -> None:
    """The known ones happen to be shorter than the others."""
    lengths = np.array([100, 300, 160, 320, 90, 280] * 20)
    steps, tokens = make_counted([int(length) if length < 200 else 0 for length in lengths], [4] * 120)
    steps["iteration_s"] = lengths / 1000 * (1 + 0.05 * (-1.0) ** (np.arange(120) // 2))
    truth = float(lengths.sum() / steps["iteration_s"].sum())
    assert measure_token_rate(steps, tokens) == pytest.approx(truth, rel=0.02)
    steps["iteration_s"][0] = 10.0  # it starts up
    with_start = float(lengths.sum() / steps["iteration_s"].sum())
    assert measure_token_rate(steps, tokens) == pytest.approx(with_start, rel=0.02)


def test_there_is_no_token_rate_where_sequences_grew_in_steps_that_were_only_counted() -> None:
    steps, tokens = make_counted([100, 0, 100] * 10 + [0] * 60 + [300] * 10, [4] * 100)
    assert math.isnan(measure_token_rate(steps, tokens))
    assert measure_token_rate(steps, tokens, slice(-10, None)) == pytest.approx(300)
    steps, tokens = make_counted([100] * 50 + [0] * 2 + [300] * 48, [4] * 100)
    assert measure_token_rate(steps, tokens) == pytest.approx(198, abs=1)


def test_there_is_no_token_rate_where_the_batch_grew_in_steps_that_were_only_counted() -> None:
    steps, tokens = make_counted([100] * 30 + [0] * 60 + [800] * 10, [4] * 90 + [32] * 10)
    assert math.isnan(measure_token_rate(steps, tokens))
    assert measure_token_rate(steps, tokens, slice(-10, None)) == pytest.approx(800)
    steps, tokens = make_counted([100] * 50 + [0] * 2 + [800] * 48, [4] * 52 + [32] * 48)
    assert measure_token_rate(steps, tokens) == pytest.approx(443, abs=1)


@pytest.mark.parametrize(
    ("name", "steps", "recorded"),
    [
        ("x4-attached", 26, " (17 recorded)"),
        ("held-restart", 30, " (47 recorded)"),
        ("x2-hang-kernel", 58, ""),
        ("story", 14, ""),
    ],
)
def test_header_summary_and_list_count_the_same_steps(name: str, steps: int, recorded: str) -> None:
    """Where the recording began later, a restart repeated steps, or the lowest rank made fewer than others."""
    recording = open_recording(name)
    view = RecordingSource(recording).view_at(None)
    assert view.progress.finished_steps == steps
    summary = summarize_recording(recording)
    assert f"\n{steps} steps{recorded}, " in summary
    assert f"median {view.progress.iteration_s:.3f} s per iteration" in summary
    assert judge_recording(Path(recording.path), build_overview(recording)).steps == steps


def test_every_command_has_the_same_tokens_per_second() -> None:
    """In this recording the iterations of one rank overlap with the pauses of another: 7 % of the sum."""
    source = RecordingSource(open_recording("held-crowded"))
    rate = measure_token_rate(source.job_steps, source.job_tokens)
    recordings = [open_recording(name) for name in ("held-crowded", "z2")]
    rows = {row.name: row.values for row in compare_paths(recordings).measures}
    assert rows["tokens, in iterations"][0] == pytest.approx(rate)
    checks = check_run(RecordedRun(recordings[0], memory=False), Budget(warmup_steps=0, tokens_per_second=1e9))
    assert any(one.sentence.startswith(f"{rate:,.0f} tokens per second") for one in checks)


def test_a_check_says_which_steps_it_leaves_out() -> None:
    """The first of them is the slowest: without it the rate is 7 % higher than in the summary and the report."""
    recording = open_recording("gpu-gpt2")
    source = RecordingSource(recording)
    rates = [measure_token_rate(source.job_steps[begin:], source.job_tokens[begin:]) for begin in (0, 5)]
    for warmup, rate, words in ((0, rates[0], ""), (5, rates[1], " after a warm-up of 5 steps")):
        budget = Budget(warmup_steps=warmup, tokens_per_second=1.0, iteration_seconds=1.0)
        sentences = [one.sentence for one in check_run(RecordedRun(recording, memory=False), budget)]
        assert f"{rate:,.0f} tokens per second{words}, at least 1 required." in sentences
        assert any(one.startswith(f"The median iteration{words} took 146 ms,") for one in sentences)
    assert rates[1] > 1.05 * rates[0]
