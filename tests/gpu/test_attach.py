"""Attaching to a job that trains on a GPU, and entering it half-way: its ledger from there, its results untouched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from agents import wait_for
from loop_runs import LOOPS
from programs import ZEROTOP, run_zerotop
from programs import make_environment as own_environment
from rank_recordings import Rank
from real_jobs import TIMEOUT_S, build_launch_command, make_environment
from zerotop_probe.outside.attaching import jobs

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
OPTIONS = ("--torch-adam", "--stage", "2", "--dtype", "bf16", "--width", "4096", "--steps", "6000")

# A rank that has taken memory trains by then, and is far from its end.
TRAINS_S = 9.0


def start_loop(folder: Path) -> subprocess.Popen[bytes]:
    """The loop, started by somebody who has never heard of us."""
    folder.mkdir()
    variables = make_environment() | {"DS_ACCELERATOR": "cuda"}
    del variables["CUDA_VISIBLE_DEVICES"]
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            build_launch_command("deepspeed", [str(LOOPS / "hand_written.py"), *OPTIONS], ranks=1),
            cwd=folder,
            env=variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def read_counted(folder: Path) -> dict[str, Any]:
    """Return the script's own counts, among them its view of the device's memory."""
    lines = (folder / "output").read_text(errors="replace").splitlines()
    (counted,) = [json.loads(line[8:]) for line in lines if line.startswith("COUNTED ")]
    return {name: counted[name] for name in ("global_steps", "memory", "weights", "losses")}


def used_bytes() -> int:
    """Return the bytes in use on the GPU, by all processes."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def rank_of(folder: Path) -> int | None:
    """The pid of the rank, once there is one."""
    found_jobs = [job for job in jobs.find_jobs() if job.working_directory == str(folder)]
    return found_jobs[0].ranks[0].process.pid if found_jobs and found_jobs[0].ranks else None


def test_entered_half_way_a_jobs_ledger_adds_up_and_its_results_are_its_own(tmp_path: Path) -> None:
    before = used_bytes()
    job = start_loop(tmp_path / "attached")
    try:
        pid = wait_for(lambda: rank_of(tmp_path / "attached"), 120.0)
        wait_for(lambda: used_bytes() > before + 500 * 1024**2, 120.0)
        time.sleep(TRAINS_S)
        state = tmp_path / "state"
        recorder = subprocess.Popen(
            [*ZEROTOP, "attach", str(pid), "--enter", "--headless"], env=own_environment(state), start_new_session=True
        )
        assert job.wait(TIMEOUT_S) == 0, (tmp_path / "attached" / "output").read_text()
        assert recorder.wait(60) == 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    (recording,) = (state / "zerotop" / "sessions").glob("*/session.json")
    first = int(Rank(recording.parent, 0).select_phases("step")["step"][0])
    assert 0 < first < 5000
    done = run_zerotop(state, "memory", str(recording.parent), "--json")
    assert done.returncode == 0, done.stderr.decode()
    (gpu,) = [gpu for gpu in json.loads(done.stdout)["gpus"] if gpu["ranks"]]  # the machine may have others
    rows = {row["key"]: row["bytes"] for row in gpu["rows"]}
    assert sum(rows.values()) == gpu["total_bytes"]
    assert abs(rows["unexplained"]) < 0.02 * gpu["allocated_bytes"]
    expected = {row["key"]: row["expected_bytes"] for row in gpu["differences"]}
    for key in ("parameters", "master_weights", "optimizer_state"):
        assert rows[key] == pytest.approx(expected[key], rel=0.03), key  # the allocator rounds up
    alone = start_loop(tmp_path / "alone")
    assert alone.wait(TIMEOUT_S) == 0
    assert read_counted(tmp_path / "attached") == read_counted(tmp_path / "alone")
