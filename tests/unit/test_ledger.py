"""The ledger: rows that add up to the device whatever was recorded, and what each of them is."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recordings
from memory_recording import (
    GIB,
    PARTS,
    UUID,
    PlantedRecording,
    gib_to_bytes,
    make_gpu_process_sample,
    make_gpu_sample,
    make_process_sample,
    make_reading,
    make_record,
    record_two_steps,
)
from small_recording import S, make_identity, make_span, read_recording, second_to_unix_ns
from zerotop.analysis.memory import phase_peaks
from zerotop.analysis.memory.allocator_health import read_allocator_health
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import read_host_ledgers
from zerotop.analysis.memory.ledger_rows import ACTIVATIONS, ALLOCATED, CORRECTIONS, LABELS, GpuLedger, LedgerRow
from zerotop.analysis.memory.peak_ledger import read_peak_ledgers
from zerotop.analysis.memory.phase_peaks import BEFORE, MIXED, read_rank_peaks
from zerotop.analysis.memory.tensor_inventory import CATEGORIES
from zerotop.analysis.views.gpus import read_gpus
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import Entered, Goodbye, Left, Node, RankGone
from zerotop_probe.recording.tables import BOUNDARY, EVAL, FAILED, PHASE_CODE


def list_row_sizes(ledger: GpuLedger) -> dict[str, float]:
    """Its rows in gibibytes, those that are not 0."""
    return {row.key: row.bytes / GIB for row in ledger.rows if row.bytes}


def check_ledger(ledger: GpuLedger) -> GpuLedger:
    assert sum(row.bytes for row in ledger.rows) == ledger.total_bytes
    assert ledger.sum_bytes(*ALLOCATED) == ledger.allocated_bytes
    assert all(row.bytes >= 0 or row.key in CORRECTIONS for row in ledger.rows), ledger.rows
    plain = [row for row in ledger.rows if not row.is_kept and not row.is_initial and row.since_step is None]
    assert all(row.describe() == LABELS[row.key] for row in plain)
    return ledger


def read_only_ledger(recording: Recording, second: float) -> GpuLedger:
    (ledger,) = read_ledgers(recording.at(second_to_unix_ns(second)))
    return check_ledger(ledger)


def row_of(ledger: GpuLedger, key: str) -> LedgerRow:
    (row,) = [row for row in ledger.rows if row.key == key]
    return row


DEVICE = {"free": 51.5, "driver": 1.5, "other_processes": 4, "outside_pytorch": 1}


def test_between_two_steps(tmp_path: Path) -> None:
    ledger = read_only_ledger(record_two_steps(tmp_path).open_recording(), 19.5)
    assert list_row_sizes(ledger) == {
        **DEVICE,
        "reserved_unallocated": 7.25,
        **PARTS,
        "activations": 0.125,
        "unexplained": 0.125,
    }
    assert (ledger.name, ledger.ranks, ledger.total_bytes) == ("NVIDIA H200", (0,), gib_to_bytes(80))
    assert (ledger.job_bytes, ledger.reserved_bytes, ledger.allocated_bytes) == (
        gib_to_bytes(23),
        gib_to_bytes(22),
        gib_to_bytes(14.75),
    )
    assert ledger.unexplained_largest == (gib_to_bytes(0.125),)
    assert ledger.notes == ()


UNIFIED = {"index": 0, "uuid": f"{UUID}0", "name": "NVIDIA GB10", "total_bytes": gib_to_bytes(120), "unified": True}
"""A GPU that shares the 120 GiB of its host, as NVML's sampler describes it."""


def record_host(recording: PlantedRecording, available: float = 70) -> None:
    """Add the kernel's figures of a host with 120 GiB."""
    sizes = {"memory_total_bytes": gib_to_bytes(120), "memory_available_bytes": gib_to_bytes(available)}
    recording.write_records(tables.HOSTS, recording.node, [make_record(tables.HOSTS, at, **sizes) for at in range(30)])


def test_unified_memory_is_one_pool(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(recording.node, 0.5, Node, host="node1", gpus=[UNIFIED])
    record_host(recording)
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    sizes = list_row_sizes(ledger)
    assert {key: sizes[key] for key in sizes if key not in (*ALLOCATED, "reserved_unallocated")} == {
        "free": 70,
        "host_memory": 6,
        "other_processes": 4,
        "outside_pytorch": 1,
        "rest_of_device": 120 - 70 - 6 - 4 - 1 - 22,
    }
    assert (ledger.name, ledger.is_unified, ledger.total_bytes) == ("NVIDIA GB10, unified memory", True, gib_to_bytes(120))
    assert row_of(ledger, "free").basis == "/proc/meminfo, its last reading"
    assert "NVML has no figure of it" in ledger.notes[0]


def test_device_memory_that_the_kernel_counts_in_the_process_counts_once(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(recording.node, 0.5, Node, host="node1", gpus=[UNIFIED])
    record_host(recording, available=120 - 22 - 1 - 4 - 2)
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    assert (ledger.sum_bytes("host_memory"), ledger.sum_bytes("rest_of_device")) == (gib_to_bytes(2), 0)
    assert "counted above" in row_of(ledger, "host_memory").note


def test_an_integrated_gpu_without_nvml(tmp_path: Path) -> None:
    """As on a Jetson: CUDA says that it is integrated, and how much was free."""
    planted = PlantedRecording(tmp_path)
    device = {
        "ordinal": 0,
        "name": "Orin",
        "total_bytes": gib_to_bytes(120),
        "unified": True,
        "free_bytes": gib_to_bytes(60),
    }
    planted.write_engine(devices=[device])
    planted.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(2, 1, 4), make_reading(4, 1, 4)], born=1)
    planted.write_records(
        tables.PROCESSES, planted.node, [make_process_sample(at, make_identity(0).pid, 6) for at in (2, 4)]
    )
    record_host(planted)
    recording = planted.open_recording()
    ledger = read_only_ledger(recording, 5)
    assert list_row_sizes(ledger) == {
        "free": 70,
        "host_memory": 6,
        "rest_of_device": 40,
        "reserved_unallocated": 3,
        "unattributed": 1,
    }
    assert "cudaMemGetInfo said that 60.00 GiB were free" in ledger.notes[0]
    (gpu,) = read_gpus(recording.at(second_to_unix_ns(5)))
    assert (gpu.name, gpu.total_bytes, gpu.used_bytes) == ("GPU, unified memory", gib_to_bytes(120), gib_to_bytes(50))


