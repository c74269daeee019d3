"""A real job whose recording is folded while it runs, with limits that a long job has after days."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from real_jobs import RANKS, build_launch_command
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.recording import directory

LOOP = Path(__file__).with_name("loops") / "long.py"
SECONDS, MAX_BYTES = 8, 600_000
pytestmark = pytest.mark.real


def test_no_step_is_missing_and_the_size_is_bounded(tmp_path: Path, job_environment: dict[str, str]) -> None:
    command = build_launch_command("bare", [str(LOOP), str(SECONDS)])
    recording = directory.create_recording(command, path=str(tmp_path / "recording"), max_bytes=MAX_BYTES, full_detail_s=3)
    agent = [sys.executable, "-m", "zerotop_probe.outside", "--foreground", recording, "--", *command]
    with open(tmp_path / "output", "wb") as output, subprocess.Popen(agent, stdout=output, env=job_environment) as process:
        watched, sizes = Recording.open(Path(recording)), []
        while process.poll() is None:
            watched.refresh()
            sizes.append(sum(file.stat().st_size for file in Path(recording).glob("*.rec") if file.exists()))
            time.sleep(0.5)
    assert process.returncode == 0
    counted = [int(count) for count in re.findall(r"COUNTED (\d+)", (tmp_path / "output").read_text())]
    assert len(counted) == RANKS
    for planted in (Recording.open(Path(recording)), watched):
        planted.refresh()
        for rows, count in zip(read_rank_steps(planted), counted, strict=True):
            assert rows["steps"].sum() == count
            assert (rows["step"][1:] - rows["steps"][1:]).tolist() == rows["step"][:-1].tolist()
    assert not [event for event in watched.events if event.event_name == "sampler_error"]
    assert all(len(source.array) for source in Recording.open(Path(recording)).sources["folded"])
    # Folding runs at the lowest priority: where others use the cores it comes late.
    assert max(sizes) < 2 * MAX_BYTES
