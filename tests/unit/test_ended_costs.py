"""What standing still cost, where the step ended and where it never did; and waiting for launches, which ended."""

from __future__ import annotations

import numpy as np
import pytest

import recordings
from zerotop.analysis.reports.cost_text import describe_cost
from zerotop.analysis.reports.finding_costs import measure_training_s, rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.recording.samples import Rows


def tell_cost(run: RecordedRun, steps: Rows, end_ns: int) -> str:
    cost = next(one for one in rank_findings(run.findings, steps, end_ns) if one.finding.name == "hung_ranks")
    return describe_cost(cost, measure_training_s(steps), run.view)


def test_the_cost_of_standing_still_is_the_whole_wait() -> None:
    """It was found after 30 s and lasted 45 s; a job that is ended meanwhile has no such step."""
    run = RecordedRun(recordings.open_recording("cpu-hang"), memory=False)
    steps = run.source.job_steps
    assert tell_cost(run, steps, run.source.end_ns) == "about 45 s in all, 96 % of the training time"
    hung = next(finding for finding in run.findings if finding.name == "hung_ranks")
    finished = steps[steps["end_unix_ns"] <= hung.begin_ns]
    trained_s = measure_training_s(finished)
    end_ns = hung.begin_ns + int(np.rint(trained_s * 3e9))
    assert tell_cost(run, finished, end_ns).endswith(" s in all, 75 % of the training time")


def test_waiting_for_launches_costs_nothing_after_its_end() -> None:
    """From step 100 on pauses take most of the time: the steps up to 79 were judged to wait for launches."""
    run = RecordedRun(recordings.open_recording("hand-rank0"), memory=False)
    steps = run.source.job_steps
    (cost,) = [one for one in rank_findings(run.findings, steps, run.source.end_ns) if one.finding.name == "launch_bound"]
    assert str(cost.finding.headline).endswith("up to step 79")
    waited = steps[(steps["step"] >= 20) & (steps["step"] <= 79)]
    assert cost.seconds is not None
    # The first of them began earlier on the other rank.
    assert cost.seconds == pytest.approx(cost.finding.evidence["share"] * float(np.nansum(waited["iteration_s"])), rel=0.03)
    assert cost.seconds < measure_training_s(steps) / 5