def test_nvmls_figure_for_the_job_is_what_it_holds_inside_and_outside_pytorch(tmp_path: Path) -> None:
    ledger = read_only_ledger(record_two_steps(tmp_path).open_recording(), 27.5)
    assert ledger.job_bytes == ledger.sum_bytes("outside_pytorch", "reserved_unallocated", *ALLOCATED)


def test_gradients_are_there_from_the_end_of_the_backward_to_the_end_of_the_update(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path).open_recording()
    gradients = {
        second: read_only_ledger(recording, second).sum_bytes("gradients") / GIB
        for second in (15, 17.5, 18.9, 19.5, 26, 28, 29.5)
    }
    assert gradients == {15: 0, 17.5: 2, 18.9: 2, 19.5: 0, 26: 0, 28: 2, 29.5: 0}


def test_each_row_names_its_basis(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path).open_recording()
    basis = {second: {row.key: row.basis for row in read_only_ledger(recording, second).rows} for second in (5, 17.5, 28)}
    assert basis[5]["parameters"] == basis[5]["gradients"] == "tensors counted before the first update"
    assert basis[17.5]["gradients"] == "tensors counted in step 0, before the first update"
    assert basis[28]["optimizer_state"] == "tensors counted in step 0, after the first update"
    assert basis[28]["gradients"] == "tensors counted in step 0, before the first update"


def test_before_an_engine_is_made_and_after_the_job(tmp_path: Path) -> None:
    planted = record_two_steps(tmp_path)
    planted.write_event(planted.node, 29.2, RankGone, rank=0, pid=make_identity(0).pid)
    recording = planted.open_recording()
    assert list_row_sizes(read_only_ledger(recording, 1.5)) == {"free": 79.5, "driver": 0.5}
    assert list_row_sizes(read_only_ledger(recording, 29.5)) == {
        "free": 51.5,
        "driver": 1.5,
        "other_processes": 4,
        "this_job": 23,
    }


