"""A real loop with anomaly mode left on, and a thread that computes in Python."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

import pytest

from loop_runs import LOOPS
from rank_recordings import Rank
from real_jobs import run_recorded
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.alone, pytest.mark.timeout(600)]

ANOMALY = 120


class DebuggedRun(NamedTuple):
    """A finished run: its rank's records, its findings, and the line that switches anomaly mode."""

    rank: Rank
    findings: tuple[Finding, ...]
    line: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> DebuggedRun:
    done = run_recorded([sys.executable, str(LOOPS / "debugged.py")], tmp_path_factory.mktemp("debugged"), job_environment)
    assert done.returncode == 0, done.output
    counted = next(line for line in done.output.splitlines() if line.startswith("COUNTED "))
    recording = Recording.open(done.recording)
    line = json.loads(counted[8:])["lines"]["anomaly"]
    return DebuggedRun(Rank(done.recording, 0), detect_findings(recording, recording.end_ns), line)


def test_nothing_went_wrong_inside(run: DebuggedRun) -> None:
    assert not run.rank.find_events("probe_error")


def test_anomaly_mode_is_reported_with_its_line(run: DebuggedRun) -> None:
    assert [(event["on"], event["line"]) for event in run.rank.find_events("debug_mode")][:1] == [(True, run.line)]
    (finding,) = [one for one in run.findings if one.name == "anomaly_mode"]
    assert finding.step == ANOMALY
    assert f"switched on at debugged.py:{run.line} in main." in finding.details
    # The forward keeps stacks. The backward is so short that other load on the machine may outweigh its search for NaN.
    evidence, steps = finding.evidence, range(ANOMALY, ANOMALY + 10)  # those before it is told
    assert "forward_after_s" in evidence or not set(steps) & set(run.rank.select_phases("forward")["step"].tolist())
    assert evidence.get("forward_after_s", 1.0) > 2 * evidence.get("forward_before_s", 0.0)
    assert evidence["after_s"] > 1.5 * evidence["before_s"]


def test_the_thread_that_computes_is_recorded(run: DebuggedRun) -> None:
    (event,) = run.rank.find_events("busy_thread")
    assert event["thread"] == "word count"
    assert event["cores"] > 0.1
    assert event["lock_wait_s"] > 0
    assert event["begin_ns"] < event["busy_ns"] < event["end_ns"]
    assert {frame["function"] for frame in event["frames"] if frame["own"]} == {"count_words"}
