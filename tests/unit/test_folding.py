"""Folding old records: the figures of every step stay what they were, whatever happens on the way."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recordings
from counted_recordings import count_steps
from segmented_recordings import fold_at, unpack_segmented
from zerotop.analysis.processes.thinned import is_thinned_at
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.views.restarts import align_blocks, merge_before
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.outside.folding import coarse_samples, step_history
from zerotop_probe.outside.folding.coarse_samples import fold_periods
from zerotop_probe.recording.tables import PROCESSES

RECORDINGS = Path(__file__).parents[1] / "recordings"
# A restart, skipped updates, gradient accumulation, evaluation, checkpoints, offload, and ranks that were entered later.
NAMES = ("held-restart", "z2-fp16", "gpu-offload-4", "z2", "held-save", "gpu-z3-all", "x4-attached", "gpu-gpt2", "x4-z3")


@pytest.fixture
def few_notable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no step notable but the first one, so that as much as possible is deleted."""
    monkeypatch.setattr(step_history, "_FIRST_STEPS", 1)
    monkeypatch.setattr(step_history, "is_unlike_before", lambda record, before: False)


def assert_same(got: Any, expected: Any) -> None:
    assert len(got) == len(expected)
    for name in set(expected.dtype.names) - {"stages_s"}:  # it is not kept
        np.testing.assert_array_equal(got[name], expected[name], name)


def find_times(recording: Recording, count: int) -> list[int]:
    """Return moments from the begin of a recording to well after its end, on its own clock."""
    offset_ns = recording.sources["spans"][0].offset_ns
    return [int(time) - offset_ns for time in np.linspace(recording.begin_ns, recording.last_written_ns + 30e9, count)]


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_same_after_folding(name: str, tmp_path: Path, few_notable: None) -> None:
    folder = unpack_segmented(RECORDINGS / f"{name}.zerotop", tmp_path / "recording", full_detail_s=5)
    recording = Recording.open(folder)
    expected, files = read_steps(recording), len(list(folder.glob("*.s??????.rec")))
    for now_ns in find_times(recording, 5):
        fold_at(folder, now_ns)
        assert_same(read_steps(Recording.open(folder)), expected)
    assert len(list(folder.glob("*.s??????.rec"))) < files or name in ("z2-fp16", "z2", "held-save", "held-restart")
    assert sum(len(source.array) for source in Recording.open(folder).sources["folded"]) == len(expected)


def test_missing_steps_stay_missing_after_folding(tmp_path: Path, few_notable: None) -> None:
    """Steps that were lost, or recorded in part, are no long iteration after folding either, nor in blocks."""
    unpack = partial(unpack_segmented, RECORDINGS / "x4-z3.zerotop", full_detail_s=2, lost_steps=(5, 6), incomplete_step=9)
    folder = unpack(tmp_path / "recording")
    recording = Recording.open(folder)
    expected = read_steps(recording)
    assert sorted(expected["step"][np.isnan(expected["iteration_s"])]) == sorted([5, 6, 7, 9] * 4)
    for now_ns in find_times(recording, 6):
        fold_at(folder, now_ns)
        assert_same(read_steps(Recording.open(folder)), expected)
    folder = unpack(tmp_path / "small", max_bytes=100_000)
    for now_ns in find_times(recording, 6):
        fold_at(folder, now_ns)
    merged = read_steps(Recording.open(folder))
    assert len(merged) < len(expected)
    assert sorted(merged["step"][np.isnan(merged["iteration_s"])]) == sorted([5, 6, 7, 9] * 4)
    assert np.nanmax(merged["iteration_s"]) <= np.nanmax(expected["iteration_s"])


def interrupt_at(call: Callable[..., Any], moments: Iterator[bool]) -> Callable[..., Any]:
    def call_unless_interrupted(*arguments: Any, **options: Any) -> Any:
        if next(moments):
            raise KeyboardInterrupt
        return call(*arguments, **options)

    return call_unless_interrupted


def test_killed_at_every_change_of_a_file(tmp_path: Path, few_notable: None) -> None:
    """Nothing is lost and nothing is there twice, if the folding process dies before any change of a file."""
    folder = unpack_segmented(RECORDINGS / "gpu-gpt2.zerotop", tmp_path / "recording", full_detail_s=5)
    recording = Recording.open(folder)
    expected, kills = read_steps(recording), 0
    for now_ns in find_times(recording, 4):
        for alive in range(200):
            moments = iter([False] * alive + [True] * 1000)
            with pytest.MonkeyPatch.context() as patch:
                for name in ("unlink", "rename", "fsync", "open"):
                    patch.setattr(os, name, interrupt_at(getattr(os, name), moments))
                try:
                    fold_at(folder, now_ns)
                except KeyboardInterrupt:
                    kills += 1
                else:
                    break
            assert_same(read_steps(Recording.open(folder)), expected)
    assert kills > 5


