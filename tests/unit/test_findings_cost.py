"""Each detector's work is in proportion to the length of a recording, and little, whatever the troubles in it.

Function calls and records read are counted: they are the same on any machine.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import long_recording
from planted_troubles import MIXTURES
from zerotop.analysis.findings import Detector, Evidence, Finding, load_detectors
from zerotop.analysis.findings.pace import data_stall, iteration_shift
from zerotop.analysis.findings.support import detection
from zerotop.analysis.findings.support.steps.step_values import StepValues
from zerotop.recording.moments.records import Records
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Samples

STEPS = 2000
# Records that take about as long as a call.
RECORDS_PER_CALL = 1000
# Work below this share of all is not examined: what is done once says nothing about proportions.
LITTLE_SHARE = 0.02


def count_work(path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the calls, and the records read as calls, that each detector needs for a whole recording."""
    recording, work = Recording.open(path), Counter[str]()
    read_count = 0
    merge_parts = Records._merge_parts

    def merge_and_count(self: Records, *ranges: object) -> Samples:
        nonlocal read_count
        samples: Samples = merge_parts(self, *ranges)  # type: ignore[arg-type]
        read_count += len(samples)
        return samples

    def watch_detector(name: str, detect: Detector) -> Detector:
        def run_detector(evidence: Evidence) -> Iterable[Finding | None]:
            before, profile = read_count, cProfile.Profile()
            gc.disable()  # a collection may call what other tests have left
            try:
                with profile:
                    findings = list(detect(evidence))
            finally:
                gc.enable()
            calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
            work[name] += calls + (read_count - before) // RECORDS_PER_CALL
            return findings

        return run_detector

    with monkeypatch.context() as patch:
        patch.setattr(Records, "_merge_parts", merge_and_count)
        patch.setattr(detection, "_PIECE", 512)
        detection.Detection(recording, [watch_detector(*item) for item in load_detectors().items()]).update()
    return work


@pytest.fixture(scope="module")
def quiet_work(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The work for a recording without trouble and with one rank."""
    with pytest.MonkeyPatch.context() as patch:
        path = long_recording.write_recording(tmp_path_factory.mktemp("quiet") / "recording", 2 * STEPS)
        return count_work(path, patch).total()


@pytest.mark.parametrize("name", MIXTURES)
def test_twice_the_length_is_twice_the_work(
    tmp_path: Path, name: str, quiet_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, whole = (
        count_work(long_recording.write_recording(tmp_path / f"{steps}", steps, MIXTURES[name]), monkeypatch)
        for steps in (STEPS, 2 * STEPS)
    )
    assert whole.total() < 2.5 * MIXTURES[name].ranks * quiet_work
    examined = [detector for detector in whole if whole[detector] > LITTLE_SHARE * whole.total()]
    assert {
        detector: (half[detector], whole[detector]) for detector in examined if whole[detector] > 2.5 * half[detector]
    } == {}


def test_values_of_steps_are_computed_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each piece for the last steps only: NumPy's work on all of them is no call, but takes ever longer."""
    computed = Counter[str]()
    select = StepValues.__getitem__

    def count_computed(self: StepValues, index: Any) -> Any:
        values = select(self, index)
        computed[self.compute.__qualname__] += values.size
        return values

    monkeypatch.setattr(StepValues, "__getitem__", count_computed)
    monkeypatch.setattr(detection, "_PIECE", 64)  # ten steps
    recording = Recording.open(long_recording.write_recording(tmp_path / "recording", STEPS))
    detection.Detection(recording, [iteration_shift.detect, data_stall.detect]).update()
    assert len(computed) == 3
    assert all(STEPS < count < 20 * STEPS for count in computed.values())
