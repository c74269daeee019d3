"""Findings of real recordings of which most steps are made counted ones: none is made up, and those that last are found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import recordings
from counted_recordings import count_steps
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps

CLEAN = (
    "cpu-clean",
    "held-clean-offload",
    "held-clean-uneven",
    "held-clean-z0",
    "held-clean-z3",
    "unseen-clean",
    "gpu-clean",
)
# Findings that need phases or readings of steps that are not in a row, and the step in which each begins.
LASTING = (
    ("cpu-straggler", "straggler", 15),
    ("cpu-stall", "data_stall", 15),
    ("cpu-slow", "iteration_shift", 20),
    ("held-straggler", "straggler", 12),
    ("held-stall", "data_stall", 26),
    ("unseen-late-data", "straggler", 22),
    ("blind-slow-forward", "slow_forward", 59),
    ("gpu-lines-leak", "memory_creep", 301),
    ("gpu-lines-jump", "memory_step", 300),
    ("gpu-offload-4", "double_spike", None),
    ("blind-saves", "checkpoint_pause", 64),
    ("cpu-hang", "hung_ranks", 20),
)


def read_names(recording: Recording) -> set[str]:
    return {finding.name for finding in detect_findings(recording, recording.end_ns)}


@pytest.mark.parametrize("interval", [4, 16])
@pytest.mark.parametrize("name", CLEAN)
def test_counted_steps_of_a_clean_job_are_no_finding(tmp_path: Path, name: str, interval: int) -> None:
    folder = recordings.unpack_to_folder(name, tmp_path)
    before = read_names(Recording.open(folder))
    assert count_steps(folder, interval=interval, first=10) > 10
    assert read_names(Recording.open(folder)) <= before


@pytest.mark.parametrize(("name", "kind", "step"), LASTING)
def test_lasting_changes_are_found_in_counted_steps(tmp_path: Path, name: str, kind: str, step: int | None) -> None:
    folder = recordings.unpack_to_folder(name, tmp_path)
    assert count_steps(folder, interval=4, first=10) > 10
    recording = Recording.open(folder)
    found = [finding.step for finding in detect_findings(recording, recording.end_ns) if finding.name == kind]
    assert found
    # It may have begun in one of the counted steps before the first with phases.
    assert step is None or any(step - 1 <= (one or 0) <= step + 8 for one in found)


@pytest.mark.parametrize(
    ("name", "kind", "step", "interval"),
    [
        ("cpu-straggler", "straggler", 15, 4),
        ("cpu-stall", "data_stall", 15, 8),
        ("held-stall", "data_stall", 26, 8),
        ("unseen-late-data", "straggler", 22, 4),
        ("gpu-lines-leak", "memory_creep", 301, 8),
    ],
)
def test_a_change_in_a_counted_step_begins_with_it(tmp_path: Path, name: str, kind: str, step: int, interval: int) -> None:
    folder = recordings.unpack_to_folder(name, tmp_path)
    assert count_steps(folder, interval=interval, first=10) > 10
    recording = Recording.open(folder)
    found = [finding.step for finding in detect_findings(recording, recording.end_ns) if finding.name == kind]
    assert any(step - 1 <= (one or 0) <= step + 2 for one in found), found


def test_the_phases_of_a_change_may_be_known_later(tmp_path: Path) -> None:
    """The steps after a change are counted: their phases are those of later ones."""
    folder = recordings.unpack_to_folder("cpu-slow", tmp_path)
    count_steps(folder, interval=16, first=18)
    recording = Recording.open(folder)
    (steps, *_) = read_rank_steps(recording)
    assert steps["counted"][20:25].all()
    (shift,) = [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == "iteration_shift"]
    assert shift.known_ns > steps["end_unix_ns"][steps["step"] == 25][0]
    assert "between the phases" in shift.details
    assert not [value for value in shift.evidence.values() if np.isnan(value)]


def test_times_and_peaks_stay_those_of_the_steps(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("gpu-lines-leak", tmp_path)
    (whole,) = read_rank_steps(Recording.open(folder))
    count_steps(folder, interval=8)
    (steps,) = read_rank_steps(Recording.open(folder))
    counted = steps["counted"]
    assert counted.sum() > 100
    for name in ("step", "iteration_s", "eval_s", "checkpoint_s", "end_unix_ns", "skipped"):
        np.testing.assert_array_equal(steps[name], whole[name])
    for name in ("data_s", "forward_s", "backward_s", "step_s", "rows", "tokens", "allocated_peak_bytes"):
        np.testing.assert_array_equal(steps[name][~counted], whole[name][~counted])
    # The peak of several counted steps is that of the last one.
    ends = np.flatnonzero(counted & ~np.append(counted[1:], True))
    begins = np.flatnonzero(counted & ~np.append(False, counted[:-1]))[: len(ends)]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        assert steps["allocated_peak_bytes"][end] == whole["allocated_peak_bytes"][begin : end + 1].max()
        assert (steps["allocated_peak_bytes"][begin:end] == -1).all()


def test_a_rise_between_two_measured_steps_is_placed_by_readings_of_those_between(tmp_path: Path) -> None:
    """Step 284 has phases, and then step 300."""
    folder = recordings.unpack_to_folder("gpu-lines-jump", tmp_path)
    count_steps(folder, interval=16, first=10)
    recording = Recording.open(folder)
    (step,) = [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == "memory_step"]
    assert step.headline.endswith(" from step 300 on")


@pytest.mark.parametrize("is_steady", [False, True])
def test_a_rise_is_told_from_steady_growth_by_readings_of_counted_steps(tmp_path: Path, is_steady: bool) -> None:
    """Steps that keep their phases happen to need less than the counted one before them, and ever more."""
    folder = recordings.unpack_to_folder("gpu-lines-jump", tmp_path)
    count_steps(folder, interval=16, first=10)
    (path,) = folder.glob("allocator-*.rec")
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(bytearray(records), [tuple(field) for field in json.loads(header)["dtype"]])
    peaks, steps = rows["allocated_peak_bytes"], rows["step"]
    if is_steady:
        peaks[:] = (1 << 30) + (steps.astype(np.int64) << 24)
    else:
        peaks[steps == 299] = 20 << 30
        peaks[steps > 300] += np.minimum(steps[steps > 300].astype(np.int64) - 300, 100) << 26
    path.write_bytes(header + b"\n" + rows.tobytes())
    recording = Recording.open(folder)
    found = [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == "memory_step"]
    assert bool(found) is not is_steady
