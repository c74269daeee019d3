"""Updates between replays of CUDA graphs, which hold forward and backward: no steps are seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from zerotop.analysis.findings.pace import steps_unseen
from zerotop.analysis.findings.support import Finding, detection
from zerotop.analysis.reports.no_findings import describe_no_findings
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter


def find(folder: Path, *, replays: int, updates: int = 300) -> tuple[Finding, ...]:
    """Write a step of 0.4 s, and 50 updates a second after it; return what is found."""
    spans = [make_span(0.0, 0.2, "forward", 0), make_span(0.2, 0.3, "backward", 0), make_span(0.3, 0.4, "step", 0, BOUNDARY)]
    spans += [make_span(at, at + 0.01, "step", 1, 0) for at in 0.41 + 0.02 * np.arange(updates)]
    write_table(folder, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello, rank=0, torch="2.11.0")
    writer.write(0, events.Engine, engine=0, device="cuda:0", kind="loop")
    if replays:
        for at, count in ((0.1, 1), (2.0, replays)):
            writer.write(
                int(at * S), events.GraphReplays, begin_ns=S // 10, replays=count, file="train.py", line=9, function="run"
            )
    writer.close()
    recording = read_recording(folder)
    runner = detection.Detection(recording, [steps_unseen.detect])
    runner.update()
    return runner.findings_at(recording.end_ns)


def test_updates_between_replays_are_told(tmp_path: Path) -> None:
    (found,) = find(tmp_path, replays=64)
    assert str(found.headline).endswith(" updates since step 0 replay CUDA graphs: no steps are seen singly")
    assert found.evidence["updates"] > 200
    assert found.evidence["rate"] == pytest.approx(50, rel=0.02)
    assert "at least 63 times at train.py:9 in run" in str(found.details)


@pytest.mark.parametrize(("replays", "updates"), [(0, 300), (64, 10)], ids=["no replays", "few updates"])
def test_other_updates_are_not(tmp_path: Path, replays: int, updates: int) -> None:
    assert not find(tmp_path, replays=replays, updates=updates)


@pytest.mark.parametrize(
    ("steps", "end_s", "told"),
    [
        (0, 9, "No findings: no finished step was recorded."),
        (1, 2, "No findings in this recording."),
        (1, 30, "No findings, but only 1 step was seen: the job ran for 29 s after that, of which no step is known."),
        (8, 99, "No findings in this recording."),
    ],
)
def test_few_steps_of_a_long_job_are_not_called_clean(steps: int, end_s: int, told: str) -> None:
    rows = np.zeros(steps, STEP_DTYPE)
    rows["end_unix_ns"] = (1 + np.arange(steps)) * 10**9
    assert describe_no_findings(rows, end_s * 10**9) == told
