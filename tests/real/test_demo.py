"""The demo on two cores, as somebody who tries zerotop starts it: its first step, its planted fault, what to do next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_jobs import QUICK_COMPILERS
from zerotop import demo
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.recording.reader import Recording

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.mark.alone  # where others use the cores, data come late before the fault, too
def test_the_planted_fault_is_found_with_its_line_and_nothing_is_compiled(tmp_path: Path) -> None:
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_STATE_HOME": str(tmp_path),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators"),
        "PATH": f"{QUICK_COMPILERS}:/usr/bin:/bin",
    }
    command = [sys.executable, "-m", "zerotop", "demo"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "operators").exists()
    path = done.stdout.partition("Recording in ")[2].splitlines()[0]
    findings = RecordedRun(Recording.open(Path(path)), memory=False).findings
    (finding,) = (one for one in findings if one.name == "data_stall")
    lines = demo.FAULTY_SCRIPT_PATH.read_text().splitlines()
    (fault,) = (number for number, line in enumerate(lines, 1) if "self.list.index(" in line)
    assert f"slow_data.py:{fault}" in finding.headline
    assert finding.step is not None
    assert 57 <= finding.step <= 64
    assert finding.fix
    summary, _, following = done.stdout.partition("Try next:\n")
    assert "200 steps, 0 skipped" in summary
    assert finding.headline in summary or "Other processes use" in summary  # which may cost more
    assert [line.split()[1] for line in following.splitlines()] == ["findings", "report", "demo", "demo"]
