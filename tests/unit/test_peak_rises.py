"""Which ranks share a lasting rise of the peak memory: the phases of ranks are recorded in different steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

import recordings
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.memory import memory_step
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.memory.peak_rises import PeakRise
from zerotop.recording.reader import Recording

GIB = 1 << 30
_STEP = 150  # from which on the ranks of a test have a higher peak


def _find_rises(folder: Path, added_gib: tuple[int, int]) -> list[Finding]:
    """Return the findings about steps that need more memory if the ranks' peaks, of 3.9 GiB, rise by so much."""
    for rank, added in enumerate(added_gib):
        (path,) = folder.glob(f"allocator-rank{rank}-*.rec")
        header, _, records = path.read_bytes().partition(b"\n")
        rows = np.frombuffer(bytearray(records), [tuple(field) for field in json.loads(header)["dtype"]])
        rows["allocated_peak_bytes"] += np.where(rows["step"] >= _STEP, added * GIB, 0)
        rows["reserved_peak_bytes"] += np.where(rows["step"] >= _STEP, 10 * GIB, 0)
        path.write_bytes(header + b"\n" + rows.tobytes())
    recording = Recording.open(folder)
    return [one for one in detect_findings(recording, recording.end_ns) if one.name == "memory_step"]


@pytest.mark.parametrize(
    ("added_gib", "ranks", "begin", "is_other_steady"),
    [
        ((0, 4), (1,), "Steps on rank 1 peak at 7.85 GiB instead of 3.85 GiB ", True),
        ((4, 0), (0,), "Steps on rank 0 peak at 7.85 GiB instead of 3.85 GiB ", True),
        ((4, 3), (0, 1), "Steps allocate up to ", False),
        ((1, 8), (1,), "Steps on rank 1 peak at 11.85 GiB instead of 3.85 GiB ", False),
    ],
)
def test_a_rise_is_told_once_with_its_ranks(
    added_gib: tuple[int, int], ranks: tuple[int, ...], begin: str, is_other_steady: bool, tmp_path: Path
) -> None:
    (step,) = _find_rises(recordings.unpack_to_folder("hand-rank0", tmp_path), added_gib)
    assert step.ranks == ranks
    assert step.headline.startswith(begin)
    assert len(step.headline) <= 80
    assert ("; the peak of the other ranks is that of before" in step.details) is is_other_steady


def test_reserved_memory_is_not_left(tmp_path: Path) -> None:
    (step,) = _find_rises(recordings.unpack_to_folder("hand-rank0", tmp_path), (2, 2))
    assert "125 GiB of the device are left" in step.details


@pytest.mark.parametrize(
    ("free", "told"),
    [
        (100 * GIB, "100 GiB of the device are left"),
        (float("nan"), "PyTorch leaves 125 GiB of the device"),
    ],
)
def test_only_what_nvml_calls_free_is_left(free: float, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_step, "measure_free_bytes", lambda process, known_ns: free)
    (step,) = _find_rises(recordings.unpack_to_folder("hand-rank0", tmp_path), (2, 2))
    assert f"; {told}." in step.details


@pytest.mark.parametrize(
    ("readings", "between"),
    [
        ({7: 1, 8: 1, 21: 3, 22: 3}, (8, 21)),
        ({7: 1, 8: 1, 14: 1, 20: 3, 21: 3, 22: 3}, (14, 20)),  # of counted steps
        ({7: 1, 8: 1, 20: 2.8, 21: 3, 22: 3}, (8, 20)),
        ({7: 1, 8: 1, 20: 1.2, 21: 3, 22: 3}, (20, 21)),
    ],
)
def test_the_steps_between_which_the_peak_rose(readings: dict[int, float], between: tuple[int, int]) -> None:
    steps = np.zeros(24, [("step", np.int64), ("allocated_peak_bytes", np.int64)])
    steps["step"] = np.arange(24)
    steps["allocated_peak_bytes"][list(readings)] = [size * GIB for size in readings.values()]
    rise = PeakRise(cast(Process, SimpleNamespace(steps=steps)), steps[7:9], steps[21:23])
    assert rise.between == between