def test_less_is_allocated_than_was_counted(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(19, "after_update", {**PARTS, "buffers": 3})
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    assert (ledger.sum_bytes("freed_since"), ledger.sum_bytes("activations")) == (gib_to_bytes(14.75 - 17), 0)
    assert ledger.allocated_bytes == gib_to_bytes(14.75)


def record_readings_apart(folder: Path, *readings: Any, others: float = 0) -> Recording:
    """NVML is read at second 3 and at 4.2, the allocator at others; 1.5 GiB lie outside of PyTorch, 0.5 are the driver's."""
    recording = PlantedRecording(folder)
    recording.node_event()
    recording.write_engine()
    recording.write_records(
        tables.ALLOCATOR, make_identity(0), [make_reading(2, 1, 4), make_reading(4, 1, 4), *readings], born=1
    )
    recording.write_records(tables.GPUS, recording.node, [make_gpu_sample(3, 6 + others), make_gpu_sample(4.2, 6 + others)])
    held = [make_gpu_process_sample(3, make_identity(0).pid, 5.5), make_gpu_process_sample(3, 7, others)]
    recording.write_records(tables.GPU_PROCESSES, recording.node, held)
    return recording.open_recording()


def test_between_nvmls_reading_and_the_allocators_memory_was_taken(tmp_path: Path) -> None:
    ledger = read_only_ledger(record_readings_apart(tmp_path, make_reading(4.5, 9, 10)), 5)
    outside = {"driver": 0.5, "outside_pytorch": 1.5}
    assert list_row_sizes(ledger) == {"free": 68, **outside, "reserved_unallocated": 1, "unattributed": 9}
    assert "the rows use PyTorch's" in row_of(ledger, "free").note


def test_more_was_taken_than_the_others_leave(tmp_path: Path) -> None:
    ledger = read_only_ledger(record_readings_apart(tmp_path, make_reading(4.5, 9, 60), others=30), 5)
    assert list_row_sizes(ledger) == {"rest_of_device": 20, "reserved_unallocated": 51, "unattributed": 9}
    assert "cannot be divided" in row_of(ledger, "rest_of_device").note


def test_pytorch_says_that_it_holds_more_than_there_is(tmp_path: Path) -> None:
    assert read_only_ledger(record_readings_apart(tmp_path, make_reading(4.5, 9, 81)), 5).sum_bytes(
        "read_apart"
    ) == gib_to_bytes(-77)


def test_a_rank_that_is_leaving_has_given_back_what_its_allocator_held(tmp_path: Path) -> None:
    """Its goodbye is yet to come, its allocator is read no more: NVML's figures are all there is."""
    planted = record_two_steps(tmp_path)
    sampler = planted.node._replace(pid=1001)
    planted.write_records(tables.GPUS, sampler, [make_gpu_sample(30, 5.5)])
    planted.write_records(
        tables.GPU_PROCESSES,
        sampler,
        [make_gpu_process_sample(30, make_identity(0).pid, 1), make_gpu_process_sample(30, 7, 4)],
    )
    recording = planted.open_recording()
    ledger = read_only_ledger(recording, 30.2)
    assert list_row_sizes(ledger) == {"free": 74.5, "driver": 0.5, "other_processes": 4, "this_job": 1}
    assert "has released memory" in ledger.notes[0]
    assert read_only_ledger(recording, 29.9).sum_bytes("this_job") == 0


def test_memory_outside_pytorch_is_read_while_the_allocator_is_unchanged(tmp_path: Path) -> None:
    planted = PlantedRecording(tmp_path)
    planted.node_event()
    planted.write_engine()
    readings = [make_reading(1, 1, 4), make_reading(3, 1, 4), make_reading(5, 1, 9), make_reading(6, 1, 9)]
    planted.write_records(tables.ALLOCATOR, make_identity(0), readings, born=1)
    planted.write_records(tables.GPUS, planted.node, [make_gpu_sample(2, 6), make_gpu_sample(4, 10)])
    planted.write_records(
        tables.GPU_PROCESSES,
        planted.node,
        [make_gpu_process_sample(2, make_identity(0).pid, 5.5), make_gpu_process_sample(4, make_identity(0).pid, 9)],
    )
    recording = planted.open_recording()
    outside = row_of(read_only_ledger(recording, 6), "outside_pytorch")
    assert (outside.bytes, outside.note) == (gib_to_bytes(1.5), "")
    early = row_of(read_only_ledger(recording, 2.5), "outside_pytorch")
    assert (early.bytes, "while NVML was read" in early.note) == (gib_to_bytes(1.5), True)


def test_memory_outside_pytorch_while_the_allocator_grows_is_the_least_that_readings_agree_on(tmp_path: Path) -> None:
    """It holds 5 GiB there, 1 after second 9. NVML is read up to a second later than the allocator."""
    planted = PlantedRecording(tmp_path)
    planted.node_event()
    planted.write_engine()
    readings = [make_reading(second, 1, 2 * second) for second in range(1, 31)]
    planted.write_records(tables.ALLOCATOR, make_identity(0), readings, born=1)
    seconds = [second + 1 - 0.07 * (second % 15) for second in range(2, 30)]
    held = [(second, 2 * second + (1 if second > 9 else 5)) for second in sorted(seconds)]
    planted.write_records(tables.GPUS, planted.node, [make_gpu_sample(second, size + 1) for second, size in held])
    samples = [make_gpu_process_sample(second, make_identity(0).pid, size) for second, size in held]
    planted.write_records(tables.GPU_PROCESSES, planted.node, samples)
    recording = planted.open_recording()
    for second, size in ((30, 1), (20.9, 1), (8.9, 5)):
        outside = row_of(read_only_ledger(recording, second), "outside_pytorch").bytes
        assert outside == pytest.approx(gib_to_bytes(size), rel=0.3)


def record_container(folder: Path, first: float) -> PlantedRecording:
    """NVML shows one process, by the number that it has outside of the container."""
    recording = PlantedRecording(folder)
    recording.node_event()
    recording.write_engine()
    recording.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(2 + i, 1, 4) for i in range(5)], born=1)
    looks = [make_gpu_sample(second, 2 if second < 2 else 7.5) for second in range(8) if second >= first]
    recording.write_records(tables.GPUS, recording.node, looks)
    recording.write_records(
        tables.GPU_PROCESSES, recording.node, [make_gpu_process_sample(second, 99999, 5) for second in range(2, 8)]
    )
    return recording


def test_a_container_hides_the_jobs_processes(tmp_path: Path) -> None:
    ledger = read_only_ledger(record_container(tmp_path, 0).open_recording(), 5.5)
    expected = {"free": 72.5, "before_the_job": 2, "outside_pytorch": 1.5, "reserved_unallocated": 3, "unattributed": 1}
    assert list_row_sizes(ledger) == expected
    assert ledger.job_bytes is None
    assert any("as in a container" in note for note in ledger.notes)


def test_a_container_and_no_look_from_before_the_job(tmp_path: Path) -> None:
    ledger = read_only_ledger(record_container(tmp_path, 3).open_recording(), 5.5)
    assert list_row_sizes(ledger) == {"free": 72.5, "outside_pytorch": 3.5, "reserved_unallocated": 3, "unattributed": 1}
    assert any("may belong to anybody" in note for note in ledger.notes)


def test_no_nvml(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_engine()
    recording.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(2, 1, 4)], born=1)
    ledger = read_only_ledger(recording.open_recording(), 5.5)
    assert list_row_sizes(ledger) == {"rest_of_device": 75, "reserved_unallocated": 3, "unattributed": 1}
    assert "NVML was not available" in ledger.notes[0]


