"""More that stays allocated from some step on, where most steps are only counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import Finding
from zerotop.recording.samples import Ints

MIB = 1 << 20
_HELD, _PEAK = 1200 * MIB, 4200 * MIB
_MIDDLE = 0.55  # of the recording's time, when a test's memory rises


def record_memory(folder: Path, held: Callable[[Ints], Ints], peak: Callable[[Ints], Ints]) -> list[Finding]:
    """Return the findings about steps that need more memory. ``held``, ``peak``: MiB that are added, by record.

    They are given how far through the recording each record of the allocator is, in thousandths.
    """
    folder = recordings.unpack_to_folder("gpu-counted-hogs", folder)

    def write(rows: Rows) -> None:
        times = rows["time_ns"].astype(np.int64)
        part = (times - times[0]) * 1000 // (times[-1] - times[0])
        is_within = rows["edge"] == 0
        rows["allocated_bytes"] = _HELD + held(part) * MIB + np.where(is_within, 50 * MIB, 0)
        rows["allocated_peak_bytes"] = _PEAK + peak(part) * MIB
        rows["reserved_bytes"] = rows["reserved_peak_bytes"] = _PEAK + 5000 * MIB

    change_table(folder, "allocator-rank0", write)
    return find_named(folder, "memory_step")


def rise(part: Ints) -> Ints:
    return np.where(part >= 1000 * _MIDDLE, 2400, 0)


def rise_for_a_while(part: Ints) -> Ints:
    return np.where((part >= 550) & (part < 560), 2400, 0)


def grow(part: Ints) -> Ints:
    return np.maximum(0, part - 550) * 10


def stay(part: Ints) -> Ints:
    return part * 0


def test_a_rise_is_told_with_both_levels_and_its_step(tmp_path: Path) -> None:
    (step,) = record_memory(tmp_path, rise, rise)
    assert step.headline.startswith("Steps allocate up to 6.45 GiB instead of 4.10 GiB ")
    assert "3.52 GiB instead of 1.17 GiB stay allocated after each step" in step.details
    assert step.step is not None


@pytest.mark.parametrize(("held", "peak"), [(stay, stay), (rise_for_a_while, rise_for_a_while), (rise, stay), (grow, grow)])
def test_what_does_not_last_or_grows_on_is_no_rise(
    held: Callable[[Ints], Ints], peak: Callable[[Ints], Ints], tmp_path: Path
) -> None:
    assert [one for one in record_memory(tmp_path, held, peak) if "stay allocated" in one.details] == []
