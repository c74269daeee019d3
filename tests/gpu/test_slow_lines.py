"""Findings of a loop on a GPU name the line that makes it slow, and nothing in a loop that only waits for its GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loop_runs import LOOPS
from real_jobs import make_environment, run_recorded
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]
STEPS = 160
# Findings that name lines, or that a line is the cause of.
KINDS = ("iteration_shift", "time_lost_in_line", "cache_emptied", "time_between_phases", "repeated_pause", "data_stall")


def run_watched(kind: str, folder: Path) -> tuple[list[Finding], dict[str, Any]]:
    """Run the loop; return its findings about lines, and what it counted itself."""
    inherited = make_environment() | {"DS_ACCELERATOR": "cuda"}
    del inherited["CUDA_VISIBLE_DEVICES"]
    run = run_recorded([sys.executable, str(LOOPS / "slow_on_gpu.py"), kind, str(STEPS), "cuda"], folder, inherited)
    assert run.returncode == 0, run.output
    counted = next(line for line in run.output.splitlines() if line.startswith("COUNTED "))
    recording = Recording.open(run.recording)
    findings = [one for one in detect_findings(recording, recording.end_ns) if one.name in KINDS]
    return findings, json.loads(counted[8:])


def test_waiting_for_the_gpu_is_no_finding(tmp_path: Path) -> None:
    found, _ = run_watched("nothing", tmp_path)
    assert [one.headline for one in found] == []


@pytest.mark.parametrize(
    ("kind", "names", "place"),
    [
        ("empty", ("cache_emptied",), "in clean_up takes"),
        # Which of both is found depends on how irregular the collections are.
        ("collect", ("iteration_shift", "time_lost_in_line"), "in clean_up (calls gc.collect)"),
    ],
)
def test_the_line_is_named(tmp_path: Path, kind: str, names: tuple[str, ...], place: str) -> None:
    found, counted = run_watched(kind, tmp_path)
    (finding,) = (one for one in found if one.name in names)
    assert 0 <= (finding.step or 0) - counted["first"] <= 3  # what the first does is felt in the step after it
    assert f"slow_on_gpu.py:{counted['lines'][kind]} {place}" in finding.details
