"""A rank that computes more slowly than the others: written into clean real recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import PHASE_CODE

LATE_NS = 25_000_000
SINCE = 20


def select_phase(rows: Rows, phase: str) -> Rows:
    chosen: Rows = (rows["phase"] == PHASE_CODE[phase]) & (rows["depth"] == 0) & (rows["step"] >= SINCE)
    return chosen


def lengthen_forward(rows: Rows) -> None:
    """Forward takes longer, and backward, in which the rank waits for the others, is as much shorter."""
    rows["end_ns"][select_phase(rows, "forward")] += LATE_NS
    rows["begin_ns"][select_phase(rows, "backward")] += LATE_NS


def arrive_late(rows: Rows) -> None:
    """What lies between the phases takes longer."""
    rows["begin_ns"][select_phase(rows, "backward")] += LATE_NS


def test_slow_cores(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-clean-z0", tmp_path)
    assert find_named(folder, "slow_forward") == []
    change_table(folder, "spans-rank1", lengthen_forward)
    (slow,) = find_named(folder, "slow_forward")
    assert slow.ranks == (1,)
    assert slow.step == SINCE
    assert slow.headline.startswith("Rank 1 computes slowly: its forward takes 3")
    assert slow.evidence["forward_s"] - slow.evidence["others_s"] == pytest.approx(LATE_NS / 1e9, abs=0.005)
    assert "measured on the host, for batches with as many tokens. " in slow.details
    assert slow.fix.startswith("taskset -pc ")
    recording = Recording.open(folder)
    before = detect_findings(recording, slow.known_ns - 1)
    assert slow.name not in [finding.name for finding in before]


def test_sizes_that_were_not_recorded_are_not_said_to_be_the_same(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-clean-z0", tmp_path)

    def forget_sizes(rows: Rows) -> None:
        rows["tokens"], rows["rows"] = -1, -1

    change_table(folder, "spans-rank1", lengthen_forward)
    for rank in range(2):
        change_table(folder, f"spans-rank{rank}", forget_sizes)
    (slow,) = find_named(folder, "slow_forward")
    assert "measured on the host. " in slow.details
    assert slow.advice.startswith("See whether its batches are larger: their sizes were not recorded. ")


def test_a_slow_gpu(tmp_path: Path) -> None:
    """Recorded from step 9 on; its forwards take 35 ms of 2.8 s."""
    folder = recordings.unpack_to_folder("x4-attached", tmp_path)

    def slow_down(rows: Rows) -> None:
        rows["device_ns"][rows["phase"] == PHASE_CODE["forward"]] += 300_000_000

    change_table(folder, "device_times-rank2", slow_down)
    (slow,) = find_named(folder, "slow_forward")
    assert slow.ranks == (2,)
    assert slow.headline == "Rank 2 computes slowly: its forward takes 335 ms, the others' 35 ms"
    assert "measured on the GPU" in slow.details
    assert slow.fix.startswith("nvidia-smi ")


def test_a_rank_that_waits_in_its_forward_for_another_is_not_slow(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-clean-z0", tmp_path)
    change_table(folder, "spans-rank1", lengthen_forward)
    change_table(folder, "spans-rank0", arrive_late)
    assert find_named(folder, "slow_forward") == []


def test_a_rank_with_more_to_do_is_not_slow(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-clean-z0", tmp_path)

    def give_more(rows: Rows) -> None:
        lengthen_forward(rows)
        rows["tokens"][select_phase(rows, "forward")] *= 2

    change_table(folder, "spans-rank1", give_more)
    assert find_named(folder, "slow_forward") == []
    (uneven,) = find_named(folder, "uneven_batches")
    assert uneven.headline == "Rank 1 gets 2.0 times the tokens of the other rank, which waits for it"
    assert (uneven.ranks, uneven.step) == ((1,), SINCE)
    forward_s, others_s, backward_s = (uneven.evidence[name] for name in ("forward_s", "others_s", "backward_s"))
    assert forward_s - others_s == pytest.approx(LATE_NS / 1e9, abs=0.005)
    lost_s = (forward_s - others_s) * (1 + backward_s / forward_s) / 2
    assert uneven.cost == pytest.approx(lost_s / uneven.evidence["iteration_s"], rel=0.15)
    assert "They wait as long a part of its backward" in uneven.details


def test_more_work_that_takes_turns_or_no_longer_is_not_told(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-clean-z0", tmp_path)

    def give_more(rows: Rows) -> None:
        rows["tokens"][select_phase(rows, "forward")] *= 2

    change_table(folder, "spans-rank1", give_more)
    assert find_named(folder, "uneven_batches") == []

    def take_turns(rows: Rows) -> None:
        lengthen_forward(rows)
        rows["tokens"][select_phase(rows, "forward") & (rows["step"] % 8 == 0)] //= 4

    change_table(folder, "spans-rank1", take_turns)
    assert find_named(folder, "uneven_batches") == []


def test_forwards_that_gather_parameters_are_not_compared(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-clean-z3", tmp_path)
    change_table(folder, "spans-rank1", lengthen_forward)
    assert find_named(folder, "slow_forward") == []
