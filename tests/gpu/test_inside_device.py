"""What the probe says of a GPU, to the byte, beside torch's own peaks and torch's own history; and nobody else sees it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loop_runs import Counted, run_loop
from rank_recordings import read_table_file
from zerotop_probe.recording.tables import TICK

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
PHASES = ("forward", "backward", "step")


def run_measuring(factory: pytest.TempPathFactory, *options: str, recorded: bool = True) -> Counted:
    folder = factory.mktemp("measuring")
    recording = None if recorded else Path()
    return run_loop("measuring", folder, *options, ranks=1, recording=recording, accelerator="cuda", bootstrap=recorded)


def drop_free_pieces(counted: dict[str, Any]) -> dict[str, Any]:
    """Leave out counts of free pieces of blocks: under ZeRO-3 they differ also between runs without the probe, with time."""
    return {
        name: {key: count for key, count in value.items() if not key.startswith("inactive_split")}
        if isinstance(value, dict)
        else value
        for name, value in counted.items()
    }


def recorded_peaks(counted: Counted, field: str) -> list[list[Any]]:
    """(phase, highest of that field in its windows) of every phase of the loop, by time."""
    rank, _ = counted.read_rank(0)
    (path,) = counted.recording.glob("allocator-*.rec")
    rows = read_table_file(path)
    rows = rows[rows["edge"] != TICK]
    found: list[list[Any]] = []
    for name in PHASES:
        for span in rank.select_phases(name):
            inside = (rows["time_ns"] > span["begin_ns"]) & (rows["time_ns"] <= span["end_ns"])
            found.append([int(span["begin_ns"]), name, int(rows[field][inside].max())])
    return [entry[1:] for entry in sorted(found)]


@pytest.mark.parametrize("options", [("--stage", "2"), ("--stage", "2", "--offload"), ("--stage", "3")], ids=" ".join)
def test_a_jobs_own_peaks_are_those_without_us_and_ours_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]
) -> None:
    watched = run_measuring(tmp_path_factory, *options, "--resets")
    alone = run_measuring(tmp_path_factory, *options, "--resets", recorded=False)
    counted, alone_counted = (drop_free_pieces(one.by_rank[0]) for one in (watched, alone))
    assert counted == alone_counted
    own = watched.by_rank[0]["peaks"]
    assert recorded_peaks(watched, "allocated_peak_bytes") == [[name, allocated] for name, allocated, _ in own]
    assert recorded_peaks(watched, "reserved_peak_bytes") == [[name, reserved] for name, _, reserved in own]


def test_against_the_history_of_every_allocation(tmp_path_factory: pytest.TempPathFactory) -> None:
    watched = run_measuring(tmp_path_factory, "--history")
    alone = run_measuring(tmp_path_factory, "--history", recorded=False)
    assert watched.by_rank[0] == alone.by_rank[0]
    assert recorded_peaks(watched, "requested_peak_bytes") == watched.by_rank[0]["history"]
    peaks = [re.findall(r"Max_(?:MA|CA) [\d.]+ GB", counted.output) for counted in (watched, alone)]
    assert peaks[0] == peaks[1]
    assert peaks[0]


def test_whose_bytes_the_allocated_ones_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    rank, _ = run_measuring(tmp_path_factory, "--steps", "2").read_rank(0)
    (engine,) = rank.find_events("engine")
    inventories = {event["when"]: event for event in rank.find_events("tensors")}
    assert list(inventories) == ["init", "before_forward", "before_update", "after_update"]
    for event in inventories.values():
        assert sum(event["device"].values()) + event["unclaimed_bytes"] == event["allocated_bytes"]
    held = inventories["after_update"]["device"]
    assert held["master_weights"] == pytest.approx(4 * engine["parameters"], rel=0.02)
    assert held["optimizer_state"] == pytest.approx(8 * engine["parameters"], rel=0.02)
    assert inventories["before_update"]["device"]["gradients"] >= 2 * engine["parameters"]


def test_the_black_box_of_an_out_of_memory_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    counted = run_measuring(tmp_path_factory, "--steps", "3", "--too-much", str(2 * total))
    rank, _ = counted.read_rank(0)
    (failures,) = rank.find_events("out_of_memory")
    assert 0 <= failures["requested_bytes"] - 2 * total < 2 << 20  # the allocator asks the driver for whole 2 MiB
    assert (failures["limit_bytes"], failures["device"]) == (total, 0)
    assert (failures["phase"], failures["step"], failures["micro_step"], failures["rows"], failures["ooms"]) == (
        "forward",
        2,
        0,
        4,
        1,
    )
    assert 0 < failures["allocated_bytes"] <= failures["reserved_bytes"] < total - failures["free_bytes"]
    assert 0 < failures["largest_free_block_bytes"] <= failures["reserved_bytes"] - failures["allocated_bytes"]
    assert "out of memory. Tried to allocate" in counted.output


def test_the_gpus_own_times(tmp_path_factory: pytest.TempPathFactory) -> None:
    counted = run_measuring(tmp_path_factory, "--steps", "6")
    rank, _ = counted.read_rank(0)
    (path,) = counted.recording.glob("device_times-*.rec")
    times = {int(row["begin_ns"]): int(row["device_ns"]) for row in read_table_file(path)}
    for name in PHASES:
        spans = rank.select_phases(name)[1:-1]  # the last step's are learnt too late, the first are no measure
        assert len(spans) == 4
        for span in spans:
            # Each ends with a synchronization in the loop, so that host and device agree but for that wait.
            device_ns = times[int(span["begin_ns"])]
            assert device_ns > 0
            assert device_ns > (span["end_ns"] - span["begin_ns"]) / 2 - 200_000
