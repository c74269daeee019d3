"""A look through the microscope, from the request to the curve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recordings import find_packed_file, open_recording
from zerotop.analysis.memory.microscope import AllocationTrace, read_last_trace, read_traces
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.cli import main
from zerotop.commands.job.microscope_request import request_trace
from zerotop.recording.reader import Recording
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording import directory
from zerotop_probe.recording.clock import read_clock_pair
from zerotop_probe.recording.tables import PHASES
from zerotop_probe.recording.writer import Identity

ME = Identity.for_this_process("rank", 0)


class Memory:
    """As much of torch.cuda.memory as a microscope needs: a history that a test fills in."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.history: list[dict[str, Any]] = []

    def memory_stats(self, device: int) -> dict[str, int]:
        return {f"{name}_bytes.all.current": 1000 for name in ("allocated", "requested", "reserved")}

    def _record_memory_history(self, enabled: str | None, **options: Any) -> None:
        self.recording = enabled and options
        self.history = []

    def _snapshot(self) -> dict[str, Any]:
        return {"device_traces": [self.history]}

    def add_action(self, action: str, address: int, size: int) -> None:
        pair = read_clock_pair()
        time_us = (now() + pair["unix_ns"] - pair["monotonic_ns"]) // 1000
        self.history.append({"action": action, "addr": address, "size": size, "time_us": time_us})


class Rank:
    """A rank with a microscope, taking steps."""

    def __init__(self, recording: str) -> None:
        self.recording = recording
        self.memory = Memory()
        self.recorder = Recorder(recording, ME, CostMeter())
        self.microscope = StepMicroscope(recording, ME, 0, self.memory, self.recorder.write_event, CostMeter())

    def run_step(self, number: int, work: Callable[[], None] = lambda: None) -> None:
        span = self.recorder.begin_span(now(), "backward", (0, number, 0))
        work()
        self.recorder.end_span(span, now())
        self.microscope.poll(number, 0, 0)
        self.microscope.end_step(number)

    def read_looks(self) -> tuple[AllocationTrace, ...]:
        recording = Recording.open(Path(self.recording))
        return read_traces(recording.at(recording.last_written_ns))


