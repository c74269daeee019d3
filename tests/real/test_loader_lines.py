"""A real loop that waits for loader workers: py-spy says at which line they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loop_runs import LOOPS
from py_spy_access import can_read_others
from real_jobs import run_recorded
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_the_line_of_the_workers_is_named(tmp_path: Path, job_environment: dict[str, str]) -> None:
    if not can_read_others():
        pytest.skip("py-spy may not read other processes here")
    # Where the machine is busy, the usual budget would leave out the phases of most steps.
    command, options = [sys.executable, str(LOOPS / "locked_loader.py"), "50"], ("--budget", "5")
    run = run_recorded(command, tmp_path, job_environment, options)
    assert run.returncode == 0, run.output
    recording = Recording.open(run.recording)
    (finding,) = [one for one in detect_findings(recording, recording.end_ns) if one.name == "data_stall"]
    assert "py-spy shows locked_loader.py:" in finding.details
    assert "in Items.look_up" in finding.details
