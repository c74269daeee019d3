"""Ranks that end before their time, under real launchers: which was the first, how it ended, and who printed that."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from loop_runs import LOOPS
from real_jobs import build_launch_command, run_recorded
from zerotop.analysis.failures.diagnosis import find_failure
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.output.lines import BEGIN, OutputBuffer
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import PHASE_CODE

RAISING_LINE = next(
    number for number, line in enumerate((LOOPS / "ending.py").read_text().splitlines(), 1) if "raise ValueError" in line
)


def _run_to_death(launcher: str, how: str, folder: Path, environment: dict[str, str]) -> tuple[Recording, Finding]:
    run = run_recorded(build_launch_command(launcher, [str(LOOPS / "ending.py"), how]), folder, environment)
    assert run.returncode != 0
    recording = Recording.open(run.recording)
    dead = [finding for finding in detect_findings(recording, recording.last_written_ns) if finding.name == "dead_rank"]
    assert len(dead) == 1, run.output
    return recording, dead[0]


@pytest.mark.parametrize(("launcher", "words"), [("torchrun", "torchrun"), ("deepspeed", "DeepSpeed's launcher")])
def test_a_killed_rank_has_the_signal_that_its_launcher_printed(
    launcher: str, words: str, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    recording, dead = _run_to_death(launcher, "signal", tmp_path, job_environment)
    assert dead.headline == "Rank 1 was killed by signal 9 (SIGKILL) after 5 steps"
    assert f"as {words} printed. Rank 0 failed because of that." in dead.details
    failure = find_failure(recording.at(recording.last_written_ns))
    assert failure is not None
    assert (failure.rank, "was killed by SIGKILL" in failure.what) == (1, True)


def test_tensors_of_different_sizes_that_gloo_aborts_for(tmp_path: Path, job_environment: dict[str, str]) -> None:
    _, dead = _run_to_death("torchrun", "sizes", tmp_path, job_environment)
    assert re.match(r"Rank [01] got \d+ bytes in a collective where it expected \d+$", dead.headline)
    assert dead.evidence["signal_number"] == 6
    assert "both shapes" in dead.advice


def test_an_exception_has_its_line_and_the_rank_that_lost_its_peer_comes_second(
    tmp_path: Path, job_environment: dict[str, str]
) -> None:
    recording, dead = _run_to_death("torchrun", "exception", tmp_path, job_environment)
    place = f"ending.py:{RAISING_LINE} in save_or_die"
    assert dead.headline == f"Rank 1 ended with ValueError at {place}"
    assert dead.details.startswith("ValueError: no such shape.")
    assert "Rank 0 failed because of that." in dead.details
    failure = find_failure(recording.at(recording.last_written_ns))
    assert failure is not None
    assert (failure.rank, failure.why) == (1, f"ValueError: no such shape, at {place}.")


@pytest.mark.parametrize(
    ("launcher", "options", "name"),
    [
        ("torchrun", ["--redirects", "3", "--log-dir"], "1/stderr.log"),
        ("torchrun", ["--tee", "3", "--log-dir"], "1/stderr.log"),
        ("deepspeed", ["--enable_each_rank_log"], "_rank1.log"),
    ],
    ids=["redirects", "tee", "deepspeed"],
)
def test_the_file_with_the_last_words_of_a_rank_is_named_and_read(
    launcher: str, options: list[str], name: str, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    command = build_launch_command(launcher, [str(LOOPS / "ending.py"), "exception"])
    command[1:1] = [*options, str(tmp_path / "logs")]
    run = run_recorded(command, tmp_path, job_environment)
    recording = Recording.open(run.recording)
    (dead,) = [one for one in detect_findings(recording, recording.last_written_ns) if one.name == "dead_rank"]
    assert dead.headline == f"Rank 1 ended with ValueError at ending.py:{RAISING_LINE} in save_or_die"
    files = [path for path in map(str, (tmp_path / "logs").rglob("*.log")) if path.endswith(name)]
    assert f"Its last output is in {files[0]}." in dead.details
    assert f"Its last output is in {files[0]}." in run.output
    buffer = OutputBuffer(recording)
    buffer.refresh_at(recording.last_written_ns)
    lines = [line.text for line in buffer.read_lines(BEGIN, 1000)]
    assert any(files[0] in line for line in lines)
    assert sum("ValueError: no such shape" in line for line in lines) == 1


@pytest.mark.parametrize(("how", "deaths"), [("multiprocessing", 0), ("by_hand", 0), ("failing", 1)])
def test_a_forked_training_that_ends_well_is_no_dead_rank(
    how: str, deaths: int, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    """As a notebook forks one. ``os._exit(0)`` is a good end, other codes are not."""
    run = run_recorded([sys.executable, str(LOOPS / "forking.py"), how], tmp_path, job_environment)
    assert run.returncode == 0, run.output
    recording = Recording.open(run.recording)
    found = [finding.name for finding in detect_findings(recording, recording.last_written_ns)]
    assert found.count("dead_rank") == deaths
    (rank,) = [source for source in recording.sources["spans"] if source.rank == 0]
    assert np.count_nonzero(rank.array["phase"] == PHASE_CODE["step"]) == 12
