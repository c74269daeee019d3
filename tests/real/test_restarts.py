"""Jobs that fail and are started again: all attempts are told, and the first line agrees with the exit code."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from loop_runs import LOOPS
from real_jobs import BIN, run_recorded
from zerotop.analysis.failures.diagnosis import find_failure
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SCRIPT = str(LOOPS / "restarting.py")
EARLY_LINE = next(n for n, line in enumerate(Path(SCRIPT).read_text().splitlines(), 1) if "raise RuntimeError" in line)
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", SCRIPT]
FINISHED = "Failed at step 7 ({cause}), restarted {times}, finished"


def run_attempts(
    command: list[str], tmp_path: Path, environment: dict[str, str]
) -> tuple[int, str, Recording, list[Finding]]:
    run = run_recorded(command, tmp_path, environment)
    recording = Recording.open(run.recording)
    assert run.output.count("To see") <= 1
    return run.returncode, run.output, recording, [*detect_findings(recording, recording.end_ns)]


def select_ends(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.name in ("restarted", "dead_rank")]


@pytest.mark.parametrize(
    ("how", "cause", "times"),
    [(("raise", "early", "good"), "ValueError", "twice"), (("kill", "good"), "SIGKILL", "once")],
)
def test_a_job_that_finishes_at_last(
    how: tuple[str, ...], cause: str, times: str, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    code, output, recording, findings = run_attempts([*TORCHRUN, str(tmp_path), *how], tmp_path, job_environment)
    assert code == 0
    (finding,) = select_ends(findings)
    assert finding.headline == FINISHED.format(cause=cause, times=times)
    assert finding.severity is Severity.WARNING
    assert f"zerotop: {finding.headline}. " in output
    assert [one for one in findings if one.severity is Severity.ERROR] == []
    assert len({one.name for one in findings}) == len(findings)  # no finding twice
    assert find_failure(recording.at(recording.end_ns)) is None


def test_a_job_that_never_trains_has_its_finding_in_the_last_line(tmp_path: Path, job_environment: dict[str, str]) -> None:
    command = [*TORCHRUN, str(tmp_path), "early", "early", "early"]
    code, output, _, findings = run_attempts(command, tmp_path, job_environment)
    assert code == 1
    assert not list(tmp_path.glob("**/events-rank*"))
    (finding,) = select_ends(findings)
    assert f"zerotop: {finding.headline}. To see it: zerotop findings " in output


def test_the_last_failure_comes_first(tmp_path: Path, job_environment: dict[str, str]) -> None:
    command = [*TORCHRUN, str(tmp_path), "raise", "early", "early"]
    code, output, recording, findings = run_attempts(command, tmp_path, job_environment)
    assert code == 1
    (finding,) = select_ends(findings)
    assert finding.headline.endswith(f"ended with RuntimeError at restarting.py:{EARLY_LINE} in attempt 3")
    assert "Attempt 1 failed on rank 0 at step 7: ValueError: planned" in finding.details
    assert "RuntimeError: no checkpoint in attempt 1" in finding.details
    assert f"zerotop: {finding.headline}. " in output
    failure = find_failure(recording.at(recording.end_ns))
    assert failure is not None
    assert failure.what.endswith("failed in attempt 3 before its first step.")
    assert failure.why.startswith("RuntimeError: no checkpoint in attempt 2")


def test_a_script_that_starts_training_again(tmp_path: Path, job_environment: dict[str, str]) -> None:
    train = shlex.join([sys.executable, SCRIPT, str(tmp_path), "raise", "good"])
    command = ["sh", "-c", f"for i in 1 2 3; do {train} && break; done"]
    code, _, _, findings = run_attempts(command, tmp_path, job_environment)
    assert code == 0
    assert [one.headline for one in select_ends(findings)] == [FINISHED.format(cause="ValueError", times="once")]


def test_two_programs_in_turn_are_no_attempts(tmp_path: Path, job_environment: dict[str, str]) -> None:
    train = shlex.join([sys.executable, SCRIPT, str(tmp_path), "good", "good"])
    code, _, _, findings = run_attempts(["sh", "-c", f"{train}; {train}"], tmp_path, job_environment)
    assert (code, select_ends(findings)) == (0, [])