def test_a_torn_record_is_removed(tmp_path: Path) -> None:
    folder = unpack_segmented(RECORDINGS / "gpu-gpt2.zerotop", tmp_path / "recording", full_detail_s=5)
    recording = Recording.open(folder)
    expected, times = read_steps(recording), find_times(recording, 3)
    fold_at(folder, times[1])
    (folded,) = folder.glob("folded-*.rec")
    folded.write_bytes(folded.read_bytes()[:-7])
    assert_same(read_steps(Recording.open(folder)), expected)
    fold_at(folder, times[2])
    assert_same(read_steps(Recording.open(folder)), expected)


def test_blocks_of_the_oldest_steps(tmp_path: Path) -> None:
    """If steps alone exceed the largest size, blocks have their sums, extremes and counts."""
    packed = RECORDINGS / "x4-z3.zerotop"
    folder = unpack_segmented(packed, tmp_path / "recording", full_detail_s=2, max_bytes=150_000)
    recording = Recording.open(folder)
    steps = read_steps(recording)
    for now_ns in find_times(recording, 6):
        fold_at(folder, now_ns)
    rows = read_steps(Recording.open(folder))
    assert 4 * 2 <= len(rows) < len(steps) == 4 * 16
    for rank in range(4):
        old, new = steps[steps["rank"] == rank], rows[rows["rank"] == rank]
        assert new["steps"].sum() == len(old)
        assert new["steps"][0] > 1
        firsts = np.cumsum(new["steps"]) - new["steps"]
        assert new["step"].tolist() == old["step"][firsts + new["steps"] - 1].tolist()
        for name in ("iteration_s", "data_s", "forward_s", "backward_s", "step_s", "optimizer_s", "eval_s", "tokens"):
            np.testing.assert_allclose(new[name] * new["steps"], np.add.reduceat(old[name], firsts), rtol=1e-9, atol=1e-9)
        for name in ("allocated_peak_bytes", "reserved_peak_bytes", "host_rss_bytes", "host_held_bytes"):
            np.testing.assert_array_equal(new[name], np.maximum.reduceat(old[name], firsts))
    view = RecordingSource(Recording.open(folder)).view_at(None)
    assert view.progress.finished_steps == 16
    assert view.iterations.step.tolist() == rows["step"][rows["rank"] == 0].tolist()


def test_counted_steps_stay_counted(tmp_path: Path, few_notable: None) -> None:
    counted = recordings.unpack_to_folder("gpu-gpt2", tmp_path)
    count_steps(counted, interval=8)
    folder = unpack_segmented(counted, tmp_path / "recording", full_detail_s=5)
    recording = Recording.open(folder)
    expected = read_steps(recording)
    assert expected["counted"].sum() > 50
    for now_ns in find_times(recording, 5):
        fold_at(folder, now_ns)
        assert_same(read_steps(Recording.open(folder)), expected)


def test_blocks_have_the_mean_phases_of_steps_with_phases(tmp_path: Path) -> None:
    counted = recordings.unpack_to_folder("gpu-gpt2", tmp_path)
    count_steps(counted, interval=8)
    folder = unpack_segmented(counted, tmp_path / "recording", full_detail_s=2, max_bytes=60_000)
    recording = Recording.open(folder)
    steps = read_steps(recording)
    for now_ns in find_times(recording, 6):
        fold_at(folder, now_ns)
    rows = read_steps(Recording.open(folder))
    block = rows["steps"] > 1
    assert block.any()
    ends = np.cumsum(rows["steps"])
    for row, begin, end in zip(rows, ends - rows["steps"], ends, strict=True):
        own = steps[begin:end]
        phased = own[~own["counted"]]
        assert row["iteration_s"] == pytest.approx(own["iteration_s"].mean())
        assert row["counted"] == (not len(phased))
        assert row["allocated_peak_bytes"] == own["allocated_peak_bytes"].max()
        for name in ("forward_s", "backward_s", "step_s"):
            assert row[name] == pytest.approx(phased[name].mean() if len(phased) else math.nan, nan_ok=True)
        for name in ("micro_steps", "rows", "tokens"):
            assert row[name] == (np.rint(phased[name].mean()) if len(phased) else -1)
    assert (block & rows["counted"]).any() or not rows["counted"][block].all()


