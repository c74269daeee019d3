"""What a part of an iteration takes in all steps, from those with phases, which may be the longer ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recordings
from counted_recordings import count_steps
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.formatting import Text
from zerotop.analysis.steps.sampled_parts import measure_part
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps


def test_the_part_of_steps_that_were_longer_than_others_is_less_in_all() -> None:
    random = np.random.default_rng(0)
    waited = random.choice([0.002, 0.010, 0.020], 300)
    every = 0.008 + waited + random.normal(0, 0.0005, 300)
    long = np.concatenate([np.flatnonzero(waited > 0.005)[:40], np.flatnonzero(waited < 0.005)[:3]])
    part = measure_part(waited[long], every[long], every, np.mean)
    assert part.iteration_s == pytest.approx(every.mean())
    assert np.mean(waited[long]) > 1.2 * waited.mean()
    assert part.seconds == pytest.approx(waited.mean(), rel=0.05)


def test_without_counted_steps_and_with_steps_unlike_all_with_phases() -> None:
    each = np.array([0.1, 0.2, 0.3])
    assert measure_part(each / 2, each, each) == (0.1, 0.2)
    every = np.array([0.1, np.nan, 0.1, 0.1, 0.2, 0.3, 5.0, 0.01])
    assert measure_part(each / 2, each, every) == (pytest.approx(0.05), pytest.approx(0.1))
    steady = np.full(20, 0.2)
    assert measure_part(steady / 4, steady, np.full(40, 0.12)) == (pytest.approx(0.03), pytest.approx(0.12))
    nothing = np.zeros(3)
    assert measure_part(nothing, nothing, np.zeros(9)) == (0, 0)


@pytest.mark.parametrize(
    ("name", "kind", "interval"),
    [("held-stall", "data_stall", 4), ("held-stall", "data_stall", 8), ("cpu-stall", "data_stall", 4)],
)
def test_the_iteration_that_is_told_is_that_of_all_its_steps(tmp_path: Path, name: str, kind: str, interval: int) -> None:
    folder = recordings.unpack_to_folder(name, tmp_path)
    whole = read_rank_steps(Recording.open(folder))
    assert count_steps(folder, interval=interval, first=10) > 10
    recording = Recording.open(folder)
    found = [one for one in detect_findings(recording, recording.end_ns) if one.name == kind][-1]
    assert isinstance(found.details, Text)
    first, last = found.details.values["first_step"], found.details.values["last_step"]
    told = [rows[(rows["step"] >= first) & (rows["step"] <= last)] for rows in whole]
    longest = np.max([rows["iteration_s"] for rows in told], axis=0)
    waited = next(rows for rows in told if rows["rank"][0] == found.ranks[0])["data_s"]
    assert found.evidence["iteration_s"] == pytest.approx(float(np.median(longest)), rel=0.05)
    assert found.evidence["data_s"] == pytest.approx(float(np.median(waited)), rel=0.15)
