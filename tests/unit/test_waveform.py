"""Folding iterations: against made-up sensors whose truth is known, and against what real recordings must show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recordings import open_recording
from sensor_recording import INNER, PLAN, Job
from small_recording import BEGIN_NS, S, make_identity, make_record, read_recording, write_table
from zerotop.analysis.waveform.alignment import choose_iterations, find_rate_change
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.fold_cache import WaveformCache, choose_next_size
from zerotop.analysis.waveform.phase_bounds import build_row
from zerotop.analysis.waveform.signals import Signal
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import StepTable
from zerotop.ui.iteration import labels
from zerotop_probe.recording.tables import PROCESSES, SPANS


def fold_recording(folder: Path, **options: object) -> WaveformFold:
    """The fold at the end."""
    fold = WaveformCache(read_recording(folder)).fold_at(BEGIN_NS + 10**6 * S, **options)  # type: ignore[arg-type]
    assert fold is not None
    return fold


def find_phase(fold: WaveformFold, phase: str) -> tuple[float, float]:
    """Where a phase lies in the fold."""
    (row,) = [row for row in fold.phases if row.phase == phase]
    return row.intervals[0]


def compute_mean(fold: WaveformFold, signal: str, phase: str, trim: float = 0.0) -> float:
    """What a signal is in a phase, less this share at each end."""
    begin, end = find_phase(fold, phase)
    return fold.signals[signal].compute_mean(begin + trim * (end - begin), end - trim * (end - begin))


def test_phases_of_a_third_of_a_second_are_distinguished_by_sensors_that_look_back_for_most_of_it(tmp_path: Path) -> None:
    Job(300).write_recording(tmp_path)
    fold = fold_recording(tmp_path)
    assert 290 < fold.iterations <= 300
    assert fold.iteration_s == pytest.approx(0.344, rel=0.02)
    for phase, (seconds, used, cores, watts, to_host, to_gpu) in PLAN.items():
        begin, end = find_phase(fold, phase)
        assert end - begin == pytest.approx(seconds, rel=0.1)
        assert compute_mean(fold, "utilization", phase) == pytest.approx(used, abs=12)
        assert compute_mean(fold, "cores", phase) == pytest.approx(cores, abs=0.9)
        assert compute_mean(fold, "power", phase, 0.3) == pytest.approx(watts, rel=0.15, abs=30)
        assert compute_mean(fold, "to_host", phase) == pytest.approx(to_host, abs=1.5e9)
        assert compute_mean(fold, "to_gpu", phase) == pytest.approx(to_gpu, abs=2.5e9)


def test_the_mean_of_the_sensors_is_preserved(tmp_path: Path) -> None:
    job = Job(100)
    job.write_recording(tmp_path)
    fold = fold_recording(tmp_path)
    true = [job.compute_mean(column, job.spans[0][0], job.end) for column in (0, 1, 3)]
    for name, value in zip(("utilization", "cores", "to_host"), true, strict=True):
        assert fold.signals[name].compute_mean(0.0, fold.iteration_s) == pytest.approx(value, rel=0.04)


def test_the_band_holds_the_median_and_is_within_bounds(tmp_path: Path) -> None:
    Job(60).write_recording(tmp_path)
    for name, signal in fold_recording(tmp_path).signals.items():
        assert (signal.low <= signal.median + 1e-9).all(), name
        assert (signal.median <= signal.high + 1e-9).all(), name
        assert (signal.low >= 0).all()
        assert (np.diff(signal.position_s) >= 0).all()
    assert (fold_recording(tmp_path).signals["utilization"].high <= 100).all()


def test_iterations_far_shorter_than_a_window_show_the_mean_and_say_so(tmp_path: Path) -> None:
    job = Job(400, scale=0.1)
    job.write_recording(tmp_path)
    used = fold_recording(tmp_path).signals["utilization"]
    assert not used.resolved
    assert used.compute_mean(0.0, 0.0344) == pytest.approx(job.compute_mean(0, 11.0, job.end - 1), abs=6)


def test_allocated_is_exact_where_phases_begin(tmp_path: Path) -> None:
    Job(40).write_recording(tmp_path)
    fold = fold_recording(tmp_path)
    held = fold.signals["allocated"]
    begin, end = find_phase(fold, "backward")
    at = [np.interp(place, held.position_s, held.median) for place in (begin, (begin + end) / 2)]
    assert at == pytest.approx([2000, 1000], abs=60)


def test_ranks_are_folded_together_and_cores_added_up(tmp_path: Path) -> None:
    Job(80).write_recording(tmp_path, ranks=3)
    whole, one = fold_recording(tmp_path), fold_recording(tmp_path, rank=1)
    assert (whole.ranks, whole.world, whole.gpu_count, whole.process_count) == ((0, 1, 2), 3, 3, 3)
    assert (one.ranks, one.gpu_count, one.process_count) == ((1,), 1, 1)
    assert compute_mean(whole, "cores", "cpu_optimizer") == pytest.approx(42, abs=3)
    assert compute_mean(one, "cores", "cpu_optimizer") == pytest.approx(14, abs=1)
    assert compute_mean(whole, "utilization", "forward") == pytest.approx(100, abs=12)


class LateReadings(Job):
    """A job of which a third of the samples are read 30 ms late."""

    def _make_process_samples(self, now: float, ranks: int) -> list[object]:
        late = 0.03 * (round(now * 10) % 3 == 0)
        cores = self.compute_mean(1, now - 0.1 + late, now + late)
        known = {"cores_used": cores, "busy_threads": 14 if cores >= 7 else 1}
        return [make_record(PROCESSES, time_ns=int(now * S), rss_bytes=10**9, pid=100, rank=0, **known)]


def test_no_phase_uses_more_cores_than_its_threads_can(tmp_path: Path) -> None:
    LateReadings(150).write_recording(tmp_path)
    fold = fold_recording(tmp_path)
    assert fold.signals["cores"].median.max() <= 14
    assert compute_mean(fold, "cores", "cpu_optimizer") == pytest.approx(14, abs=1)


def test_skipped_and_long_iterations_are_left_out_and_counted(tmp_path: Path) -> None:
    Job(60, skip=10, long=12).write_recording(tmp_path)
    fold = fold_recording(tmp_path, number=100)
    assert not fold.skipped
    assert fold.left_out["long"] == 2
    assert fold.iterations == 48
    assert (fold.first_step, fold.last_step) == (12, 59)


def test_of_one_iteration_there_is_no_mean(tmp_path: Path) -> None:
    Job(60, skip=10, long=12).write_recording(tmp_path)
    fold = fold_recording(tmp_path, number=100)
    assert labels.describe_fold(fold) == "mean of 48, steps 12–59"
    assert labels.describe_fold(replace(fold, iterations=1, first_step=59)) == "step 59"
    assert labels.describe_fold(replace(fold, iterations=1, first_step=59, skipped=True)) == "skipped step 59"


def test_skipped_iterations_are_folded_while_there_are_no_others(tmp_path: Path) -> None:
    job = Job(30, skip=10)
    job.write_recording(tmp_path)
    waveforms = WaveformCache(read_recording(tmp_path))
    tenth = next(begin for begin, _, _, step in job.spans if step == 10)
    early = waveforms.fold_at(BEGIN_NS + int(tenth * S))
    assert early is not None
    assert early.skipped
    assert early.iterations == 10
    assert early.left_out == {}
    assert "cpu_optimizer" not in {row.phase for row in early.phases}


def test_the_level_since_the_last_shift_is_folded(tmp_path: Path) -> None:
    first, second = Job(40), Job(40, scale=2.0)
    rows: Any = first.spans_of()
    late_rows: Any = second.spans_of()
    later = [
        (
            record[0] + int((first.end - 10) * S),
            record[1] + int((first.end - 10) * S),
            record[2],
            record[3] + 40,
            *record[4:],
        )
        for record in late_rows
    ]
    write_table(tmp_path, SPANS, make_identity(0), *rows, *later).close()
    fold = fold_recording(tmp_path)
    assert (fold.first_step, fold.last_step) == (40, 79)
    assert fold_recording(tmp_path, number=20).first_step == 60
    assert fold_recording(tmp_path, number=60).first_step == 20


def test_nothing_recorded_gives_nothing(tmp_path: Path) -> None:
    waveforms = WaveformCache(read_recording(tmp_path))
    assert waveforms.fold_at(BEGIN_NS) is None
    assert not waveforms.has_steps(BEGIN_NS)


def test_without_samplers_there_are_phases_all_the_same(tmp_path: Path) -> None:
    write_table(tmp_path, SPANS, make_identity(0), *Job(12).spans_of()).close()
    fold = fold_recording(tmp_path)
    assert fold.signals == {}
    assert [row.phase for row in fold.phases] == ["forward", "backward", "step", *INNER, "other"]
    assert sum(row.share for row in fold.phases if row.depth == 0) == pytest.approx(1.0, abs=0.02)


def test_a_fold_is_kept_while_no_iteration_is_finished_and_while_it_rests(tmp_path: Path) -> None:
    job = Job(50)
    job.write_recording(tmp_path)
    now = [0.0]
    waveforms = WaveformCache(read_recording(tmp_path), clock=lambda: now[0])
    ends = [end for _, end, phase, _ in job.spans if phase == "params_to_gpu"]
    first = waveforms.fold_at(BEGIN_NS + int(ends[30] * S) + 10**6)
    assert waveforms.fold_at(BEGIN_NS + int(ends[30] * S) + 10**7) is first
    assert waveforms.fold_at(BEGIN_NS + int(ends[31] * S) + 10**6, hurry=False) is first
    now[0] += 10
    assert waveforms.fold_at(BEGIN_NS + int(ends[31] * S) + 10**6, hurry=False) is not first
    assert waveforms.fold_at(BEGIN_NS + int(ends[30] * S) + 10**6) is first


def test_a_cursor_in_the_past_knows_nothing_of_later(tmp_path: Path) -> None:
    job = Job(50)
    job.write_recording(tmp_path)
    cursor = BEGIN_NS + int(next(begin for begin, _, _, step in job.spans if step == 20) * S)
    fold = WaveformCache(read_recording(tmp_path)).fold_at(cursor)
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    Job(20).write_recording(shorter)
    alone = fold_recording(shorter)
    assert fold is not None
    assert fold.last_step == alone.last_step == 19
    assert fold.iteration_s == pytest.approx(alone.iteration_s)


def test_a_step_on_in_a_long_run_seldom_folds_anew(tmp_path: Path) -> None:
    job = Job(200)
    job.write_recording(tmp_path, gpu=False)
    waveforms = WaveformCache(read_recording(tmp_path))
    ends = [end for _, end, phase, _ in job.spans if phase == "params_to_gpu"]
    folds = [waveforms.fold_at(BEGIN_NS + int(end * S) + 10**6) for end in ends[150:200]]
    assert len({id(fold) for fold in folds}) <= 14
    assert all(fold is not None and step - 4 < fold.last_step <= step for step, fold in enumerate(folds, 150))


def test_more_or_fewer_iterations() -> None:
    assert choose_next_size(20, None, 1) == 50
    assert choose_next_size(20, None, -1) == 10
    assert choose_next_size(3, None, -1) == 3
    assert choose_next_size(5000, None, 1) == 5000


def find_hills(signal: Signal, above: float) -> list[tuple[float, float]]:
    """Where it lies above a value for a while."""
    at = np.linspace(0, signal.position_s[-1], 2001)
    high = np.interp(at, signal.position_s, signal.median) > above
    edges = np.flatnonzero(np.diff(np.concatenate(([0], high.astype(int), [0]))))
    found = zip(at[edges[::2]].tolist(), at[edges[1::2] - 1].tolist(), strict=True)
    return [(begin, end) for begin, end in found if end - begin > 0.01 * signal.position_s[-1]]


def test_the_double_spike_of_an_iteration_of_a_third_of_a_second() -> None:
    recording = open_recording("z2-offload")
    fold = WaveformCache(recording).fold_at(recording.last_written_ns)
    assert fold is not None
    assert 0.30 < fold.iteration_s < 0.36
    step, backward = find_phase(fold, "step"), find_phase(fold, "backward")
    # The plateau: from where gradients go to the CPU until the step is over, and nowhere else.
    ((begin, end),) = find_hills(fold.signals["cores"], 8.0)
    assert begin == pytest.approx(step[0], abs=0.01)
    assert end == pytest.approx(find_phase(fold, "params_to_gpu")[1], abs=0.01)
    assert compute_mean(fold, "cores", "cpu_optimizer") > 13
    assert compute_mean(fold, "cores", "backward") < 2
    # The GPU works before it, computes little in it, and draws no more than when idle.
    assert compute_mean(fold, "utilization", "backward") > 2 * compute_mean(fold, "utilization", "cpu_optimizer")
    assert compute_mean(fold, "power", "backward") > 165 > 135 > compute_mean(fold, "power", "params_to_gpu")
    # Gradients go up before, parameters come back after: two hills with the plateau between.
    sent, received = find_hills(fold.signals["to_host"], 5e9), find_hills(fold.signals["to_gpu"], 15e9)
    assert sent[0][0] < backward[1]
    assert sent[-1][1] < find_phase(fold, "cpu_optimizer")[0] + 0.02
    assert all(begin >= find_phase(fold, "params_to_gpu")[0] - 0.01 for begin, _ in received)
    assert received


def test_the_story_is_two_hills_with_63_cores_between() -> None:
    recording = open_recording("story")
    fold = WaveformCache(recording).fold_at(recording.last_written_ns)
    assert fold is not None
    assert (fold.first_step, fold.last_step, fold.gpu_count, fold.host_cores) == (11, 13, 4, 64)
    (first, second) = find_hills(fold.signals["utilization"], 50)
    assert first == pytest.approx((0.0, 0.9), abs=0.08)
    assert second[1] == pytest.approx(fold.iteration_s, abs=0.02)
    assert second[0] > 2.3
    plateau = find_hills(fold.signals["cores"], 40)
    assert plateau[0][0] == pytest.approx(0.89, abs=0.06)
    assert plateau[-1][1] == pytest.approx(2.55, abs=0.06)
    assert 60 < compute_mean(fold, "cores", "cpu_optimizer") <= 64


def test_device_times_are_those_of_the_phase() -> None:
    recording = open_recording("z2-offload")
    fold = WaveformCache(recording).fold_at(recording.last_written_ns)
    assert fold is not None
    rows = {row.phase: row for row in fold.phases}
    assert rows["backward"].device_s == pytest.approx(rows["backward"].mean_s, rel=0.05)
    assert np.isnan(rows["other"].device_s)


def test_device_times_of_few_iterations_are_scaled_to_the_mean_of_all() -> None:
    """One of ten was measured, which took longer than the others on the host, too."""
    seconds, on_device = np.full(10, 0.05), np.full(10, np.nan)
    seconds[3], on_device[3] = 0.10, 0.08
    row = build_row("forward", 0, 1, seconds, on_device, 1.0, ())
    assert row.device_s == pytest.approx(0.8 * row.mean_s)
    assert np.isnan(build_row("forward", 0, 1, seconds, np.full(10, np.nan), 1.0, ()).device_s)


@pytest.mark.parametrize("name", ["unseen-drift", "hand-foreach", "story", "x4-z3", "cpu-clean"])
def test_phases_and_their_shares_add_up_to_the_iteration(name: str) -> None:
    recording = open_recording(name)
    fold = WaveformCache(recording).fold_at(recording.last_written_ns)
    assert fold is not None
    outer = [row for row in fold.phases if not row.depth]
    assert sum(row.mean_s for row in outer) == pytest.approx(fold.iteration_s, rel=1e-6)
    for row in outer:
        assert sum(end - begin for begin, end in row.intervals) == pytest.approx(row.mean_s, rel=1e-6)
    assert sum(row.share for row in outer) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "name", ["cpu-clean", "cpu-dead", "cpu-stall", "gpu-long", "x4-z3", "z2-oom", "z2-fp16", "z3-offload-all"]
)
def test_any_recording_folds(name: str) -> None:
    recording = open_recording(name)
    waveforms = WaveformCache(recording)
    for share in (0.0, 0.3, 0.7, 1.0):
        cursor = recording.begin_ns + int(share * (recording.last_written_ns - recording.begin_ns))
        fold = waveforms.fold_at(cursor)
        if fold is not None:
            assert all(np.isfinite(signal.median).all() for signal in fold.signals.values())


@pytest.mark.parametrize(
    ("is_long", "since"),
    [
        ([0] * 100 + [1, 0, 0, 0] * 20, 100),  # pauses begin
        ([1, 0, 0, 0] * 20 + [0] * 100, 77),  # and end
        ([1] + [0] * 100, 0),  # the first one compiles
        ([0] * 100 + [1], 0),
        ([1, 0, 0, 0] * 40, 0),
        ([0], 0),
    ],
)
def test_where_long_iterations_become_more_frequent_another_pace_begins(is_long: list[int], since: int) -> None:
    assert find_rate_change(np.array(is_long, np.bool_)) == since


def test_choosing_from_nothing() -> None:
    table = StepTable(open_recording("cpu-clean"))
    table.update()
    rows = table.rank_steps[0].step_rows
    assert len(choose_iterations(rows[:0], None).indices) == 0
    assert choose_iterations(rows[:1], None).indices.tolist() == [0]


def make_phased(seconds: list[float], phased: set[int]) -> Any:
    """Return steps of which only some were recorded with their phases."""
    rows = np.zeros(len(seconds), STEP_DTYPE)
    rows["step"], rows["iteration_s"] = np.arange(len(seconds)), seconds
    rows["counted"] = [step not in phased for step in range(len(seconds))]
    return rows


def test_steps_of_the_present_pace_are_folded_where_steps_with_phases_have_another() -> None:
    """After each twenty steps the script waits for the GPU, and the next three return before their work is done."""
    seconds = [0.072 if step % 20 == 0 else 0.014 if 1 <= step % 20 <= 3 else 0.030 for step in range(200)]
    chosen = choose_iterations(make_phased(seconds, {1, 2, 3, 5, 6, 7, 41, 42, 101, 102, 150}), None)
    assert chosen.indices.tolist() == [5, 6, 7, 150]
    assert chosen.left_out["pace"] == 4


def test_two_levels_are_never_folded_together() -> None:
    seconds = [0.025] * 130 + [0.056] * 40
    before, after = {1, 2, 3, 4, 5, 6, 40, 123}, {132, 150}
    assert choose_iterations(make_phased(seconds, before | after), None).indices.tolist() == [132, 150]
    assert choose_iterations(make_phased(seconds, before), None).indices.tolist() == sorted(before)
    many = [0.025] * 60 + [0.040] * 60 + [0.090] * 50
    assert choose_iterations(make_phased(many, {1, 2, 3, 4, 70, 80, 90}), None).indices.tolist() == [70, 80, 90]


def test_long_steps_are_those_far_longer_than_all_steps_meanwhile() -> None:
    """Where each batch has another size, short ones among those with phases are no measure."""
    seconds = [[0.08, 0.13, 0.13, 0.17][step % 4] for step in range(60)]
    chosen = choose_iterations(make_phased(seconds, {0, 4, 8, 11, 12, 40}), None)
    assert "long" not in chosen.left_out
