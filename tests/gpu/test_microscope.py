"""The microscope on a real GPU: its peak is the allocator's own, and it can be used again."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agents import wait_for
from loop_runs import run_loop
from rank_recordings import Rank, read_table_file
from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import TICK

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def run_microscope(recording: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "zerotop", "microscope", str(recording), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_looks_at_a_running_job(tmp_path: Path) -> None:
    recording = Path(directory.create_recording(["python", "measuring.py"], path=str(tmp_path / "recording")))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            run_loop, "measuring", tmp_path, "--steps", "300", ranks=1, recording=recording, accelerator="cuda"
        )
        wait_for(lambda: list(recording.glob("probe-*.rec")) and len(Rank(recording, 0).select_phases("step")) > 5, 120)
        looks = [run_microscope(recording), run_microscope(recording, "--steps", "2", "--stacks")]
        job.result()
    (path,) = recording.glob("allocator-*.rec")
    rows = read_table_file(path)
    rows = rows[rows["edge"] != TICK]
    for (look,), steps in zip(looks, (1, 2), strict=True):
        assert not look["refused"]
        inside = (rows["step"] >= look["first_step"]) & (rows["step"] < look["first_step"] + steps)
        assert look["peak_bytes"] == rows["requested_peak_bytes"][inside].max()
        assert look["peak_phase"] in ("forward", "backward", "step")
        assert look["largest"]
    assert looks[0][0]["snapshot"] is None
    assert (recording / looks[1][0]["snapshot"]).stat().st_size > 10_000
    rank = Rank(recording, 0)
    assert not rank.find_events("probe_error")
    assert len(rank.select_phases("step")) == 300
