"""Evaluations that take longer each time, put into a real recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recordings
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording.tables import PHASE_CODE

S = 1_000_000_000


def evaluate(folder: Path, seconds: list[float]) -> Recording:
    """Insert evaluations of these durations before every third step from 6 on, each sampled at a line."""
    (path,) = folder.glob("spans-rank0-*.rec")
    header, _, records = path.read_bytes().partition(b"\n")
    spans = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]]).copy()
    added = []
    (events,) = folder.glob("events-rank0-*.jsonl")
    with events.open("a") as file:
        for step, length in zip(range(6, 100, 3), seconds, strict=False):
            late = spans["step"] >= step
            begin = int(spans["end_ns"][~late].max())
            for name in ("begin_ns", "end_ns"):
                spans[name][late] += int(length * S)
            span = spans[:1].copy()
            span["begin_ns"], span["end_ns"] = begin, begin + int(length * S)
            span["step"], span["phase"], span["flags"], span["depth"] = step, PHASE_CODE["eval"], 0, 0
            added.append(span)
            times = {"time_ns": int(span["end_ns"][0]), "begin_ns": begin, "end_ns": int(span["end_ns"][0]), "step": step}
            frames = [{"file": "train.py", "line": 36, "function": "summarize", "own": True}]
            stacks = [{"seconds": length, "call": "argsort", "frames": [0]}]
            facts: dict[str, Any] = {"where": "eval", "why": "slow", "frames": frames, "stacks": stacks}
            file.write(json.dumps({"event": "stacks", **times, **facts}) + "\n")
    whole = np.concatenate([spans, *added])
    path.write_bytes(header + b"\n" + np.sort(whole, order="end_ns", kind="stable").tobytes())
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([0.5, 0.8, 1.1, 1.4, 1.7, 2.0], True),
        ([0.5, 0.8, 1.1, 1.0, 1.7, 2.0, 2.1], True),
        ([0.5, 0.8, 1.1, 1.4, 1.7], False),  # too few to be sure
        ([2.0, 1.9, 2.1, 2.0, 2.05, 2.1, 2.0], False),
        ([0.5, 2.0, 0.6, 1.9, 0.7, 2.1, 0.5], False),
        ([0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07], False),  # hardly any time
    ],
)
def test_evaluations_that_grow(tmp_path: Path, seconds: list[float], found: bool) -> None:
    recording = evaluate(recordings.unpack_to_folder("gpu-clean", tmp_path), seconds)
    findings = detect_findings(recording, recording.end_ns)
    grown = [one for one in findings if one.name == "evaluation_growth"]
    assert len(grown) == found
    for finding in grown:
        assert finding.headline.endswith(": 500 ms became 2.00 s: train.py:36")
        assert "mostly at train.py:36 in summarize (calls argsort)" in finding.details
        (cost,) = [one for one in rank_findings(findings, read_steps(recording), recording.end_ns) if one.finding == finding]
        assert cost.seconds == pytest.approx(sum(seconds) - seconds[0] * len(seconds))


def test_a_job_that_becomes_slower_is_something_else(tmp_path: Path) -> None:
    folder = recordings.unpack_to_folder("held-drift", tmp_path)
    recording = Recording.open(folder)
    assert "evaluation_growth" not in [one.name for one in detect_findings(recording, recording.end_ns)]
