"""Overviews: equal to the whole recording's values, read from a part of it, cached until it changes, never a crash."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import recordings
from zerotop.analysis.reports.comparison import compare_paths
from zerotop.analysis.reports.recording_index import Overviews
from zerotop.analysis.reports.recording_summary import PIECES, Overview, build_overview, resample_longest
from zerotop.recording import quick_read
from zerotop.recording.packed.packing import pack_folder
from zerotop.recording.storage import Directory
from zerotop_probe.recording import directory


def nobody_runs(path: Path) -> bool:
    return False


@pytest.fixture
def recording_root(tmp_path: Path) -> Path:
    folder = tmp_path / "zerotop" / "sessions"
    folder.mkdir(parents=True)
    return folder


def test_the_cause_of_an_end_in_a_few_words() -> None:
    assert build_overview(quick_read.open_glimpse(recordings.find_packed_file("z2-oom"))).why == "OOM (GPU)"
    assert build_overview(quick_read.open_glimpse(recordings.find_packed_file("z2"))).why == ""


def test_packed_and_unpacked_say_the_same(recording_root: Path) -> None:
    recording = recordings.unpack_to_folder("x4-z3", recording_root)
    again = build_overview(quick_read.open_glimpse(recording))
    assert again == build_overview(quick_read.open_glimpse(recordings.find_packed_file("x4-z3")))


def test_a_glimpse_reads_neither_output_nor_samples_of_processors(recording_root: Path) -> None:
    recording = recordings.unpack_to_folder("x4-z3", recording_root)
    others = ("output-", "threads-", "gpus-", "device_times-", "spans-rank1", "spans-rank2", "spans-rank3")
    for path in recording.iterdir():
        if path.name.startswith(others):
            path.write_bytes(b"not to be looked at")
    assert build_overview(quick_read.open_glimpse(recording)) == build_overview(
        quick_read.open_glimpse(recordings.find_packed_file("x4-z3"))
    )


@pytest.mark.parametrize(("name", "finished"), [("x4-attached", 26), ("held-restart", 30), ("z2", 24)])
def test_steps_are_the_jobs(name: str, finished: int) -> None:
    """Those before it was attached to are counted, those that were done again are not."""
    assert build_overview(quick_read.open_glimpse(recordings.find_packed_file(name))).steps == finished
    recording = recordings.open_recording(name)
    (told,) = (measure for measure in compare_paths([recording, recording]).measures if measure.name == "steps")
    assert told.values == (finished, finished)


def test_no_spike_is_lost() -> None:
    values = np.full(10_000, 0.5)
    values[7_777] = 60.0
    resampled = resample_longest(values, PIECES)
    assert len(resampled) == PIECES
    assert resampled.max() == 60.0
    assert resample_longest(values[:3], PIECES).tolist() == [0.5] * 3


def test_overviews_survive_json() -> None:
    about = build_overview(quick_read.open_glimpse(recordings.find_packed_file("z2")))
    assert Overview.from_json(json.loads(json.dumps(about.as_json()))) == about
    blank = Overview.from_json(json.loads(json.dumps(Overview("x").as_json(), allow_nan=False)))
    assert math.isnan(blank.iteration_s)
    with pytest.raises(TypeError):
        Overview.from_json({"name": "x"})


def test_unchanged_recordings_are_not_read_again(recording_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = recording_root.with_name("overviews.json")
    shutil.copy(recordings.find_packed_file("z2"), recording_root)
    shutil.copy(recordings.find_packed_file("z2-oom"), recording_root)
    first = Overviews(recording_root, cache, nobody_runs).read_all()
    read: list[Path] = []
    monkeypatch.setattr("zerotop.analysis.reports.recording_index.open_glimpse", lambda path: read.append(path))
    assert Overviews(recording_root, cache, nobody_runs).read_all() == first
    assert not read
    monkeypatch.undo()
    shutil.copy(recordings.find_packed_file("z2-fp16"), recording_root / "z2.zerotop")
    (changed,) = [r for r in Overviews(recording_root, cache, nobody_runs).read_all() if r.name == "z2.zerotop"]
    assert changed.overview is not None
    assert changed.overview.short_precision == "fp16"


def _cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20_000])


def _no_zip(path: Path) -> None:
    path.write_bytes(b"something else")


def _a_lie(path: Path) -> None:
    path.unlink()
    recording = recordings.unpack_to_folder("z2", path.parent)
    (recording / "session.json").write_text('{"zerotop": [1, 0], "clock": {"unix_ns": "x"}}')


@pytest.mark.parametrize("damage", [_cut_file, _no_zip, _a_lie])
def test_a_damaged_recording_is_a_line_with_a_sentence(recording_root: Path, damage: Callable[[Path], None]) -> None:
    shutil.copy(recordings.find_packed_file("z2"), recording_root)
    shutil.copy(recordings.find_packed_file("z2-oom"), recording_root)
    damage(recording_root / "z2.zerotop")
    found = Overviews(recording_root, None, nobody_runs).read_all()
    problems = [recording.overview.problem for recording in found if recording.overview is not None]
    assert len(problems) == 2
    assert sorted(map(bool, problems)) == [False, True]
    assert next(filter(None, problems)).endswith(".")
    assert not any(recording.is_live for recording in found)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 3}', '{"version": 3, "known": {"a": {"stamp": [1], "about": {}}}}']
)
def test_a_damaged_cache_is_passed_over(recording_root: Path, content: str) -> None:
    cache = recording_root.with_name("overviews.json")
    cache.write_text(content)
    shutil.copy(recordings.find_packed_file("z2"), recording_root)
    (found,) = Overviews(recording_root, cache, nobody_runs).read_all()
    assert found.overview is not None
    assert found.overview.steps == 24


def test_a_cache_that_cannot_be_written_costs_only_time(recording_root: Path) -> None:
    cache = recording_root.with_name("overviews.json")
    cache.mkdir()
    shutil.copy(recordings.find_packed_file("z2"), recording_root)
    (found,) = Overviews(recording_root, cache, nobody_runs).read_all()
    assert found.overview is not None
    assert not [path for path in recording_root.parent.iterdir() if path.name.startswith(".")]


def test_a_recording_is_live_while_it_is_written(recording_root: Path) -> None:
    recording = Path(directory.create_recording(["python", "train.py"], path=str(recording_root / "now"), launcher="python"))
    overviews = Overviews(recording_root, None, nobody_runs)
    assert [planted.is_live for planted in overviews.read_all()] == [True]
    old = json.loads((recording / "session.json").read_text())
    old["clock"]["unix_ns"] = time.time_ns() - 60 * 10**9
    (recording / "session.json").write_text(json.dumps(old))
    assert [planted.is_live for planted in Overviews(recording_root, None, nobody_runs).read_all()] == [False]
    assert [planted.is_live for planted in Overviews(recording_root, None, lambda path: True).read_all()] == [True]


def test_they_come_newest_first_and_one_that_is_deleted_goes(recording_root: Path) -> None:
    for name in ("z2", "z2-oom", "story", "cpu-clean"):
        shutil.copy(recordings.find_packed_file(name), recording_root)
    overviews = Overviews(recording_root, recording_root.with_name("o.json"), nobody_runs)
    names = [recording.path.stem for recording in overviews.read_all()]
    assert names == ["cpu-clean", "story", "z2-oom", "z2"]
    (recording_root / "story.zerotop").unlink()
    assert [recording.path.stem for recording in overviews.list_recordings()] == ["cpu-clean", "z2-oom", "z2"]


def test_packing_keeps_the_overview(recording_root: Path, tmp_path: Path) -> None:
    recording = recordings.unpack_to_folder("z2-oom", tmp_path)
    with (recording_root / "again.zerotop").open("wb") as stream:
        pack_folder(Directory(recording), stream)
    (found,) = Overviews(recording_root, None, nobody_runs).read_all()
    assert found.overview == replace(build_overview(quick_read.open_glimpse(recording)), name="again")


def test_the_finding_that_costs_most_is_searched_afterwards_and_kept(recording_root: Path, tmp_path: Path) -> None:
    recordings.unpack_to_folder("story", recording_root)
    recordings.unpack_to_folder("cpu-clean", recording_root)
    overviews = Overviews(recording_root, tmp_path / "cache.json", nobody_runs)
    before = overviews.read_all()
    assert {recording.overview.worst for recording in before if recording.overview is not None} == {None}
    while overviews.judge_next() is not None:
        pass
    overviews.save_cache()
    again = Overviews(recording_root, tmp_path / "cache.json", nobody_runs).read_all()
    found = {recording.path.stem: recording.overview for recording in again}
    assert (story := found["story"]) is not None
    assert (clean := found["cpu-clean"]) is not None
    assert (story.worst or "").startswith("Iterations take 2.68 s")
    assert 0.4 < story.worst_share < 0.5
    assert story.worst_name == "skipping_ended"
    assert (clean.worst, math.isnan(clean.worst_share)) == ("", True)
