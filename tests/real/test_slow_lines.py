"""A real loop that is slow in known lines: what its rank samples, and the findings that name the lines."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from loop_runs import LOOPS
from rank_recordings import Rank
from real_jobs import run_recorded
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.support.lines.stack_lines import UNSEEN
from zerotop.recording.reader import Recording

# The lines of short steps are found in few samples: others on the cores would leave them unknown.
pytestmark = pytest.mark.alone

_LAST = range(720, 750)


class SlowRun(NamedTuple):
    """A finished run: its rank's records, its findings, and its slow lines by their names."""

    rank: Rank
    findings: tuple[Finding, ...]
    lines: dict[str, int]


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory, job_environment: dict[str, str]) -> SlowRun:
    folder: Path = tmp_path_factory.mktemp("slow")
    command = [sys.executable, str(LOOPS / "slow_lines.py"), str(_LAST.stop)]
    # On a slow machine 0.3 % of the time is too little for the samples of steps of 12 ms.
    run = run_recorded(command, folder, job_environment, ("--budget", "2"))
    assert run.returncode == 0, run.output
    counted = next(line for line in run.output.splitlines() if line.startswith("COUNTED "))
    recording = Recording.open(run.recording)
    return SlowRun(Rank(run.recording, 0), detect_findings(recording, recording.end_ns), json.loads(counted[8:])["lines"])


def find_top(rank: Rank, where: str, why: str, steps: range) -> tuple[str, int, str, float]:
    """File, line and called function where samples of a place at these steps stand for the most time, and the seconds.

    In a counted step the place is unknown.
    """
    seconds: Counter[tuple[str, int, str]] = Counter()
    for event in rank.find_events("stacks"):
        is_asked = event["where"] in (where, UNSEEN) and event["why"] == why
        if is_asked and event["step"] < steps.stop and event["last_step"] >= steps.start:
            for stack in event["stacks"]:
                frames = [event["frames"][number] for number in stack["frames"]]
                for own in [frame for frame in frames if frame["own"]][:1]:  # none when Python ends
                    seconds[own["file"], own["line"], stack.get("call", "")] += stack["seconds"]
    ((top, most),) = seconds.most_common(1)
    return *top, most


@pytest.mark.parametrize(
    ("line", "where", "why", "steps", "call"),
    [
        ("pause", "between phases", "slow", range(100, 101), "time.sleep"),
        ("collect", "between phases", "slow", range(150, 220), "gc.collect"),
        ("always", "between phases", "share", range(_LAST.start), "time.sleep"),
        ("forward", "forward", "slow", range(120, 121), None),
        ("slower", "between phases", "slow", _LAST, "time.sleep"),
    ],
)
def test_the_slow_line_is_sampled(
    slow_run: SlowRun, line: str, where: str, why: str, steps: range, call: str | None
) -> None:
    file, number, called, _ = find_top(slow_run.rank, where, why, steps)
    assert (file, number) == ("slow_lines.py", slow_run.lines[line])
    assert call is None or called == call


def test_the_probes_own_frames_are_left_out(slow_run: SlowRun) -> None:
    files = {frame["file"] for event in slow_run.rank.find_events("stacks") for frame in event["frames"]}
    assert not [file for file in files if "zerotop" in file or file.startswith("/")]
    assert "slow_lines.py" in files


def test_the_samples_stand_for_the_time_that_was_lost(slow_run: SlowRun) -> None:
    assert find_top(slow_run.rank, "between phases", "slow", range(100, 101))[-1] > 0.1


def test_a_shift_names_the_line(slow_run: SlowRun) -> None:
    # Whichever is known first names it; the other would say the same.
    shifts = [finding for finding in slow_run.findings if finding.name in ("iteration_shift", "time_lost_in_line")]
    # Where others use the cores, the steps just before it may be longer, too.
    place = f"slow_lines.py:{slow_run.lines['slower']} in build_batch (calls time.sleep)"
    (shift,) = [finding for finding in shifts if place in finding.details]
    assert shift.step in range(_LAST.start - 5, _LAST.start + 3)
    assert "Remove the pause" in shift.advice


def test_a_constant_share_names_the_line(slow_run: SlowRun) -> None:
    (finding,) = [finding for finding in slow_run.findings if finding.name == "time_between_phases"]
    assert f"slow_lines.py:{slow_run.lines['always']} in build_batch (calls time.sleep)" in finding.details


def test_the_collectors_time_is_recorded(slow_run: SlowRun) -> None:
    """A million objects take it tens of milliseconds each time."""
    collected = slow_run.rank.find_events("garbage")
    assert sum(event["collections"] for event in collected) >= 7
    assert sum(event["seconds"] for event in collected) > 0.05
