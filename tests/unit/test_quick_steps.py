"""Steps whose spans a rank records at their end: the recording has the same begins and spans as of any other step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rank_recordings import Rank
from zerotop_probe.inside.engines import LoopState
from zerotop_probe.inside.guard import CostMeter
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording import directory
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.recording.rings.ring_drainer import RingDrainer
from zerotop_probe.recording.rings.ring_files import RingFiles
from zerotop_probe.recording.rings.shared_memory import Ring
from zerotop_probe.recording.tables import BOUNDARY, FAILED, PHASE_CODE, PHASES
from zerotop_probe.recording.writer import Identity

ME = Identity.for_this_process("rank", 0)
DATA, FORWARD, BACKWARD, STEP = (PHASE_CODE[name] for name in ("data", "forward", "backward", "step"))

# Begins a step in which it is killed.
KILLED = """
import os, signal, sys
from zerotop_probe.inside.engines import LoopState
from zerotop_probe.inside.guard import CostMeter, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.recording.writer import Identity
shared_memory.MEMORY_ROOT, recording = sys.argv[1:]
recorder = Recorder(recording, Identity.for_this_process("rank", 0), CostMeter())
recorder.is_quick = True
state = LoopState(0)
state.finished_steps = 7
recorder.end_span(recorder.begin_quick(now(), 2, state), now())
recorder.begin_quick(now(), 3, state)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shared_recording(tmp_path: Path, memory_root: str) -> Path:
    """A recording whose ranks share memory with a sampler, which this test is."""
    path = Path(directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording")))
    assert shared_memory.offer_folder(str(path)) is not None
    return path


class Job:
    """A rank in quick steps, and the sampler that drains its ring."""

    def __init__(self, recording: Path) -> None:
        self.recorder = Recorder(str(recording), ME, CostMeter())
        self.recorder.is_quick = True
        assert isinstance(self.recorder.files, RingFiles)
        self.drainer = RingDrainer(self.recorder.files.ring, str(recording))
        self.state = LoopState(0)
        self.time_ns = 1_000_000_000
        self._recording = recording

    def advance_clock(self) -> int:
        self.time_ns += 1000
        return self.time_ns

    def run_phase(self, phase: int, flags: int = 0) -> None:
        self.recorder.end_span(
            self.recorder.begin_quick(self.advance_clock(), phase, self.state), self.advance_clock(), flags
        )

    def run_step(self) -> None:
        for phase in (DATA, FORWARD, BACKWARD):
            self.run_phase(phase)
        self.state.backward_count += 1
        self.run_phase(STEP, BOUNDARY)
        self.state.finished_steps, self.state.backward_count = self.state.finished_steps + 1, 0

    def drain_ring(self) -> Rank:
        self.drainer.drain(self.time_ns)
        return Rank(self._recording, 0)


@pytest.fixture
def running_job(shared_recording: Path) -> Iterator[Job]:
    started = Job(shared_recording)
    yield started
    started.drainer.close()
    started.recorder.close()


def list_phases(rows: Any) -> list[tuple[str, int, int]]:
    return [(PHASES[row["phase"]], int(row["step"]), int(row["micro_step"])) for row in rows]


def test_every_span_has_its_begin(running_job: Job) -> None:
    for _ in range(3):
        running_job.run_step()
    rank = running_job.drain_ring()
    expected = [(name, step, 0) for step in range(3) for name in ("data", "forward", "backward", "step")]
    assert list_phases(rank.spans) == list_phases(rank.begins) == expected
    assert rank.spans["begin_ns"].tolist() == rank.begins["time_ns"].tolist()
    assert (rank.spans["end_ns"] - rank.spans["begin_ns"]).tolist() == [1000] * 12
    assert running_job.recorder._meter.boundaries == 24


def test_a_phase_in_progress_is_in_the_recording_and_its_begin_comes_once(running_job: Job) -> None:
    running_job.run_step()
    running_job.drain_ring()
    running_job.run_phase(DATA)
    forward = running_job.recorder.begin_quick(running_job.advance_clock(), FORWARD, running_job.state)
    rank = running_job.drain_ring()
    assert list_phases(rank.begins)[-2:] == [("data", 1, 0), ("forward", 1, 0)]
    assert len(rank.spans) == 4  # those of the step in progress follow at its end
    running_job.recorder.end_span(forward, running_job.advance_clock())
    running_job.drain_ring()
    running_job.run_phase(STEP, BOUNDARY)
    rank = running_job.drain_ring()
    assert (
        list_phases(rank.spans)[4:] == list_phases(rank.begins)[4:] == [(name, 1, 0) for name in ("data", "forward", "step")]
    )


def test_a_sampler_that_is_replaced_doubles_no_begin(running_job: Job, shared_recording: Path) -> None:
    running_job.run_step()
    running_job.recorder.begin_quick(running_job.advance_clock(), DATA, running_job.state)
    before = running_job.drain_ring().begins["time_ns"].tolist()
    running_job.drainer.close()
    assert isinstance(running_job.recorder.files, RingFiles)
    running_job.drainer = RingDrainer(running_job.recorder.files.ring, str(shared_recording))
    assert running_job.drain_ring().begins["time_ns"].tolist() == before


def test_phases_around_others_are_recorded_at_once_and_in_order(running_job: Job) -> None:
    recorder = running_job.recorder
    running_job.run_phase(DATA)
    step = recorder.begin_quick(running_job.advance_clock(), STEP, running_job.state)
    inner = recorder.begin_span(running_job.advance_clock(), "cpu_optimizer", (0, 0, 0))
    rank = running_job.drain_ring()
    assert [name for name, *_ in list_phases(rank.begins)] == ["data", "step", "cpu_optimizer"]
    assert [name for name, *_ in list_phases(rank.spans)] == ["data"]
    recorder.end_span(inner, running_job.advance_clock())
    recorder.end_span(step, running_job.advance_clock(), BOUNDARY)
    rank = running_job.drain_ring()
    assert [name for name, *_ in list_phases(rank.spans)] == ["data", "step", "cpu_optimizer"]  # by their begins
    assert len(rank.begins) == 3


def test_more_phases_than_the_header_has_places_for(running_job: Job) -> None:
    for _ in range(20):  # micro-steps
        running_job.run_phase(FORWARD)
        running_job.run_phase(BACKWARD)
        running_job.state.backward_count += 1
    running_job.run_phase(STEP, BOUNDARY)
    rank = running_job.drain_ring()
    assert list_phases(rank.spans) == list_phases(rank.begins)
    assert list_phases(rank.spans)[-3:] == [("forward", 0, 19), ("backward", 0, 19), ("step", 0, 19)]


def test_a_phase_that_an_exception_left_open(running_job: Job) -> None:
    running_job.recorder.begin_quick(running_job.advance_clock(), STEP, running_job.state, loose=True)
    running_job.recorder.end_loose_spans(running_job.advance_clock())
    running_job.recorder.write_spans()
    (span,) = running_job.drain_ring().spans
    assert (PHASES[span["phase"]], span["flags"]) == ("step", FAILED)


def test_a_killed_rank_leaves_the_begin_of_the_phase_that_it_was_in(shared_recording: Path, memory_root: str) -> None:
    command = [sys.executable, "-c", KILLED, memory_root, str(shared_recording)]
    assert subprocess.run(command, check=False).returncode == -9
    memory = shared_memory.find_folder(str(shared_recording))
    assert memory is not None
    (path,) = shared_memory.list_rings(memory)
    ring = Ring.open(path)
    drainer = RingDrainer(ring, str(shared_recording))
    drainer.drain(0, is_final=True)
    drainer.close()
    ring.close()
    assert list_phases(Rank(shared_recording, 0).begins) == [("data", 7, 0), ("forward", 7, 0)]
