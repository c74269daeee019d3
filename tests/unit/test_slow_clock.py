"""A GPU whose clock is lower than those of the others: written into a clean real recording of four GPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

NAME, GPU = "x4-attached", 2


def set_clock(folder: Path, gpus: tuple[int, ...], mhz: float, reasons: int = 0, share: float = 1.0) -> None:
    """Let some GPUs run at a clock, in the last ``share`` of the recording."""

    def lower(rows: Rows) -> None:
        chosen = np.isin(rows["gpu"], gpus)
        chosen[: round(len(rows) * (1 - share))] = False
        rows["sm_clock_mhz"][chosen] = mhz
        rows["throttle_reasons"][chosen] = reasons

    change_table(folder, "gpus", lower)


def test_one_gpu_at_a_lower_clock(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder(NAME, tmp_path)
    assert find_named(folder, "slow_clock") == []
    set_clock(folder, (GPU,), 1200.0, reasons=0x04)
    (slow,) = find_named(folder, "slow_clock")
    assert slow.headline == f"The GPU of rank {GPU} runs at 1200 MHz, those of the others at 1980"
    assert slow.ranks == (GPU,)
    assert slow.evidence["slower_share"] == pytest.approx(0.65)
    assert "up to 65 % longer" in slow.details
    assert slow.details.endswith("NVML's reason: the power limit.")
    assert slow.fix == f"nvidia-smi -q -d CLOCK,PERFORMANCE -i {GPU}"
    recording = Recording.open(folder)
    assert slow.name not in [finding.name for finding in detect_findings(recording, slow.known_ns - 1)]


def test_a_clock_that_falls_later(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder(NAME, tmp_path)
    set_clock(folder, (GPU,), 1200.0, share=0.5)
    (slow,) = find_named(folder, "slow_clock")
    recording = Recording.open(folder)
    middle_ns = recording.end_ns - (recording.end_ns - recording.begin_ns) // 2
    assert abs(slow.begin_ns - middle_ns) < 15e9
    assert "NVML's reason" not in slow.details


@pytest.mark.parametrize(
    ("gpus", "mhz"), [((0, 1, 2, 3), 1200.0), ((1, 2), 1200.0), ((GPU,), 1850.0), ((GPU,), float("nan"))]
)
def test_clocks_that_single_out_no_rank(tmp_path: Path, gpus: tuple[int, ...], mhz: float) -> None:
    folder = recordings.unpack_to_folder(NAME, tmp_path)
    set_clock(folder, gpus, mhz)
    assert find_named(folder, "slow_clock") == []