@pytest.fixture
def watched_rank(tmp_path: Path) -> Rank:
    return Rank(directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording")))


def test_without_a_request_nothing_happens(watched_rank: Rank) -> None:
    watched_rank.run_step(0, lambda: pytest.fail("recorded") if watched_rank.memory.recording else None)
    assert watched_rank.read_looks() == ()


def test_the_curve_its_peak_and_who_was_alive(watched_rank: Rank) -> None:
    assert request_trace(watched_rank.recording, steps=2, stacks=False) == 1
    watched_rank.run_step(4)
    assert watched_rank.memory.recording["context"] is None

    def run_first_step() -> None:
        watched_rank.memory.add_action("free_completed", 7, 100)  # of a block from before
        watched_rank.memory.add_action("segment_alloc", 1 << 20, 1 << 20)
        watched_rank.memory.add_action("alloc", 512, 300)
        watched_rank.memory.add_action("alloc", 1024, 50)
        watched_rank.memory.add_action("free_requested", 512, 300)
        watched_rank.memory.add_action("free_completed", 512, 300)

    watched_rank.run_step(5, run_first_step)
    assert watched_rank.read_looks() == ()
    watched_rank.run_step(6, lambda: watched_rank.memory.add_action("alloc", 512, 20))
    assert watched_rank.memory.recording is None
    (look,) = watched_rank.read_looks()
    assert look.curve_bytes.tolist() == [900, 1200, 1250, 950, 970]
    assert (look.first_step, look.steps, look.peak_bytes, look.peak_phase) == (5, 2, 1250, "backward")
    assert [(block.size_bytes, block.phase) for block in look.largest] == [(300, "backward"), (50, "backward")]
    assert look.before_bytes == 900
    assert look.begin_ns < look.peak_ns < look.end_ns <= look.known_ns
    watched_rank.run_step(7)
    assert len(watched_rank.read_looks()) == 1


def test_another_look_with_stacks_leaves_torchs_own_file(watched_rank: Rank) -> None:
    for request, stacks in ((1, False), (2, True)):
        assert request_trace(watched_rank.recording, steps=1, stacks=stacks) == request
        os.utime(Path(watched_rank.recording) / directory.MICROSCOPE_FILE, ns=(request, request))
        watched_rank.run_step(2 * request)
        watched_rank.run_step(2 * request + 1, lambda: watched_rank.memory.add_action("alloc", 512, 20))
    plain, stacked = watched_rank.read_looks()
    assert plain.snapshot is None
    assert stacked.snapshot is not None
    assert (Path(watched_rank.recording) / stacked.snapshot).stat().st_size
    assert plain.curve_bytes.tolist() == stacked.curve_bytes.tolist() == [1020]


def test_only_the_last_look_of_a_rank_is_computed_and_only_once(watched_rank: Rank) -> None:
    for request in (1, 2):
        request_trace(watched_rank.recording, steps=1, stacks=False)
        os.utime(Path(watched_rank.recording) / directory.MICROSCOPE_FILE, ns=(request, request))
        watched_rank.run_step(2 * request)
        watched_rank.run_step(2 * request + 1, lambda: watched_rank.memory.add_action("alloc", 512, 20))
    recording = Recording.open(Path(watched_rank.recording))
    first = watched_rank.read_looks()[0]
    trace = read_last_trace(recording.at(recording.last_written_ns), 0)
    assert trace is not None
    assert (trace.request, trace.phases.tolist()) == (2, [PHASES.index("backward")])
    assert read_last_trace(recording.at(recording.last_written_ns), 0) is trace
    earlier = read_last_trace(recording.at(first.known_ns), 0)
    assert earlier is not None
    assert earlier.request == 1
    assert read_last_trace(recording.at(first.known_ns - 1), 0) is None
    assert read_last_trace(recording.at(recording.last_written_ns), 1) is None


def test_a_job_that_records_its_history_itself_is_left_alone(watched_rank: Rank) -> None:
    watched_rank.memory.add_action("alloc", 512, 20)
    request_trace(watched_rank.recording, steps=1, stacks=False)
    watched_rank.run_step(0)
    watched_rank.run_step(1)
    (look,) = watched_rank.read_looks()
    assert look.refused == "The job records PyTorch's memory history itself."
    assert watched_rank.memory.recording is None
    assert len(watched_rank.memory.history) == 1


NONE = ["", "{", "[]", '{"request": 1e999}', '{"request": "x", "steps": 1}', '{"steps": 1}', "null"]


@pytest.mark.parametrize("text", NONE)
def test_a_file_that_is_no_request(watched_rank: Rank, text: str) -> None:
    (Path(watched_rank.recording) / directory.MICROSCOPE_FILE).write_text(text)
    watched_rank.run_step(0)
    watched_rank.run_step(1)
    assert watched_rank.read_looks() == ()
    assert request_trace(watched_rank.recording, steps=1, stacks=False, after=2) == 3
    watched_rank.run_step(2)
    watched_rank.run_step(3)
    assert [look.request for look in watched_rank.read_looks()] == [3]


def test_requests_to_an_earlier_attempt_are_not_repeated(watched_rank: Rank) -> None:
    request_trace(watched_rank.recording, steps=1, stacks=True)
    restarted = Rank(watched_rank.recording)
    for step in range(3):
        restarted.run_step(step, lambda: pytest.fail("recorded") if restarted.memory.recording else None)
    os.utime(Path(watched_rank.recording) / directory.MICROSCOPE_FILE, ns=(1, 1))
    request_trace(watched_rank.recording, steps=1, stacks=False)
    restarted.run_step(3)
    restarted.run_step(4)
    assert [look.request for look in restarted.read_looks()] == [2]


def test_a_request_is_bounded(watched_rank: Rank) -> None:
    path = Path(watched_rank.recording) / directory.MICROSCOPE_FILE
    path.write_text(json.dumps({"request": 1, "steps": 10**9}))
    for step in range(102):
        watched_rank.run_step(step)
    (look,) = watched_rank.read_looks()
    assert look.steps == 100


def test_a_real_curve_is_what_the_allocator_counted() -> None:
    recording = open_recording("gpu-microscope")
    (look,) = read_traces(recording.at(recording.last_written_ns))
    (process,) = read_rank_peaks(recording.at(look.known_ns))
    backward = next(peak for peak in process.phases if peak.phase == "backward")
    # The history counts what was asked for, the allocator in blocks of 512 bytes and more; step 1 was as large as step 23.
    assert 0.995 * backward.allocated_bytes < look.peak_bytes < backward.allocated_bytes
    assert (look.first_step, look.peak_phase) == (23, "backward")
    assert look.before_bytes + sum(block.size_bytes for block in look.largest) <= look.peak_bytes


def test_a_packed_recording_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["microscope", str(find_packed_file("z2"))]) == 1
    assert "its job has ended" in capsys.readouterr().err
