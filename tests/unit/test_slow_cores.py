"""A rank on a CPU that is slow where ranks gather parameters: a real one under ZeRO-3, and changes of its recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import recordings
from changed_recordings import Rows, change_table, find_named
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import PHASE_CODE

NAME = "cpu-slow-cores"


def read_pids(folder: Path) -> dict[int, int]:
    return {source.rank: source.pid for source in Recording.open(folder).sources["spans"]}


def test_a_rank_that_computes_more(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder(NAME, tmp_path)
    (slow,) = find_named(folder, "slow_cores")
    assert slow.headline == "Rank 1 computes for 164 ms in each iteration, the others for 20 ms"
    assert (slow.ranks, slow.step) == ((1,), 18)
    assert slow.fix == f"py-spy dump --pid {read_pids(folder)[1]}"
    recording = Recording.open(folder)
    earlier = detect_findings(recording, slow.known_ns - 1)
    assert slow.name not in [finding.name for finding in earlier]


def test_the_iterations_that_became_longer_name_it() -> None:
    recording = recordings.open_recording(NAME)
    shift = next(one for one in detect_findings(recording, recording.end_ns) if one.name == "iteration_shift")
    assert "rank 1 computes for 151 ms in each iteration instead of 21 ms" in shift.details


def test_a_rank_that_waits_for_a_core(tmp_path: Path) -> None:
    """The same times, but as those in which a core was missing: others have the cores, or do not."""
    folder = recordings.unpack_to_folder(NAME, tmp_path)
    pids = read_pids(folder)

    def wait_instead(rows: Rows) -> None:
        first, second = (rows["tid"] == pids[rank] for rank in (0, 1))
        rows["wait_ns"] = 0
        computed = np.interp(rows["time_ns"][second], rows["time_ns"][first], rows["cpu_ns"][first])
        rows["wait_ns"][second] = np.maximum.accumulate(np.maximum(0, rows["cpu_ns"][second] - computed))
        rows["cpu_ns"][second] = computed

    def take_cores(rows: Rows) -> None:
        rows["cores_used"] = 2.0

    def wait_for_cores(rows: Rows) -> None:
        rows["cores_used"], rows["waiting_cores"] = 0.5, 0.5

    change_table(folder, "threads", wait_instead)
    (slow,) = find_named(folder, "slow_cores")
    assert slow.headline.startswith("In each iteration rank 1 waits ")
    assert (slow.ranks, slow.fix) == ((1,), f"taskset -pc {pids[1]}")
    change_table(folder, "hosts", take_cores)
    change_table(folder, "processes", wait_for_cores)
    assert find_named(folder, "slow_cores") == []


def test_a_rank_with_more_to_do_is_not_slow(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder(NAME, tmp_path)

    def give_more(rows: Rows) -> None:
        rows["tokens"][rows["phase"] == PHASE_CODE["forward"]] *= 3

    change_table(folder, "spans-rank1", give_more)
    assert find_named(folder, "slow_cores") == []


def test_a_thread_that_was_not_sampled_is_unknown(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder(NAME, tmp_path)
    pids = read_pids(folder)

    def rename(rows: Rows) -> None:
        rows["tid"][rows["tid"] == pids[0]] += 1

    change_table(folder, "threads", rename)
    assert find_named(folder, "slow_cores") == []
