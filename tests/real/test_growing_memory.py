"""Real loops whose resident memory grows: only memory that the kernel cannot drop is a finding."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loop_runs import LOOPS
from real_jobs import run_recorded
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.findings.support.finding import Finding
from zerotop.analysis.memory.host_ledger import FILES, REST, HostLedger
from zerotop.analysis.reports.memory import read_report
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

MIB = 1 << 20


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Return a folder whose files are in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def run_growing(kind: str, folder: Path, tmp_path: Path, environment: dict[str, str]) -> tuple[Recording, dict[str, int]]:
    """Return the recording, and the kernel's figures at the end, in bytes by name."""
    run = run_recorded([sys.executable, str(LOOPS / "growing_memory.py"), kind, str(folder)], tmp_path, environment)
    assert run.returncode == 0, run.output
    return Recording.open(run.recording), {
        name: int(kib) << 10 for name, kib in re.findall(r"(Rss\w+):\s+(\d+) kB", run.output)
    }


def find_growth(recording: Recording) -> list[Finding]:
    return [one for one in detect_findings(recording, recording.end_ns) if one.name == "host_growth"]


def read_last_ledger(recording: Recording) -> HostLedger:
    """Return the ledger at the end of the last step."""
    report = read_report(recording)
    assert report is not None
    assert report.view.host is not None
    return report.view.host


@pytest.mark.parametrize("kind", ["mapped", "safetensors"])
def test_pages_of_files_are_no_growth(kind: str, tmp_path: Path, job_environment: dict[str, str]) -> None:
    recording, sizes = run_growing(kind, tmp_path, tmp_path, job_environment)
    assert sizes["RssFile"] > 800 * MIB
    assert not find_growth(recording)
    samples = np.concatenate([source.array for source in recording.sources["processes"]])
    last = samples[samples["rank"] == 0][-1]
    # The last sample may be one before the last step.
    assert abs(int(last["held_bytes"]) - sizes["RssAnon"] - sizes["RssShmem"]) < 24 * MIB
    ledger = read_last_ledger(recording)
    assert sum(row.bytes for row in ledger.rows) == ledger.resident_bytes
    assert abs(ledger.sum_bytes(FILES) - sizes["RssFile"]) < 48 * MIB
    assert ledger.sum_bytes(REST) < 400 * MIB


def test_pages_of_a_file_in_memory_that_was_there_before_are_no_growth(
    memory_folder: Path, tmp_path: Path, job_environment: dict[str, str]
) -> None:
    recording, sizes = run_growing("memory", memory_folder, tmp_path, job_environment)
    assert sizes["RssShmem"] > 800 * MIB
    assert not find_growth(recording)


@pytest.mark.parametrize("kind", ["list", "shared"])
def test_memory_that_only_this_job_can_free_grows(kind: str, tmp_path: Path, job_environment: dict[str, str]) -> None:
    recording, _ = run_growing(kind, tmp_path, tmp_path, job_environment)
    (finding,) = find_growth(recording)
    assert ("of the growth are shared memory" in finding.details) == (kind == "shared")
    assert finding.evidence["bytes_per_step"] > 11 * MIB


def test_private_memory_of_forked_workers(tmp_path: Path, job_environment: dict[str, str]) -> None:
    recording, sizes = run_growing("workers", tmp_path, tmp_path, job_environment)
    true = sizes["RssPrivate"]  # of four workers, from smaps_rollup
    assert true > 120 * MIB
    measured = read_last_ledger(recording).worker_bytes
    assert measured is not None
    assert abs(measured - true) < 0.2 * true
