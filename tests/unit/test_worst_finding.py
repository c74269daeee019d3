"""The line about the worst finding that ``zerotop run --headless`` ends with."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pytest

import recordings
from zerotop.commands import run
from zerotop.commands.job.job_report import describe_worst_finding
from zerotop_probe.outside.job import agent
from zerotop_probe.outside.job.job import JobResult


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cpu-hang", "No progress for 45 s: rank 1 was behind, between phases. To see it: zerotop findings "),
        ("z2-oom", "all 5 findings: zerotop findings "),
        ("held-straggler", "Rank 0 delays each iteration by 120 ms (54 %) from step 12 on. To see all 2 findings: "),
    ],
)
def test_the_worst_finding_is_named(name: str, said: str, tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder(name, tmp_path)
    (line,) = describe_worst_finding(str(folder))
    assert said in line
    assert line.endswith(str(folder))


def test_explanations_alone_and_jobs_without_ranks_have_no_line(tmp_path: Path) -> None:
    assert describe_worst_finding(str(recordings.unpack_to_folder("cpu-clean", tmp_path))) == []
    assert describe_worst_finding(str(tmp_path)) == []


@pytest.mark.parametrize("signal", [0, 15])
def test_run_writes_it_unless_a_signal_ended_the_job(signal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends a signal wants an end, not an analysis."""
    folder = str(recordings.unpack_to_folder("held-straggler", tmp_path))
    written: list[str] = []
    ended = JobResult(1 if signal else 0, signal, "It ended.", 0, 0, "")
    monkeypatch.setattr(run, "_make_recording", lambda options: nullcontext(folder))
    monkeypatch.setattr(agent, "run_in_foreground", lambda *arguments, **options: ended)
    monkeypatch.setattr(run, "write_messages", lambda *lines: written.extend(lines))
    monkeypatch.setattr(run, "die_of", lambda name: None)
    options = Namespace(
        headless=True,
        collector=None,
        nccl_inspector=None,
        report=None,
        no_phase_peaks=False,
        budget=None,
        price_per_hour=None,
        expect=None,
        command=["x"],
        job=None,
        no_record_output=False,
        notify=None,
        prometheus_textfile=None,
        prometheus_port=None,
        otlp=False,
    )
    assert run.run(options) == (1 if signal else 0)
    assert any("delays each iteration" in line for line in written) == (not signal)
    assert written[-1] == f"recorded in {folder}"


FAULTY = """
import sys
from zerotop import command_line
from zerotop.commands import run

def fail(*arguments):
    raise ValueError("a fault of zerotop")

run._say_end = fail
sys.exit(command_line.main(["run", "--headless", "--recording", sys.argv[1], "--", sys.executable, "-c", "exit(3)"]))
"""


def test_the_exit_code_is_the_jobs_if_its_recording_cannot_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAULTY, str(tmp_path / "job")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "Reading the recording failed: ValueError: a fault of zerotop" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"recorded in {tmp_path / 'job'}" in done.stderr
