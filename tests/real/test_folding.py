"""A real job whose recording is folded while it runs, with limits that a long job has after days."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from real_jobs import RANKS, build_launch_command
from zerotop.session.reader import Session
from zerotop.session.steps.step_table import read_rank_steps
from zerotop_probe.recording import directory

LOOP = Path(__file__).with_name("loops") / "long.py"
SECONDS, MAX_BYTES = 8, 600_000
pytestmark = pytest.mark.real


def test_no_step_is_missing_and_the_size_is_bounded(tmp_path: Path, job_environment: dict[str, str]) -> None:
    command = build_launch_command("bare", [str(LOOP), str(SECONDS)])
    session = directory.create_session(command, path=str(tmp_path / "session"), max_bytes=MAX_BYTES, full_detail_s=3)
    agent = [sys.executable, "-m", "zerotop_probe.outside", "--foreground", session, "--", *command]
    with open(tmp_path / "output", "wb") as output, subprocess.Popen(agent, stdout=output, env=job_environment) as process:
        watched, sizes = Session.open(Path(session)), []
        while process.poll() is None:
            watched.refresh()
            sizes.append(sum(file.stat().st_size for file in Path(session).glob("*.rec") if file.exists()))
            time.sleep(0.5)
    assert process.returncode == 0
    counted = [int(count) for count in re.findall(r"COUNTED (\d+)", (tmp_path / "output").read_text())]
    assert len(counted) == RANKS
    for recording in (Session.open(Path(session)), watched):
        recording.refresh()
        for rows, count in zip(read_rank_steps(recording), counted, strict=True):
            assert rows["steps"].sum() == count
            assert (rows["step"][1:] - rows["steps"][1:]).tolist() == rows["step"][:-1].tolist()
    assert not [event for event in watched.events if event.event_name == "sampler_error"]
    assert all(len(source.array) for source in Session.open(Path(session)).sources["folded"])
    # Folding runs at the lowest priority: where others use the cores it comes late.
    assert max(sizes) < 2 * MAX_BYTES