@given(st.integers(0, 60), st.integers(0, 60), st.sampled_from([2, 4, 8]), st.sampled_from([1, 4, 16]), st.integers(0, 9))
def test_blocks_of_ranks_become_alike(first_end: int, second_end: int, first: int, second: int, late: int) -> None:
    rows = np.zeros(64, STEP_DTYPE)
    rows["step"], rows["steps"], rows["iteration_s"] = np.arange(64), 1, np.arange(64)
    rows["end_unix_ns"] = 10 * np.arange(64)

    def merge_from(begin: int, end: int, size: int) -> Any:
        own = rows[begin:]
        return merge_before(own, end // size * size, size)

    ranks = align_blocks([merge_from(0, first_end, first), merge_from(late, second_end, second), rows])
    assert [int(rank["steps"].sum()) for rank in ranks] == [64, 64 - late, 64]
    assert ranks[0]["step"].tolist() == ranks[2]["step"].tolist()
    assert ranks[1]["step"].tolist() == ranks[0]["step"][ranks[0]["step"] >= late].tolist()
    np.testing.assert_allclose((ranks[0]["iteration_s"] * ranks[0]["steps"]).sum(), rows["iteration_s"].sum())


def test_views_of_thinned_times(tmp_path: Path, few_notable: None) -> None:
    """Where detail is gone, views say so and show no older values; where it remains, they are the same."""
    folder = unpack_segmented(RECORDINGS / "gpu-gpt2.zerotop", tmp_path / "recording", full_detail_s=5)
    whole = Recording.open(folder)
    moments = [int(step["end_unix_ns"]) - 1_000_000 for step in read_steps(whole)[[20, 60, 119]]]
    before = [RecordingSource(whole).view_at(moment) for moment in moments]
    for now_ns in find_times(whole, 6)[:-1]:
        fold_at(folder, now_ns)
    recording = Recording.open(folder)
    after = [RecordingSource(recording).view_at(moment) for moment in moments]
    spans = recording.sources["spans"][0]
    thinned = [is_thinned_at(recording.at(moment), spans) for moment in moments]
    assert thinned == [True, True, False]
    for old, new, is_gone in zip(before, after, thinned, strict=True):
        assert new.progress.step == old.progress.step
        assert new.iterations.iteration_s.tolist() == old.iterations.iteration_s.tolist()
        assert any(notice.startswith("Here only") for notice in new.job.notices) == is_gone
        assert any("thinned out; times, peaks and counts remain" in notice for notice in new.job.notices)
        assert not any("thinned" in notice for notice in old.job.notices)
        assert [rank.alive for rank in new.ranks] == [rank.alive for rank in old.ranks]
        assert [rank.phase for rank in new.ranks] == ["" if is_gone else rank.phase for rank in old.ranks]
        for gpu, gpu_before in zip(new.gpus, old.gpus, strict=True):
            assert gpu.allocated_bytes == (None if is_gone else gpu_before.allocated_bytes)


def test_coarse_samples_of_processes() -> None:
    """Of a minute and process the mean of rates, the highest memory and the last counter remain."""
    names = [field.name for field in PROCESSES.fields]

    def make_row(time_s: float, pid: int, **values: float) -> tuple[Any, ...]:
        known = {"time_ns": int(time_s * 1e9), "pid": pid, "waiting_cores": math.nan, **values}
        return tuple(known.get(name, 0) for name in names)

    records = [
        make_row(1, 7, cores_used=1.0, rss_bytes=5, cpu_ns=10),
        make_row(1, 8, cores_used=math.nan, rss_bytes=1, cpu_ns=20),
        make_row(59, 7, cores_used=3.0, rss_bytes=9, cpu_ns=11),
        make_row(59.5, 8, cores_used=2.0, rss_bytes=1, cpu_ns=21),
        make_row(61, 7, cores_used=8.0, rss_bytes=2, cpu_ns=12),
    ]
    folded = [dict(zip(names, record, strict=True)) for record in fold_periods(records, PROCESSES, 60 * 10**9)]
    assert [(row["time_ns"], row["pid"]) for row in folded] == [
        (59_500_000_001, 7),
        (59_500_000_001, 8),
        (61_000_000_001, 7),
    ]
    assert [row["cores_used"] for row in folded] == [2.0, 2.0, 8.0]
    assert [row["rss_bytes"] for row in folded] == [9, 1, 2]
    assert [row["cpu_ns"] for row in folded] == [11, 21, 12]
    assert math.isnan(folded[0]["waiting_cores"])
    PROCESSES.record_struct.pack(*fold_periods(records, PROCESSES, 60 * 10**9)[0])


def test_coarse_samples_of_a_recording(tmp_path: Path, few_notable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand beside the fine samples that remain, and say their period."""
    monkeypatch.setattr(coarse_samples, "_PERIOD_NS", 5 * 10**9)
    folder = unpack_segmented(RECORDINGS / "x4-attached.zerotop", tmp_path / "recording", full_detail_s=5)
    whole = Recording.open(folder)
    (fine,) = whole.sources["gpus"]
    used, begin_ns = fine.array["used_bytes"].max(), fine.array["time_ns"][0]
    for now_ns in find_times(whole, 7):
        fold_at(folder, now_ns)
    recording = Recording.open(folder)
    by_period = {source.period_ns: source for source in recording.sources["gpus"]}
    assert set(by_period) == {0, 5 * 10**9}
    times = np.unique(by_period[5 * 10**9].array["time_ns"])
    assert (np.diff(times) <= 5.2e9).all()
    assert times[0] - begin_ns < 5.2e9
    assert len(by_period[0].array) < len(fine.array)
    assert by_period[5 * 10**9].array["used_bytes"].max() == used
