"""Ranks by steps, from recordings of ranks of which one differs."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from recordings import open_recording
from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from uneven_ranks import GIB, PERIOD_S, write_ranks
from zerotop.analysis.ranks import matrix
from zerotop.analysis.ranks.matrix import EMPTY_MATRIX, RankMatrices, RankMatrix, RankMetric, compute_median
from zerotop.analysis.ranks.outliers import compare_rank, compute_deviations, find_skew, measure_deviations, order_outliers
from zerotop.analysis.ranks.samples import RankSamples
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording.metrics import NUMBER, Metric
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, SPANS

NAN = np.nan


def build_matrix(folder: Path, at_s: float = 1e6, columns: int = 100, *, meets_in_forward: bool = False) -> RankMatrix:
    source = RecordingSource(read_recording(folder))
    cursor_ns = BEGIN_NS + int(at_s * S)
    return RankMatrices().matrix_at(source.rank_steps, cursor_ns, columns, meets_in_forward=meets_in_forward)


def test_steps_stand_under_one_another_by_their_number(tmp_path: Path) -> None:
    write_ranks(tmp_path, 3, 6, first_step={2: 4}, sampled=False)
    matrix = build_matrix(tmp_path)
    assert matrix.rank_numbers.tolist() == [0, 1, 2]
    assert matrix.host_names == ("node000",) * 3
    assert matrix.steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.isnan(matrix.times[RankMetric.FORWARD]).tolist() == [[False] * 6, [False] * 6, [True] * 4 + [False] * 2]
    assert matrix.times[RankMetric.FORWARD][0, 2] == pytest.approx(0.2)
    assert matrix.times[RankMetric.ITERATION][0, 2] == pytest.approx(PERIOD_S)


class MoreMetric(Enum):
    """What somebody may add to RankMetric."""

    TOKENS = Metric("tokens", NUMBER, "tokens", label="tokens")


def test_a_count_that_is_unknown_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_RECORDED_METRICS", (*matrix._RECORDED_METRICS, MoreMetric.TOKENS))
    write_ranks(tmp_path, 2, 6, sampled=False)
    assert np.isnan(build_matrix(tmp_path).times[MoreMetric.TOKENS]).all()  # type: ignore[index]


def test_steps_of_a_damaged_recording_may_go_back(tmp_path: Path) -> None:
    steps = (2**31 - 1, 3, 4, 2)
    spans = [make_span(at, at + 0.5, "step", step, BOUNDARY) for at, step in enumerate(steps)]
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    assert build_matrix(tmp_path, columns=1).steps.tolist() == [2]
    assert build_matrix(tmp_path, columns=3).steps.tolist() == [2]
    assert build_matrix(tmp_path, columns=4).steps.tolist() == [2]


def test_only_steps_that_ended_before_the_cursor_are_known(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 6, sampled=False)
    assert build_matrix(tmp_path, 2.5).steps.tolist() == [0, 1]
    assert build_matrix(tmp_path, 5.97, columns=2).steps.tolist() == [4, 5]
    nothing = build_matrix(tmp_path, 0.5)
    assert len(nothing.processes) == 2
    assert not nothing.times
    assert not build_matrix(tmp_path, -1.0).processes


def test_the_same_until_another_step_is_over(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 6, sampled=False)
    source, matrices = RecordingSource(read_recording(tmp_path)), RankMatrices()
    at = [
        matrices.matrix_at(source.rank_steps, BEGIN_NS + int(seconds * S), 9, meets_in_forward=False)
        for seconds in (3.1, 3.5, 4.1)
    ]
    assert at[0] is at[1]
    assert at[1] is not at[2]


def test_a_job_that_was_started_again_is_another(tmp_path: Path) -> None:
    """The second attempt's ranks are looked at from when the first of them was born."""
    for pid, born in ((100, 0.0), (200, 50.0)):
        for rank in (0, 1):
            spans = [make_span(born + step, born + step + 0.5, "step", step, BOUNDARY) for step in range(pid // 100)]
            write_table(tmp_path, SPANS, make_identity(rank, pid=pid + rank), *spans, born=born).close()
    assert build_matrix(tmp_path, 40).counts == (1, 1)
    assert build_matrix(tmp_path, 60).counts == (2, 2)


def test_the_one_who_is_late_is_waited_for(tmp_path: Path) -> None:
    write_ranks(tmp_path, 4, 5, late_s={2: 0.02}, sampled=False)
    waits = build_matrix(tmp_path).times[RankMetric.WAIT]
    assert waits[2, 1:] == pytest.approx([0.02] * 4, abs=1e-4)
    assert waits[[0, 1, 3]].max() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("phase", ["", "checkpoint_save"])
def test_pauses_in_steps_of_which_few_have_phases(tmp_path: Path, phase: str) -> None:
    """Rank 0 pauses in each fourth step, the other one waits in its backward; each recorded the phases of other steps."""
    for rank in (0, 1):
        at, spans = 0.0, []
        for step in range(61):
            pause = 0.3 if step % 4 == 0 else 0.0
            parts = (("forward", 0.03), ("backward", 0.05 + pause * rank), ("step", 0.02))
            if phase and pause and rank == 0:
                spans.append(make_span(at, at + pause, phase, step))
            at += pause * (1 - rank)
            for name, seconds in parts if step % 5 == rank else parts[-1:]:
                at += sum(length for _, length in parts[:2]) if step % 5 != rank else 0.0
                flags = BOUNDARY | (COUNTED if step % 5 != rank else 0) if name == "step" else 0
                spans.append(make_span(at, at + seconds, name, step, flags))
                at += seconds
        write_table(tmp_path, SPANS, make_identity(rank), *spans).close()
    matrix = build_matrix(tmp_path)
    usual = {metric: values.tolist() for metric, values in matrix.usual_times.items()}
    assert matrix.figured_steps < 20
    assert usual[RankMetric.WAIT] == pytest.approx([0.075, 0.0], abs=0.003)
    assert usual[RankMetric.APART] == pytest.approx([0.075 if phase else 0.0, 0.0], abs=0.003)
    assert usual[RankMetric.ITERATION][1] == pytest.approx(0.175, abs=0.003)
    assert sum(usual[one][0] for one in (RankMetric.ITERATION, RankMetric.APART)) == pytest.approx(0.175, abs=0.003)
    phases = [
        usual[one] for one in (RankMetric.DATA, RankMetric.FORWARD, RankMetric.BACKWARD, RankMetric.STEP, RankMetric.OTHER)
    ]
    assert np.sum(phases, axis=0) == pytest.approx(usual[RankMetric.ITERATION])
    skew = find_skew(matrix)
    assert skew is not None
    assert (skew.row, skew.delays_others) == (0, True)


def test_where_ranks_meet_in_forward_it_is_not_theirs_alone(tmp_path: Path) -> None:
    for rank, forward in ((0, 0.2), (1, 0.5)):
        spans = []
        for step in range(3):
            spans.append(make_span(step, step + forward, "forward", step))
            spans.append(make_span(step + forward, step + 0.9, "step", step, BOUNDARY))
        write_table(tmp_path, SPANS, make_identity(rank), *spans).close()
    assert build_matrix(tmp_path).times[RankMetric.WAIT][1, 2] == pytest.approx(0.3, abs=1e-4)
    assert build_matrix(tmp_path, meets_in_forward=True).times[RankMetric.WAIT][1, 2] == pytest.approx(0, abs=1e-4)


def test_each_step_has_the_samples_taken_in_it(tmp_path: Path) -> None:
    write_ranks(tmp_path, 10, 6, more_bytes={9: 2 * GIB})
    recording = read_recording(tmp_path)
    source, samples, matrices = RecordingSource(recording), RankSamples(recording), RankMatrices()
    matrix = matrices.matrix_at(source.rank_steps, BEGIN_NS + 100 * S, 10, meets_in_forward=False)
    peak = samples.read_metric(RankMetric.PEAK, matrix)
    assert peak[0].tolist() == [30 * GIB] * 6
    assert peak[9].tolist() == [32 * GIB] * 6
    free = samples.read_metric(RankMetric.FREE, matrix)
    assert free[:, 3].tolist() == [(140 - 50 - rank % 8) * GIB for rank in range(10)]
    cores = samples.read_metric(RankMetric.CORES, matrix)
    assert cores[:, 3] == pytest.approx([1 + rank % 8 for rank in range(10)], rel=1e-3)
    assert samples.read_metric(RankMetric.PEAK, matrix) is peak
    assert all(samples.is_recorded(metric) for metric in RankMetric)


def test_memory_is_the_highest_peak_and_the_least_free_of_the_recent_steps() -> None:
    """As on the memory screen: memory that grows is at its most in the last steps, which a median leaves out."""
    matrix = replace(EMPTY_MATRIX, steps=np.arange(6), recent_count=4)
    grown = np.array([[90, 40, 42, np.nan, 50, 52], [np.nan] * 6], np.float32)
    assert matrix.find_usual(RankMetric.PEAK, grown).tolist() == pytest.approx([52, np.nan], nan_ok=True)
    assert matrix.find_usual(RankMetric.FREE, 100 - grown).tolist() == pytest.approx([48, np.nan], nan_ok=True)
    assert matrix.find_usual(RankMetric.CORES, grown).tolist() == pytest.approx([50, np.nan], nan_ok=True)


def test_earlier_rows_stay_the_same_as_steps_go_on(tmp_path: Path) -> None:
    write_ranks(tmp_path, 3, 8)
    recording = read_recording(tmp_path)
    source, matrices = RecordingSource(recording), RankMatrices()

    def read_cores(seconds: float, samples: RankSamples) -> np.ndarray:
        now = matrices.matrix_at(source.rank_steps, BEGIN_NS + int(seconds * S), 4, meets_in_forward=False)
        return samples.read_metric(RankMetric.CORES, now)

    kept = RankSamples(recording)
    for seconds in (3.1, 4.1, 6.1, 2.1, 8.5):
        assert read_cores(seconds, kept) == pytest.approx(read_cores(seconds, RankSamples(recording)), nan_ok=True)


def test_without_samples_there_is_nothing_to_tell(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 4, sampled=False)
    samples, found = RankSamples(read_recording(tmp_path)), build_matrix(tmp_path)
    for metric in (RankMetric.PEAK, RankMetric.FREE, RankMetric.CORES):
        assert not samples.is_recorded(metric)
        assert np.isnan(samples.read_metric(metric, found)).all()


def test_the_rank_that_is_different_stands_first(tmp_path: Path) -> None:
    write_ranks(tmp_path, 6, 8, late_s={4: 0.2, 1: 0.1}, sampled=False)
    matrix = build_matrix(tmp_path)
    waits = matrix.times[RankMetric.WAIT]
    order = order_outliers(measure_deviations(matrix, RankMetric.WAIT, waits))
    assert order.tolist() == [4, 1, 0, 2, 3, 5]
    iteration = matrix.times[RankMetric.ITERATION]
    assert not measure_deviations(matrix, RankMetric.ITERATION, iteration).any()  # they wait for one another


def test_the_cause_is_named_not_its_effect(tmp_path: Path) -> None:
    write_ranks(tmp_path, 6, 8, late_s={4: 0.2}, sampled=False)
    matrix = build_matrix(tmp_path)
    skew = find_skew(matrix)
    assert skew is not None
    assert (skew.metric, skew.row, skew.is_waited_for, skew.is_alike) == (RankMetric.DATA, 4, True, False)
    assert skew.lag_s == pytest.approx(0.2, rel=0.2)
    beside = compare_rank(matrix, 4, RankMetric.DATA, matrix.times[RankMetric.DATA])
    assert not beside.is_alike
    assert beside.own - beside.usual == pytest.approx(skew.lag_s)


def test_of_two_ranks_the_late_one_is_named(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 8, late_s={1: 0.1}, sampled=False)
    skew = find_skew(build_matrix(tmp_path))
    assert skew is not None
    assert (skew.metric, skew.row) == (RankMetric.DATA, 1)


@pytest.mark.parametrize("unknown", [1, 3])
def test_a_difference_never_begins_with_steps_that_were_only_counted(tmp_path: Path, unknown: int) -> None:
    """The last steps of a job may be counted ones: their phases are unknown."""
    write_ranks(tmp_path, 2, 12, late_s={1: 0.004}, sampled=False)
    matrix = build_matrix(tmp_path)
    for metric, times in matrix.times.items():
        if metric is not RankMetric.ITERATION:
            times[:, -unknown:] = np.nan
            times[1, -unknown - 3 : -unknown : 2] = times[0, -unknown - 3 : -unknown : 2]  # not late in the last known one
    skew = find_skew(matrix)
    assert skew is not None
    assert not np.isnan([skew.own_s, skew.usual_s, skew.lag_s, skew.iteration_share]).any()


def test_counted_steps_are_estimated_alike_in_the_sentence_and_in_the_table(tmp_path: Path) -> None:
    """From the steps since the difference began only, not from those before, which took as long."""
    write_ranks(tmp_path, 2, 40, late_s={1: 0.1}, sampled=False)
    matrix = build_matrix(tmp_path)
    counted, iterations = np.arange(-24, 0, 3), matrix.times[RankMetric.ITERATION]
    for times in matrix.times.values():
        times[1, :-25] = times[0, :-25]
        if times is not iterations:
            times[:, counted] = np.nan
    iterations[:, -25:] *= 1.01
    iterations[:, counted] = iterations[:, 5:6]
    skew = find_skew(matrix)
    assert skew is not None
    assert skew.since_step is not None
    assert skew.timed_steps < skew.steps
    beside = compare_rank(matrix.cut_to(skew.steps), skew.row, skew.metric, matrix.times[skew.metric])
    assert (skew.own_s, skew.usual_s) == pytest.approx((beside.own, beside.usual))


def test_a_difference_is_told_from_enough_steps_of_both_ranks_and_out_of_their_spread(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 40, late_s={1: 0.1}, sampled=False)
    matrix = build_matrix(tmp_path)
    late = find_skew(matrix)
    assert late is not None
    assert late.delays_others
    noise = np.where(np.arange(matrix.recent_count) % 10 == 0, 0.9, -0.1)  # as long on average, in few steps
    data = matrix.times[RankMetric.DATA].copy()
    data[1, -matrix.recent_count :] += noise
    vague = find_skew(replace(matrix, times=matrix.times | {RankMetric.DATA: data}))
    assert vague is not None
    assert (vague.is_clear, vague.is_alike, vague.delays_others) == (False, True, False)
    for metric, times in matrix.times.items():
        if metric is not RankMetric.ITERATION:
            times[0, 5:] = np.nan
    few = find_skew(replace(matrix))
    assert few is not None
    assert (few.fewest_timed, few.is_well_known, few.is_alike) == (4, False, True)


def test_ranks_that_are_alike_are_reported_to_be(tmp_path: Path) -> None:
    write_ranks(tmp_path, 4, 8, sampled=False)
    skew = find_skew(build_matrix(tmp_path))
    assert skew is not None
    assert skew.is_alike
    assert find_skew(build_matrix(tmp_path, 0.5)) is None


def test_one_rank_has_no_other_to_compare_with(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1, 4, sampled=False)
    assert find_skew(build_matrix(tmp_path)) is None


def test_skipped_steps_are_not_compared_with_those_that_train() -> None:
    source = RecordingSource(open_recording("story"))
    skipping, last = source.find_step_end(9), source.find_step_end(13)
    assert skipping is not None
    assert last is not None
    within = RankMatrices().matrix_at(source.rank_steps, skipping, 100, meets_in_forward=False)
    assert within.recent_steps.tolist() == list(range(1, 10))  # the first step starts up
    after = RankMatrices().matrix_at(source.rank_steps, last, 100, meets_in_forward=False)
    assert after.recent_steps.tolist() == [10, 11, 12, 13]
    assert after.usual_times[RankMetric.ITERATION] == pytest.approx(3.14, abs=0.05)


def test_medians_leave_out_what_is_not_known() -> None:
    values = np.array([[1, NAN, 3, 2], [NAN, NAN, NAN, NAN], [4, 1, 2, 3]], np.float32)
    assert compute_median(values, 1).tolist() == pytest.approx([2, NAN, 2], nan_ok=True)
    assert compute_median(values, 0).tolist() == pytest.approx([1, 1, 2, 2])
    assert compute_median(np.empty((2, 0), np.float32), 1).tolist() == pytest.approx([NAN, NAN], nan_ok=True)


def test_noise_is_no_difference() -> None:
    chance = np.random.default_rng(0)
    for ranks in (2, 3, 8):
        values = chance.normal(1.0, 0.1, (ranks, 64)).astype(np.float32)
        assert not compute_deviations(values, 0.03).any()
        values[1, 10] += 3.0  # once, but far
        assert np.flatnonzero(compute_deviations(values, 0.03)).tolist() == [1]
        values[1] = NAN
        assert not compute_deviations(values, 0.03).any()


def test_who_came_late_is_compared_in_the_steps_it_has() -> None:
    values = np.tile(np.linspace(1.0, 9.0, 20, dtype=np.float32), (4, 1))  # all get slower together
    values[2, :15] = NAN
    assert not compute_deviations(values, 0.15).any()


def test_phases_are_estimated_in_pieces_and_only_for_counted_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks at once would need a table of steps by steps for each of thousands."""
    source = RecordingSource(open_recording("hand-rank0"))
    whole = RankMatrices().matrix_at(source.rank_steps, 2**62, 64, meets_in_forward=False)
    monkeypatch.setattr(matrix, "_ESTIMATED_RANKS", 1)
    pieces = RankMatrices().matrix_at(source.rank_steps, 2**62, 64, meets_in_forward=False)
    for metric, times in whole.figured_times.items():
        assert np.array_equal(times, pieces.figured_times[metric], equal_nan=True)
    assert whole.figured_steps < whole.recent_count, "some are estimated"
    assert np.isnan(whole.times[RankMetric.OTHER]).any(), "what was recorded stays"

    def refuse(*_: object) -> None:
        raise AssertionError("no step was only counted")

    monkeypatch.setattr(matrix, "_estimate_phases", refuse)
    write_ranks(tmp_path, 2, 6, sampled=False, first_step={1: 2})  # the second rank's first steps are not known
    steps = RecordingSource(read_recording(tmp_path)).rank_steps
    later = RankMatrices().matrix_at(steps, 2**62, 64, meets_in_forward=False)
    assert np.isnan(later.figured_times[RankMetric.ITERATION]).any()