def test_an_allocator_that_shows_no_blocks(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(19, "after_update", {}, host={})
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    assert list_row_sizes(ledger) == {**DEVICE, "reserved_unallocated": 7.25, "unattributed": 14.75}
    assert "cudaMallocAsync" in ledger.notes[0]


def test_blocks_of_just_the_size_of_cublas_workspaces_are_called_that(tmp_path: Path) -> None:
    recording, hopper, older = record_two_steps(tmp_path), 4096 * 8 * 1024, 4096 * 2 * 1024 + 16 * 8 * 1024
    largest, total = [gib_to_bytes(0.0625), hopper, hopper, older, 512], gib_to_bytes(0.0625) + 2 * hopper + older + 1024
    parts = {**PARTS, "buffers": 0.25}
    recording.write_inventory(19, "after_update", parts, unclaimed_bytes=total, unclaimed_largest=largest)
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    assert ledger.sum_bytes("cublas_workspaces") == 2 * hopper + older
    assert ledger.sum_bytes("unexplained") == gib_to_bytes(0.0625) + 1024
    assert ledger.unexplained_largest == (gib_to_bytes(0.0625), 512)


@pytest.mark.parametrize(
    ("groups", "workspaces"),
    [([[33_554_432, 2], [64, 3]], 2), ([[33_554_432, 40]], 4), ([[33_554_432], [33_554_432, -1]], 0)],
)
def test_workspaces_are_counted_among_larger_blocks_and_are_few(
    groups: list[list[int]], workspaces: int, tmp_path: Path
) -> None:
    """The largest blocks that are listed one by one may all be of a leak."""
    recording = record_two_steps(tmp_path)
    recording.write_inventory(18.6, "after_update", PARTS, unclaimed=0.25, unclaimed_groups=groups)
    assert read_only_ledger(recording.open_recording(), 19.5).sum_bytes("cublas_workspaces") == workspaces * 33_554_432


def test_a_workspace_may_be_in_a_block_that_was_not_split(tmp_path: Path) -> None:
    """Of the thread of the backward, beside one of the exact size; alone it is any block."""
    exact, unsplit, larger = 33_554_432, 34_340_864, 35_651_584
    for groups, size in (([[larger, 1], [unsplit, 1], [exact, 1]], exact + unsplit), ([[unsplit, 1]], 0)):
        folder = tmp_path / str(size)
        folder.mkdir()
        recording = record_two_steps(folder)
        recording.write_inventory(18.6, "after_update", PARTS, unclaimed=0.25, unclaimed_groups=groups)
        assert read_only_ledger(recording.open_recording(), 19.5).sum_bytes("cublas_workspaces") == size


def test_memory_since_the_first_forward_is_the_scripts_output(tmp_path: Path) -> None:
    """As logits that a variable of the loop holds until the next forward."""
    recording = record_two_steps(tmp_path)
    recording.write_inventory(18.6, "after_update", PARTS, unclaimed=0.25 + 0.1875)
    ledger = read_only_ledger(recording.open_recording(), 23.5)
    assert (ledger.sum_bytes("unexplained"), ledger.unexplained_largest) == (gib_to_bytes(0.25), ())
    assert ledger.sum_bytes("activations") == gib_to_bytes(17 - 14.5 - 0.25)


def test_older_recordings_tell_that_from_the_making_of_the_engine(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(3, "init", {"parameters": 2}, rank=1, unclaimed=0.125)
    recording.write_inventory(18.6, "after_update", PARTS, rank=1, unclaimed=0.4375)
    recording.write_engine(rank=1)
    recording.write_records(tables.ALLOCATOR, make_identity(1), [make_reading(at, 20, 22) for at in range(2, 30)], born=1)
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    # Rank 0 has the other 0.125 GiB.
    assert ledger.sum_bytes("unexplained") == gib_to_bytes(0.125 + 0.125)


def test_unclaimed_memory_of_a_rank_entered_late_stays_unexplained(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(rank=1)
    recording.write_inventory(18.6, "after_update", PARTS, rank=1, unclaimed=0.4375)
    recording.write_records(tables.ALLOCATOR, make_identity(1), [make_reading(at, 20, 22) for at in range(2, 30)], born=1)
    assert read_only_ledger(recording.open_recording(), 19.5).sum_bytes("unexplained") == gib_to_bytes(0.125 + 0.4375)


def test_an_inventory_newer_than_the_last_reading_waits_for_the_next(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(19.2, "after_update", {"parameters": 70})
    assert read_only_ledger(recording.open_recording(), 19.5).sum_bytes("parameters", "freed_since") == gib_to_bytes(2)


def test_a_rank_that_left_is_not_read_any_more(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 29.2, Goodbye)
    assert list_row_sizes(read_only_ledger(recording.open_recording(), 29.5)) == {
        "free": 51.5,
        "driver": 1.5,
        "other_processes": 4,
        "this_job": 23,
    }


def test_a_probe_that_was_removed_reports_nothing_until_it_is_entered_again(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 29.2, Left, lost=0)
    ledger = read_only_ledger(recording.open_recording(), 29.5)
    assert list_row_sizes(ledger) == {"free": 51.5, "driver": 1.5, "other_processes": 4, "this_job": 23}
    assert ledger.notes == ("The probe was removed from rank 0: the division of this job's memory since then is not known.",)
    recording.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(29.7, 3, 4)], born=29.6)
    again = read_only_ledger(recording.open_recording(), 29.8)
    assert (again.reserved_bytes, again.notes) == (gib_to_bytes(4), read_only_ledger(recording.open_recording(), 29.1).notes)


def test_two_ranks_on_one_gpu_add_up(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(rank=1)
    recording.write_records(tables.ALLOCATOR, make_identity(1), [make_reading(at, 3, 4) for at in range(2, 30)], born=1)
    recording.write_inventory(10, "init", {"parameters": 2}, rank=1, unclaimed=0.5)
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    assert ledger.ranks == (0, 1)
    assert (ledger.reserved_bytes, ledger.allocated_bytes) == (gib_to_bytes(26), gib_to_bytes(17.75))
    assert (ledger.sum_bytes("parameters"), ledger.sum_bytes("unexplained")) == (gib_to_bytes(4), gib_to_bytes(0.625))


def test_two_engines_of_one_process_add_up(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(at=18.8)
    # The allocator is one: all that the first engine has is unclaimed by the second.
    recording.write_inventory(18.9, "init", {"parameters": 0.125}, engine=1, unclaimed=14.625)
    ledger = read_only_ledger(recording.open_recording(), 19.5)
    assert ledger.sum_bytes("parameters") == gib_to_bytes(2.125)
    assert (ledger.sum_bytes("unexplained"), ledger.unexplained_largest) == (gib_to_bytes(0.125), ())


def test_a_gpu_that_the_job_does_not_use_and_one_renumbered_for_it(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.node_event(gpus=2)
    recording.write_engine(on=1)  # CUDA_VISIBLE_DEVICES=1: its ordinal is 0
    recording.write_records(tables.ALLOCATOR, make_identity(0), [make_reading(2, 1, 4), make_reading(4, 1, 4)], born=1)
    recording.write_records(tables.GPUS, recording.node, [make_gpu_sample(3, 6, index=0), make_gpu_sample(3, 5, index=1)])
    recording.write_records(
        tables.GPU_PROCESSES,
        recording.node,
        [make_gpu_process_sample(3, 7, 5, 0), make_gpu_process_sample(3, make_identity(0).pid, 4.5, 1)],
    )
    first, second = (check_ledger(found) for found in read_ledgers(recording.open_recording().at(second_to_unix_ns(5))))
    assert list_row_sizes(first) == {"free": 74, "driver": 1, "other_processes": 5}
    assert (second.ranks, second.sum_bytes("outside_pytorch")) == ((0,), gib_to_bytes(0.5))


def test_a_rank_started_again_holds_what_its_last_process_does(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_records(tables.ALLOCATOR, make_identity(0, pid=500), [make_reading(28, 1, 2)], born=27.5)
    ledger = read_only_ledger(recording.open_recording(), 28.5)
    assert (ledger.ranks, ledger.allocated_bytes) == ((0,), GIB)


def test_no_gpu_at_all(tmp_path: Path) -> None:
    assert read_ledgers(read_recording(tmp_path).at(second_to_unix_ns(5))) == ()
    assert read_peak_ledgers(read_recording(tmp_path).at(second_to_unix_ns(5))) == ()
    assert read_host_ledgers(read_recording(tmp_path).at(second_to_unix_ns(5))) == ()


# --- any recording -------------------------------------------------------------------------------------------------------

amounts = st.floats(0, 90)
seconds = st.floats(0, 40)


@st.composite
def any_recording(draw: st.DrawFn, folder: Path) -> Recording:
    recording = PlantedRecording(folder)
    recording.node_event(gpus=draw(st.integers(0, 2)))
    ranks = draw(st.integers(1, 2))
    for rank in range(ranks):
        recording.write_engine(rank=rank, at=draw(seconds), on=draw(st.integers(0, 1)))
        times = sorted(draw(st.lists(seconds, max_size=6)))
        readings = [
            make_reading(second, draw(amounts), draw(amounts), phase=draw(st.sampled_from(tables.PHASES)), edge=edge)
            for second in times
            for edge in [draw(st.sampled_from(["begin", "end", "tick"]))]
        ]
        kind = {"peaks": draw(st.sampled_from(["window", "process"]))}
        recording.write_records(tables.ALLOCATOR, make_identity(rank), readings, born=draw(seconds), **kind)
        ends = sorted(draw(st.lists(seconds, max_size=4)))
        phases = draw(st.lists(st.sampled_from(["forward", "backward", "step"]), min_size=4, max_size=4))
        flags = draw(st.sampled_from([0, BOUNDARY, FAILED]))
        recording.write_records(
            tables.SPANS,
            make_identity(rank),
            [make_span(max(0, e - 1), e, p, 0, flags) for e, p in zip(ends, phases, strict=False)],
        )
        for when in draw(
            st.lists(st.sampled_from(["init", "before_forward", "before_update", "after_update"]), unique=True)
        ):
            parts = draw(st.dictionaries(st.sampled_from(CATEGORIES), amounts))
            host = draw(st.dictionaries(st.sampled_from(CATEGORIES), amounts))
            recording.write_inventory(draw(seconds), when, parts, rank=rank, unclaimed=draw(amounts), host=host)
    for index in draw(st.sets(st.integers(0, 1))):
        looks = sorted(draw(st.lists(seconds, min_size=1, max_size=6)))
        sampler = recording.node._replace(pid=1000 + index)
        recording.write_records(
            tables.GPUS, sampler, [make_gpu_sample(second, draw(amounts), index=index) for second in looks]
        )
        pids = draw(st.sets(st.sampled_from([100, 101, 7]), max_size=3))
        held = [make_gpu_process_sample(second, pid, draw(amounts), index) for second in looks for pid in sorted(pids)]
        recording.write_records(tables.GPU_PROCESSES, sampler, held)
    sampled = [make_process_sample(second, 100, draw(amounts)) for second in sorted(draw(st.lists(seconds, max_size=4)))]
    recording.write_records(tables.PROCESSES, recording.node, sampled)
    return recording.open_recording()


@given(st.data(), seconds)
def test_rows_add_up_in_any_recording(data: st.DataObject, second: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recording = data.draw(any_recording(Path(folder)))
        for found in read_ledgers(recording.at(second_to_unix_ns(second))):
            check_ledger(found)
        for peak in read_peak_ledgers(recording.at(second_to_unix_ns(second))):
            check_ledger(peak.ledger)
        for host in read_host_ledgers(recording.at(second_to_unix_ns(second))):
            assert sum(row.bytes for row in host.rows) == host.resident_bytes
            assert all(row.bytes >= 0 or row.key == "not_resident" for row in host.rows)


# --- peaks ---------------------------------------------------------------------------------------------------------------


def test_the_ledger_at_the_peak(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path).open_recording()
    (ledger,) = read_peak_ledgers(recording.at(second_to_unix_ns(29.5)))
    check_ledger(ledger.ledger)
    assert (ledger.rank, ledger.peak.phase, ledger.peak.step, ledger.peak.exact) == (0, "backward", 1, True)
    assert ledger.peak.allocated_bytes == ledger.ledger.allocated_bytes == gib_to_bytes(19.5)
    # Gradients that a backward is just making are still its temporaries.
    parts = {**PARTS, "activations": 4.875, "unexplained": 0.125}
    assert list_row_sizes(ledger.ledger) == {**DEVICE, "reserved_unallocated": 2.5, **parts}
    (earlier,) = read_peak_ledgers(recording.at(second_to_unix_ns(15)))
    assert (earlier.peak.phase, earlier.peak.step, earlier.ledger.allocated_bytes) == ("forward", 0, gib_to_bytes(9.5))


def test_outside_pytorch_at_a_peak_is_of_a_reading_without_changes_or_a_bound(tmp_path: Path) -> None:
    """NVML is read while the allocator grows to its peak by 8 GiB, and once more right after it."""
    readings = [
        *(make_reading(3, 1, 1, phase="backward", edge="begin"), make_reading(4, 9, 9, phase="backward", edge="end")),
        *(make_reading(5, 2, 9, phase="step", edge="end"), make_reading(6, 2, 9)),
    ]
    ledgers = []
    for later in (False, True):
        (tmp_path / str(later)).mkdir()
        planted = PlantedRecording(tmp_path / str(later))
        planted.node_event()
        planted.write_engine()
        planted.write_records(tables.SPANS, make_identity(0), [make_span(3, 4, "backward")])
        planted.write_records(tables.ALLOCATOR, make_identity(0), readings, born=1, peaks="window")
        used = [(3.5, 10), (4.5, 10.5)] if later else [(3.5, 10)]
        planted.write_records(tables.GPUS, planted.node, [make_gpu_sample(at, size + 0.5) for at, size in used])
        samples = [make_gpu_process_sample(at, make_identity(0).pid, size) for at, size in used]
        planted.write_records(tables.GPU_PROCESSES, planted.node, samples)
        (peak,) = read_peak_ledgers(planted.open_recording().at(second_to_unix_ns(6)))
        ledgers.append(peak.ledger)
    bound, exact = (row_of(ledger, "outside_pytorch") for ledger in ledgers)
    assert (bound.bytes, bound.is_bound) == (gib_to_bytes(9), True)
    assert "at most this, and at least 1.00 GiB" in bound.note
    assert (exact.bytes, exact.is_bound) == (gib_to_bytes(1.5), False)
    assert exact.note == "Memory outside PyTorch is from NVML's reading 500 ms after this moment."


def read_phase_peaks(recording: Recording, second: float) -> dict[str, float]:
    (peaks,) = read_rank_peaks(recording.at(second_to_unix_ns(second)))
    assert [peak.allocated_bytes for peak in peaks.phases] == sorted((p.allocated_bytes for p in peaks.phases), reverse=True)
    return {peak.phase: peak.allocated_bytes / GIB for peak in peaks.phases}


def test_the_peak_of_each_phase(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path).open_recording()
    assert read_phase_peaks(recording, 29.5) == {"backward": 19.5, "step": 18.5, "forward": 17.5, "other": 14.75, "init": 2}
    assert read_phase_peaks(recording, 15) == {"forward": 9.5, "other": 6.75, "init": 2}
    (peaks,) = read_rank_peaks(recording.at(second_to_unix_ns(29.5)))
    assert all(peak.exact for peak in peaks.phases)
    assert peaks.reserved is not None
    assert (peaks.reserved.phase, peaks.reserved.reserved_bytes, peaks.reserved.step) == ("forward", gib_to_bytes(22), 0)


def record_phases(
    folder: Path, plan: Sequence[tuple[float, float, str, int]], readings: Sequence[Any], **header: Any
) -> Recording:
    """One rank with spans (begin, end, phase, depth) and readings of its allocator."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.write_engine()
    spans = [make_span(begin, end, phase, depth=depth) for begin, end, phase, depth in sorted(plan, key=lambda p: p[1])]
    begins = [make_record(tables.BEGINS, begin, phase=PHASE_CODE[p], depth=depth) for begin, _, p, depth in sorted(plan)]
    recording.write_records(tables.SPANS, who, spans)
    recording.write_records(tables.BEGINS, who, begins)
    recording.write_records(tables.ALLOCATOR, who, readings, **{"peaks": "window", **header})
    return recording.open_recording()


def test_a_window_over_counted_steps_names_all_of_them(tmp_path: Path) -> None:
    """The reading in step 6 has the number of the last step that was not only counted."""
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.write_engine()
    spans = [make_span(10 + at, 10.9 + at, "step", at, tables.BOUNDARY | tables.COUNTED) for at in range(10)]
    recording.write_records(tables.SPANS, who, spans)
    recording.write_records(
        tables.ALLOCATOR,
        who,
        [
            make_reading(12.9, 2, 50, phase="step", edge="end", step=2),
            make_reading(16.5, 9, 60, step=2, retries=1),
            make_reading(18.9, 3, 50, phase="step", edge="end", step=8, retries=1),
        ],
        peaks="window",
    )
    at = recording.open_recording().at(second_to_unix_ns(19))
    (peaks,) = read_rank_peaks(at)
    highest = peaks.owning_peak
    assert (highest.step, highest.last_step, highest.steps_text) == (3, 6, "3-6")
    assert highest.place_text == "in several phases of steps 3 to 6"
    (health,) = read_allocator_health(at)
    assert [flush.step for flush in health.flushes] == [6]
    assert health.at_peak is not None
    assert health.at_peak.title == "highest reserved in several phases of steps 3 to 6"


def test_a_window_after_the_last_finished_step_is_of_no_step_that_did_not_begin(tmp_path: Path) -> None:
    """The rank reads its allocator once more when the recording ends, or a forward of another step failed before."""
    spans = [make_span(10 + at, 10.9 + at, "step", at, tables.BOUNDARY | tables.COUNTED) for at in range(4)]
    readings = [
        make_reading(10.9, 2, 50, phase="step", edge="end", step=0),
        make_reading(14.5, 9, 60, phase="step", edge="end", step=4),
    ]
    peaks = []
    for name, more in (("ended", []), ("failed", [make_span(14.1, 14.4, "forward", 4, tables.FAILED)])):
        (tmp_path / name).mkdir()
        recording, who = PlantedRecording(tmp_path / name), make_identity(0)
        recording.write_engine()
        recording.write_records(tables.SPANS, who, [*spans, *more])
        recording.write_records(tables.ALLOCATOR, who, readings, peaks="window")
        (rank,) = read_rank_peaks(recording.open_recording().at(second_to_unix_ns(15)))
        peaks.append(rank.owning_peak)
    assert [(peak.last_step, peak.has_ended) for peak in peaks] == [(3, False), (4, False)]
    assert [peak.place_text for peak in peaks] == [
        "in several phases of steps 1 to 3 or after them",
        "in several phases of steps 1 to 4",
    ]


def make_peak_reading(at: float, peak: float, phase: str, edge: str) -> Any:
    return make_reading(
        at, 1, 50, phase=phase, edge=edge, allocated_peak_bytes=gib_to_bytes(peak), reserved_peak_bytes=gib_to_bytes(50)
    )


@pytest.mark.parametrize(
    ("plan", "readings", "expected"),
    [
        pytest.param(
            [(1, 5, "step", 0), (2, 3, "cpu_optimizer", 1)],
            [
                make_peak_reading(1, 3, "step", "begin"),
                make_peak_reading(2, 5, "cpu_optimizer", "begin"),
                make_peak_reading(3, 7, "cpu_optimizer", "end"),
                make_peak_reading(5, 6, "step", "end"),
                make_peak_reading(6, 4, "other", "tick"),
            ],
            {"cpu_optimizer": 7, "step": 6, "other": 4, "init": 3},
            id="a window that a part of the step ends or begins",
        ),
        pytest.param(
            [(1, 5, "backward", 0), (3, 4, "reduce", 1)],
            [
                make_peak_reading(1, 3, "backward", "begin"),
                make_peak_reading(3.5, 9, "reduce", "tick"),
                make_peak_reading(5, 9, "backward", "end"),
            ],
            {"backward": 9, "init": 3},
            id="a reading within a part tells of all since the phase began",
        ),
        pytest.param(
            [(1, 9, "eval", 0), (2, 3, "forward", 1)],
            [
                make_peak_reading(1, 2, "eval", "begin"),
                make_peak_reading(2, 3, "forward", "begin"),
                make_peak_reading(3, 9, "forward", "end"),
                make_peak_reading(9, 5, "eval", "end"),
            ],
            {"eval": 9, "init": 2},
            id="evaluation is one phase, whatever is in it",
        ),
        pytest.param(
            [(1, 1.004, "forward", 0), (1.004, 1.008, "backward", 0), (1.008, 1.012, "step", 0)],
            [make_peak_reading(0.999, 1, "other", "begin"), make_peak_reading(1.012, 8, "step", "end")],
            {MIXED: 8, "init": 1},
            id="a short step that is read at its end only has no owner",
        ),
        pytest.param(
            [(1, 2, "backward", 0), (2.5, 3, "step", 0)],
            [
                make_peak_reading(1, 1, "backward", "begin"),
                make_peak_reading(2, 8, "backward", "end"),
                make_peak_reading(2.5002, 6, "step", "begin"),
                make_peak_reading(3, 7, "step", "end"),
            ],
            {"backward": 8, "step": 7, "other": 6, "init": 1},
            id="a step that turns out to be one a moment after it began",
        ),
    ],
)
def test_whose_the_peak_of_a_window_is(
    tmp_path: Path, plan: Sequence[tuple[float, float, str, int]], readings: Sequence[Any], expected: dict[str, float]
) -> None:
    assert read_phase_peaks(record_phases(tmp_path, plan, readings), 10) == expected


def test_peaks_of_the_process_are_owned_by_the_phase_that_raised_them(tmp_path: Path) -> None:
    plan = [(1, 2, "forward", 0), (2, 3, "backward", 0), (3, 4, "step", 0)]
    readings = [
        make_peak_reading(1, 2, "forward", "begin"),
        make_peak_reading(2, 5, "forward", "end"),
        make_peak_reading(3, 9, "backward", "end"),
        make_peak_reading(4, 9, "step", "end"),
    ]
    recording = record_phases(tmp_path, plan, readings, peaks="process")
    assert read_phase_peaks(recording, 5) == {"backward": 9, "forward": 5, "init": 2, "step": 1}
    (peaks,) = read_rank_peaks(recording.at(second_to_unix_ns(5)))
    assert [(peak.phase, peak.exact) for peak in peaks.phases] == [
        ("backward", True),
        ("forward", True),
        ("init", True),
        ("step", False),
    ]


def test_a_peak_from_before_a_rank_was_entered_belongs_to_no_phase(tmp_path: Path) -> None:
    plan = [(1, 2, "forward", 0), (2, 3, "backward", 0)]
    readings = [
        make_peak_reading(1, 12, "forward", "begin"),
        make_peak_reading(2, 5, "forward", "end"),
        make_peak_reading(3, 9, "backward", "end"),
    ]
    recording = record_phases(tmp_path, plan, readings)
    assert read_phase_peaks(recording, 5) == {"init": 12, "backward": 9, "forward": 5}
    PlantedRecording(tmp_path).write_event(make_identity(0), 0.5, Entered)
    recording = read_recording(tmp_path)
    assert read_phase_peaks(recording, 5) == {BEFORE: 12, "backward": 9, "forward": 5}
    (peaks,) = read_rank_peaks(recording.at(second_to_unix_ns(5)))
    assert peaks.peak_before_entry is not None
    assert (peaks.peak_before_entry.place_text, peaks.owning_peak.place_text) == (BEFORE, "in backward of step 0")
    (alone,) = read_rank_peaks(recording.at(second_to_unix_ns(1.5)))
    assert alone.owning_peak is alone.peak_before_entry


def test_the_ledger_of_a_rank_that_was_entered_is_of_a_peak_that_was_seen() -> None:
    """Rank 0 of four: 29.92 GiB before, 20.95 in backward since; what stays was counted only after that backward."""
    recording = recordings.open_recording("x4-attached")
    found = read_peak_ledgers(recording.at(recording.end_ns))[0]
    assert found.before is not None
    assert (found.before.allocated_bytes, found.peak.phase) == (32_121_046_528, "backward")
    assert found.ledger.allocated_bytes == found.peak.allocated_bytes == 22_498_848_256
    assert found.ledger.sum_bytes("parameters") == 16_060_523_520
    rows = read_steps(recording)
    assert rows["allocated_peak_bytes"][rows["rank"] == 0].max() == 22_498_848_256


def test_the_peak_of_the_first_update_has_the_state_that_it_made() -> None:
    """500,050,000 parameters in fp32: 16 bytes of each live in the first step of AdamW, and 4 of one intermediate."""
    recording = recordings.open_recording("gpu-linear")
    (ledger,) = read_peak_ledgers(recording.at(recording.end_ns))
    assert (ledger.peak.phase, ledger.peak.step) == ("step", 0)
    assert ledger.ledger.sum_bytes("parameters") == ledger.ledger.sum_bytes("gradients") == 2_000_883_200
    assert ledger.ledger.sum_bytes("optimizer_state") == 4_001_766_400
    assert ledger.ledger.sum_bytes(ACTIVATIONS) == pytest.approx(2_000_883_200, rel=0.01)
    earlier = read_peak_ledgers(recording.at(recording.begin_ns + 13 * S))[0]
    assert (earlier.peak.step, earlier.ledger.sum_bytes("optimizer_state")) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=40), st.integers(1, 9))
def test_peaks_are_the_same_in_blocks_of_any_size(plan: list[tuple[int, int]], block: int) -> None:
    names = ("forward", "backward", "step", "eval")
    spans = [(float(i), i + 0.9, names[kind], 0) for i, (kind, _) in enumerate(plan, 1)]
    readings = [
        row
        for i, (kind, highest) in enumerate(plan, 1)
        for row in (make_peak_reading(i, 1, names[kind], "begin"), make_peak_reading(i + 0.9, highest, names[kind], "end"))
    ]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase_peaks, "_BLOCK", block)
        recording = record_phases(Path(folder), spans, readings)
        for end in range(len(plan)):
            expected: dict[str, float] = {"init": 1, "other": 1} if end else {"init": 1}
            for kind, highest in plan[:end]:
                expected[names[kind]] = max(highest, expected.get(names[kind], 0))
            assert read_phase_peaks(recording, end + 1.1) == expected


# --- the host ------------------------------------------------------------------------------------------------------------


def test_the_hosts_rows_add_up_to_what_is_resident(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    host = {"master_weights": 0.5, "optimizer_state": 1, "gradients": 0.5}
    pinned = {"allocated_bytes": gib_to_bytes(3), "active_bytes": gib_to_bytes(50)}
    facts: dict[str, Any] = {"host": host, "host_pinned": {"master_weights": 0.5, "gradients": 0.5}}
    recording.write_inventory(19, "after_update", PARTS, pinned_allocator=pinned, **facts)
    (ledger,) = read_host_ledgers(recording.open_recording().at(second_to_unix_ns(19.5)))
    assert (ledger.rank, ledger.pid, ledger.resident_bytes) == (0, make_identity(0).pid, gib_to_bytes(6))
    rows = {row.key: (row.bytes / GIB, row.pinned_bytes / GIB) for row in ledger.rows if row.bytes}
    assert rows == {
        "gradients": (0.5, 0.5),
        "master_weights": (0.5, 0.5),
        "optimizer_state": (1, 0),
        "pinned_spare": (2, 2),
        "rest": (2, 0),
    }
    assert ledger.pinned is not None
    said = ledger.pinned.describe(lambda size: f"{size / GIB:.0f}", "GiB")
    assert said.startswith(
        "PyTorch's pinned allocator held 3 GiB, the pinned tensors of the rows above 1: tensors counted in "
    )


@pytest.mark.parametrize(("stage", "per"), [(0, 0.5), (1, 4), (2, 4), (3, 4)])
def test_bytes_for_each_parameter_that_a_rank_updates(tmp_path: Path, stage: int, per: float) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_engine(zero_stage=stage, data_parallel=8)
    recording.write_records(tables.SPANS, make_identity(0), [make_span(2, 3, "forward")])
    recording.write_records(tables.PROCESSES, recording.node, [make_process_sample(2, make_identity(0).pid, 6)])
    recording.write_inventory(2, "init", {}, host={"master_weights": 0.5})
    (ledger,) = read_host_ledgers(recording.open_recording().at(second_to_unix_ns(3)))
    (row,) = [row for row in ledger.rows if row.key == "master_weights"]
    assert (row.per_parameter, ledger.updated_parameters) == (per, GIB if stage == 0 else GIB // 8)


def test_moments_that_were_never_written_to_are_not_resident(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(19, "after_update", PARTS, host={"optimizer_state": 9})
    (ledger,) = read_host_ledgers(recording.open_recording().at(second_to_unix_ns(19.5)))
    assert {row.key: row.bytes / GIB for row in ledger.rows if row.bytes} == {"optimizer_state": 9, "not_resident": -3}


def test_an_engine_without_an_optimizer_updates_nothing(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_engine(optimizer="")
    recording.write_records(tables.SPANS, make_identity(0), [make_span(2, 3, "eval", flags=EVAL)])
    recording.write_records(tables.PROCESSES, recording.node, [make_process_sample(2, make_identity(0).pid, 6)])
    (ledger,) = read_host_ledgers(recording.open_recording().at(second_to_unix_ns(3)))
    assert ledger.updated_parameters is None
    assert [(row.key, row.bytes) for row in ledger.rows] == [("rest", gib_to_bytes(6))]
