"""What the memory screen shows at a cursor: the same bytes as the ledgers, for a chosen rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import recordings
from memory_recording import (
    GIB,
    PARTS,
    PlantedRecording,
    gib_to_bytes,
    make_gpu_process_sample,
    make_gpu_sample,
    make_process_sample,
    make_reading,
    record_two_steps,
)
from memory_sums import check_memory_view
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.memory.memory_table import FREED, TO_COME, MemoryLine
from zerotop.analysis.views.memory_view import MemoryView, read_last_memory, read_memory_view
from zerotop.analysis.views.recording_source import RecordingSource, StepEnd
from zerotop_probe.recording import events, tables


def view_at(recording: PlantedRecording, second: float, rank: int | None = None, most: int = 8) -> MemoryView:
    return read_memory_view(recording.open_recording().at(BEGIN_NS + int(second * S)), rank, most)


def current_sizes(lines: Sequence[MemoryLine]) -> dict[str, float]:
    return {line.key: line.now_bytes / GIB for line in lines if line.now_bytes}


def test_lines_of_a_gpu(tmp_path: Path) -> None:
    view = view_at(record_two_steps(tmp_path), 19.5)
    check_memory_view(view)
    assert current_sizes(view.lines) == {
        **PARTS,
        "activations": 0.125,
        "unexplained": 0.125,
        "allocated": 14.75,
        "reserved_unallocated": 7.25,
        "reserved": 22,
        "outside_pytorch": 1,
        "job": 23,
        "other_processes": 4,
        "driver": 1.5,
        "free": 51.5,
        "device": 80,
    }
    expected = {line.key: (line.expected_bytes, line.difference_bytes) for line in view.lines if line.expected_bytes}
    assert expected["parameters"] == (gib_to_bytes(2), 0)
    gradients = next(line for line in view.lines if line.key == "gradients")
    assert (gradients.now_bytes, gradients.expected_bytes, gradients.absence_reason) == (0, gib_to_bytes(2), FREED)
    assert [line.key for line in view.lines if line.is_sum] == ["allocated", "reserved", "job", "device"]
    (own,) = view.own_estimates
    assert own.gpu_bytes == 2 * GIB + 18 * GIB
    assert view.rule is not None


def test_tensors_that_the_first_update_makes_are_still_to_come() -> None:
    recording = recordings.open_recording("z2")
    lines = read_memory_view(recording.at(recording.begin_ns + int(39.41 * S))).lines
    away = {line.key: line.absence_reason for line in lines if line.expected_bytes}
    assert away == {"parameters": "", "gradients": TO_COME, "master_weights": "", "optimizer_state": TO_COME}


def test_the_peak_beside_now(tmp_path: Path) -> None:
    view = view_at(record_two_steps(tmp_path), 29.5)
    assert view.peaks is not None
    assert (view.peaks.phases[0].phase, view.peaks.phases[0].allocated_bytes) == ("backward", gib_to_bytes(19.5))
    peak = {line.key: (line.peak_bytes or 0) / GIB for line in view.lines}
    assert (peak["allocated"], peak["activations"], peak["device"]) == (19.5, 4.875, 80)


def test_when_ranks_have_gone_it_is_the_moment_before(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_event(make_identity(0), 29.2, events.Goodbye)
    view = view_at(recording, 40)
    assert view.moment_ns == BEGIN_NS + int(29.2 * S) - 1
    assert current_sizes(view.lines)["allocated"] == 14.75
    assert view.host is not None


def test_a_job_that_is_over_without_a_recorded_end_is_shown_as_its_last_step_left_it(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    last = StepEnd(0, BEGIN_NS + int(19.5 * S))
    at = recording.open_recording().at(BEGIN_NS + 40 * S)
    assert (read_memory_view(at, last=last).moment_ns, read_memory_view(at, last=last).step) == (at.cursor_ns, None)
    view = read_memory_view(at, last=last, is_over=True)
    assert (view.moment_ns, view.step, view.peaks_until_ns) == (last.unix_ns, 0, at.cursor_ns)
    assert current_sizes(view.lines) == current_sizes(view_at(recording, 19.5).lines)


@pytest.mark.parametrize("name", ["cpu-hang", "gpu-linear", "outside-grows", "x4-z3", "z2-offload"])
def test_live_and_memory_have_the_same_figures_at_the_end(name: str) -> None:
    source = RecordingSource(recordings.open_recording(name))
    assert source.last_step_end is not None
    live = {(gpu.host, gpu.index): gpu.allocated_bytes for gpu in source.view_at(source.last_step_end.unix_ns).gpus}
    for gpu in read_last_memory(source, most=99).gpus:
        assert not gpu.ranks or gpu.allocated_bytes == live[gpu.host, gpu.index]


def test_when_a_failure_ended_them_it_is_that(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    facts = {
        "device": 0,
        "requested_bytes": gib_to_bytes(60),
        "free_bytes": gib_to_bytes(50),
        "limit_bytes": gib_to_bytes(79),
        "phase": "backward",
    }
    recording.write_event(make_identity(0), 29.1, events.OutOfMemory, step=1, micro_step=0, **facts)
    recording.write_event(make_identity(0), 29.2, events.Goodbye)
    view = view_at(recording, 40)
    assert view.moment_ns == BEGIN_NS + int(29.1 * S)
    assert view.failure is not None
    assert view.failure.kind == "memory"
    assert view_at(recording, 24).failure is None


def test_the_state_at_the_end_of_a_step_names_the_moment_of_an_earlier_reading(tmp_path: Path) -> None:
    """Of counted steps only the end is known, and the allocator is read at no end but the last."""
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.write_engine()
    counted = tables.BOUNDARY | tables.COUNTED
    spans = [
        *(make_span(10.5, 10.9, "step", 0, tables.BOUNDARY), make_span(11.8, 11.9, "step", 1, counted)),
        *(make_span(12.8, 12.9, "step", 2, counted), make_span(13.1, 13.5, "backward", 3)),
        make_span(13.8, 13.9, "step", 3, tables.BOUNDARY),
    ]
    readings = [
        make_reading(10.9, 5, 9, phase="step", edge="end", step=0),
        make_reading(11.64, 7, 9, step=0),
        make_reading(13.2, 6, 9, phase="backward", step=3),
    ]
    recording.write_records(tables.SPANS, who, spans)
    recording.write_records(tables.ALLOCATOR, who, readings, peaks="window")
    opened = recording.open_recording()
    notes = []
    for step in range(4):
        end_ns = BEGIN_NS + int(round(10.9 + step, 1) * S)
        view = read_memory_view(opened.at(end_ns), last=StepEnd(step, end_ns))
        assert view.gpu is not None
        notes.append([note for note in view.gpu.notes if "last read" in note])
    text = "PyTorch's allocator was last read {}: what it reserved and allocated is of that moment."
    assert notes == [
        [],
        [text.format("260 ms before the end of step 1")],
        [text.format("1.26 s before the end of step 2, in step 1")],
        [text.format("700 ms before the end of step 3, in backward")],
    ]


def record_ranks(folder: Path, count: int) -> PlantedRecording:
    """So many ranks on a GPU each, the later the more they hold."""
    recording = PlantedRecording(folder)
    recording.node_event(gpus=count)
    for rank in range(count):
        recording.write_engine(rank=rank, on=rank)
        recording.write_records(
            tables.ALLOCATOR, make_identity(rank), [make_reading(t, 1 + rank, 2 + rank) for t in range(2, 9)], born=1
        )
    looks = [row for t in range(9) for row in [make_gpu_sample(t, 3 + rank, index=rank) for rank in range(count)]]
    recording.write_records(tables.GPUS, recording.node, looks)
    held = [
        row
        for t in range(2, 9)
        for row in [make_gpu_process_sample(t, make_identity(r).pid, 2.5 + r, r) for r in range(count)]
    ]
    recording.write_records(tables.GPU_PROCESSES, recording.node, held)
    sampled = [
        row for t in range(9) for row in [make_process_sample(t, make_identity(r).pid, 1 + r, r) for r in range(count)]
    ]
    recording.write_records(tables.PROCESSES, recording.node, sampled)
    return recording


def test_another_rank_is_another_gpu(tmp_path: Path) -> None:
    view = view_at(record_ranks(tmp_path, 3), 8.5, rank=2)
    check_memory_view(view)
    assert (view.rank, len(view.gpus), view.hidden_gpus) == (2, 3, 0)
    assert view.gpu is not None
    assert (view.gpu.index, view.gpu.ranks) == (2, (2,))
    assert view.host is not None
    assert view.host.resident_bytes == gib_to_bytes(3)


def test_of_many_gpus_the_chosen_one_and_outliers_are_shown(tmp_path: Path) -> None:
    view = view_at(record_ranks(tmp_path, 9), 8.5, rank=3, most=4)
    check_memory_view(view)
    assert [gpu.index for gpu in view.gpus] == [0, 3, 7, 8]
    assert [host.rank for host in view.hosts] == [0, 3, 7, 8]
    assert (view.hidden_gpus, view.hidden_hosts) == (5, 5)


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    assert view_at(record_ranks(tmp_path, 2), 8.5, rank=7).rank == 0


def test_an_empty_recording(tmp_path: Path) -> None:
    view = view_at(PlantedRecording(tmp_path), 3)
    check_memory_view(view)
    assert (view.rank, view.gpus, view.hosts, view.lines, view.host_lines, view.peaks) == (None, (), (), (), (), None)
    assert (view.trace, view.failure, view.setup, view.health) == (None, None, None, None)


def test_no_probe_only_nvml(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.node_event()
    recording.write_records(tables.GPUS, recording.node, [make_gpu_sample(1, 3)])
    view = view_at(recording, 1.5)
    check_memory_view(view)
    assert current_sizes(view.lines) == {"driver": 3, "free": 77, "device": 80}
