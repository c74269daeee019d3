"""A real loop that empties the allocator's cache in each step: the line is known without sampling."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from loop_runs import LOOPS
from rank_recordings import Rank
from real_jobs import run_recorded
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording

FIRST = 40

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def is_near(finding: Finding) -> bool:
    """Whether it begins where the loop begins to empty the cache."""
    return finding.step is not None and abs(finding.step - FIRST) <= 8


def test_the_line_that_empties_the_cache_is_named(tmp_path: Path, job_environment: dict[str, str]) -> None:
    done = run_recorded([sys.executable, str(LOOPS / "emptying.py")], tmp_path, job_environment)
    assert done.returncode == 0, done.output
    counted = json.loads(next(line for line in done.output.splitlines() if line.startswith("COUNTED "))[8:])
    assert counted["compiled"] == 2.0
    rank = Rank(done.recording, 0)
    assert not rank.find_events("probe_error")
    known = [
        (event["calls"], event["seconds"]) for event in rank.find_events("cache_cleared") if event["line"] == counted["line"]
    ]
    assert [calls for calls, _ in known] == [1, 2, 4, 8, 16, 32, 64]
    assert all(seconds >= 0.02 * calls for calls, seconds in known)
    recording = Recording.open(done.recording)
    findings = detect_findings(recording, recording.end_ns)
    # The slower steps are told once. Where a machine is busy, others may get slower too.
    (finding,) = [one for one in findings if one.name == "cache_emptied" or (one.name == "iteration_shift" and is_near(one))]
    assert finding.headline == f"The allocator's cache is emptied in each step: emptying.py:{counted['line']}"
    assert finding.step is not None
    assert FIRST <= finding.step <= FIRST + 2
    # Two hundredths of a second, and more on a busy machine.
    assert re.search(rf"empty_cache\(\) at emptying\.py:{counted['line']} in tidy_up takes [2-9]\d ms", finding.details)
