"""Scripts that Python reads from its input or its command line: their findings name the same lines as those of a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from loop_runs import LOOPS
from real_jobs import run_recorded
from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.alone, pytest.mark.timeout(600)]

SCRIPT = LOOPS / "unnamed.py"
PYTHON = shlex.quote(sys.executable)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ([sys.executable, str(SCRIPT)], "unnamed.py"),
        (["sh", "-c", f"{PYTHON} - < {shlex.quote(str(SCRIPT))}"], "<stdin>"),
        ([sys.executable, "-c", SCRIPT.read_text()], "<string>"),
    ],
)
def test_lines_are_named(command: list[str], name: str, tmp_path: Path, job_environment: dict[str, str]) -> None:
    # In so short a job the usual budget may leave fewer samples than show a line.
    run = run_recorded(command, tmp_path, job_environment, ("--budget", "2"))
    recording = Recording.open(run.recording)
    found = {one.name: one for one in detect_findings(recording, recording.end_ns)}
    line = SCRIPT.read_text().splitlines().index("    time.sleep(0.1)") + 1
    assert f"{name}:{line}" in found["time_between_phases"].headline
    assert f"the list kept of {name}" in found["host_growth"].details
    last = len(SCRIPT.read_text().splitlines())
    assert found["dead_rank"].headline == f"Rank 0 ended with ValueError at {name}:{last}"
