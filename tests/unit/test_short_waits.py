"""Waits for data that are short, and long for their iterations."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_recording import BEGIN_NS, make_identity, make_span, read_recording, write_table
from zerotop.analysis.findings.pace import data_stall
from zerotop.analysis.findings.support import detection
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.recording.steps.step_table import read_rank_steps
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING
from zerotop_probe.recording.tables import BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter


@pytest.mark.parametrize(
    ("wait_s", "iteration_s", "is_told"),
    [
        (0.015, 0.03, True),
        (0.008, 0.03, True),
        (0.005, 0.03, False),
        (0.015, 0.07, False),
        (0.004, 0.012, True),
        (0.0015, 0.005, False),
    ],
)
def test_a_wait_counts_by_its_part_of_the_iteration(
    tmp_path: Path, wait_s: float, iteration_s: float, is_told: bool
) -> None:
    """From 2 ms on, 20 ms are always enough."""
    _write_job(tmp_path, [(wait_s, iteration_s)] * 60)
    runner = detection.Detection(recording := read_recording(tmp_path), [data_stall.detect])
    runner.update()
    assert [one.name for one in runner.findings_at(recording.end_ns + 60 * 10**9)] == ["data_stall"] * is_told


@pytest.mark.parametrize(("short", "is_told"), [(4, True), (40, False)])
def test_a_few_steps_that_wait_are_no_wait_of_all_since(tmp_path: Path, short: int, is_told: bool) -> None:
    """It is known that they were a few when it is known that no stacks show a line."""
    _write_job(tmp_path, [(0.001, 0.03)] * 10 + [(0.012, 0.03)] * 5 + [(0.001, 0.03)] * short)
    recording = read_recording(tmp_path)
    recording.info[STACKS_SETTING] = True
    runner = detection.Detection(recording, [data_stall.detect])
    runner.update()
    assert [one.name for one in runner.findings_at(recording.end_ns + 60 * 10**9)] == ["data_stall"] * is_told


def test_waits_that_vary_cost_what_all_steps_wait(tmp_path: Path) -> None:
    """In a third of the steps they are longer than the usual one, and so are the iterations."""
    _write_job(tmp_path, [(0.01, 0.03)] * 20 + [(0.018, 0.045), (0.01, 0.03), (0.01, 0.03)] * 60)
    recording = read_recording(tmp_path)
    recording.info[STACKS_SETTING] = True  # it is told when it is known that none shows a line
    runner = detection.Detection(recording, [data_stall.detect])
    runner.update()
    (steps,) = read_rank_steps(recording)
    (cost,) = rank_findings(runner.findings_at(recording.end_ns + 60 * 10**9), steps, recording.end_ns)
    assert cost.seconds == pytest.approx(float(steps["data_s"].sum()), rel=0.03)


def _write_job(folder: Path, steps: list[tuple[float, float]]) -> None:
    """Write steps, each of which waits for so many seconds in an iteration of so many."""
    spans, begin = [], 0.0
    for step, (wait_s, iteration_s) in enumerate(steps):
        work = begin + wait_s
        part = (iteration_s - wait_s) / 3
        spans += [make_span(begin, work, "data", step), make_span(work, work + part, "forward", step)]
        spans.append(make_span(work + part, work + 2 * part, "backward", step))
        spans.append(make_span(work + 2 * part, work + 3 * part, "step", step, BOUNDARY))
        begin += iteration_s
    write_table(folder, SPANS, make_identity(0), *spans).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello, rank=0, torch="2.11.0")
    writer.write(0, events.Engine, engine=0, device="cuda:0", kind="loop")
    writer.close()
