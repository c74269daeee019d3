"""Attaching to a real two-rank DeepSpeed job that runs already, and entering it half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import wait_for
from loop_runs import LOOPS, run_loop
from programs import run_zerotop
from rank_recordings import Rank
from real_jobs import TIMEOUT_S, build_launch_command, make_environment
from zerotop_probe.outside.attaching import jobs
from zerotop_probe.outside.attaching.probe_entry import enter_processes, leave_processes
from zerotop_probe.recording.tables import BOUNDARY, COUNTED

pytestmark = [pytest.mark.real, pytest.mark.timeout(2 * TIMEOUT_S)]

OPTIONS = ("--torch-adam", "--stage", "3", "--accumulation", "2")
# More than are done until a test has seen enough, and ends the loop.
STEPS = 5000


@contextmanager
def start_loop(folder: Path, launcher: str) -> Iterator[subprocess.Popen[bytes]]:
    """The loop, started by somebody who has never heard of us; it ends soon after the file "enough" appears."""
    script = [str(LOOPS / "hand_written.py"), *OPTIONS, "--steps", str(STEPS), "--until", str(folder / "enough")]
    command = build_launch_command(launcher, script)
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=make_environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print((folder / "output").read_text(errors="replace"))  # pytest shows it if the test fails


def entered_job(folder: Path) -> tuple[jobs.FoundJob, Path]:
    """Waits until both ranks train, and has the probe in them."""
    recording = folder / "recording"
    recording.mkdir()

    def job_of_ours() -> jobs.FoundJob | None:
        found_jobs = [job for job in jobs.find_jobs() if job.working_directory == str(folder)]
        return found_jobs[0] if found_jobs and len(found_jobs[0].ranks) == 2 else None

    job: jobs.FoundJob = wait_for(job_of_ours, 120.0)
    waiting = [rank.process for rank in job.ranks]
    deadline = time.monotonic() + TIMEOUT_S
    while waiting:
        assert time.monotonic() < deadline
        waiting = [entry.process for entry in enter_processes(waiting, str(recording)) if entry.why_not]
        time.sleep(0.2)
    return job, recording


def wait_for_spans(recording: Path) -> None:
    """Waits until both ranks have recorded some twenty steps."""

    def read_sizes() -> list[int]:
        return [path.stat().st_size for path in recording.glob("spans-rank*.rec")]

    wait_for(lambda: len(read_sizes()) == 2 and min(read_sizes()) > 8000, 120.0)


def read_counted(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the script's own counts, by rank."""
    lines = (folder / "output").read_text(errors="replace").splitlines()
    counted = [json.loads(line[8:]) for line in lines if line.startswith("COUNTED ")]
    return {one["rank"]: one for one in counted}


def test_a_rank_entered_half_way_is_recorded_from_there_and_trains_as_if_alone(tmp_path: Path) -> None:
    attached, alone = tmp_path / "attached", tmp_path / "alone"
    attached.mkdir()
    alone.mkdir()
    with start_loop(attached, "deepspeed") as process:
        job, recording = entered_job(attached)
        assert job.launcher == "deepspeed"
        assert [rank.rank for rank in job.ranks] == [0, 1]
        ranks = [rank.process for rank in job.ranks]
        # One that waits for the other in a collective answers late on a busy machine.
        wait_for(lambda: [entry.reply for entry in enter_processes(ranks, str(recording))] == [str(recording)] * 2)
        wait_for_spans(recording)
        (attached / "enough").touch()
        assert process.wait(TIMEOUT_S) == 0
    own = read_counted(attached)
    for number in (0, 1):
        rank = Rank(recording, number)
        assert len(rank.find_events("entered")) == 1
        assert not rank.find_events("probe_error")
        steps = rank.select_phases("step")
        assert np.all(steps["flags"] & BOUNDARY)
        first = int(steps["step"][0])
        assert steps["step"].tolist() == list(range(first, own[number]["global_steps"]))
        assert own[number]["global_steps"] < STEPS
        # Short steps are counted once the probe knows their times.
        with_phases = steps["step"][steps["flags"] & COUNTED == 0]
        assert len(with_phases) >= 2
        for phase in ("forward", "backward"):
            # A counted step that takes long has phases from then on.
            recorded = rank.select_phases(phase)["step"]
            recorded = recorded[np.isin(recorded, with_phases)]
            assert recorded.tolist() == np.repeat(with_phases, 2).tolist()
    done = ("--steps", str(own[0]["global_steps"]))
    bare = run_loop("hand_written", alone, *OPTIONS, *done, launcher="bare", recording=Path(), bootstrap=False).by_rank
    for number in (0, 1):
        assert own[number]["losses"] == bare[number]["losses"]
        assert own[number]["weights"] == bare[number]["weights"]


def test_a_rank_that_is_left_trains_on_and_can_be_entered_again(tmp_path: Path) -> None:
    with start_loop(tmp_path, "bare") as process:
        job, recording = entered_job(tmp_path)
        ranks = [rank.process for rank in job.ranks]
        files = sorted(recording.glob("spans-rank*.rec"))
        wait_for_spans(recording)
        assert {entry.reply for entry in leave_processes(ranks, str(recording))} == {"leaving"}
        texts = sorted(recording.glob("events-rank*.jsonl"))
        wait_for(lambda: all('"left"' in path.read_text() for path in texts))
        sizes = [path.stat().st_size for path in files]
        assert {entry.reply for entry in leave_processes(ranks, str(recording))} == {"absent"}
        later = tmp_path / "later"
        later.mkdir()
        assert {entry.reply for entry in enter_processes(ranks, str(later))} == {"entered"}
        wait_for_spans(later)
        (tmp_path / "enough").touch()
        assert process.wait(TIMEOUT_S) == 0
        assert [path.stat().st_size for path in files] == sizes
    own = read_counted(tmp_path)
    steps = Rank(later, 0).select_phases("step")["step"]
    assert steps.tolist() == list(range(int(steps[0]), own[0]["global_steps"]))


def test_a_process_that_is_no_python_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            done = run_zerotop(tmp_path, "attach", str(process.pid), "--headless")
        finally:
            process.kill()
    assert done.returncode == 2
    assert b"is not a Python process of a job here" in done.stderr
