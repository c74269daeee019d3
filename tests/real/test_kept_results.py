"""A real loop that keeps what it should not: the variable is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loop_runs import LOOPS
from rank_recordings import Rank
from real_jobs import run_recorded
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_the_list_that_keeps_graphs_is_named(tmp_path: Path, job_environment: dict[str, str]) -> None:
    run = run_recorded([sys.executable, str(LOOPS / "keeping.py"), "120"], tmp_path, job_environment)
    assert run.returncode == 0, run.output
    (event,) = Rank(run.recording, 0).find_events("growing_containers")
    (container,) = event["containers"]  # not the seconds, which grow as often
    assert (container["name"], container["owner"], container["keeps_graph"]) == ("losses", "train", True)
    recording = Recording.open(run.recording)
    findings = detect_findings(recording, recording.end_ns)
    (finding,) = [one for one in findings if one.name == "host_growth"]
    assert " a step in 'losses' on rank 0" in finding.headline
    assert "the list losses in train() (keeping.py) grew from" in finding.details
    assert finding.fix == "losses[-1] = losses[-1].item()"
    assert not [one for one in findings if one.name == "probe_error"]
