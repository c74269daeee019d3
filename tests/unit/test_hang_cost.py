"""What standing still cost, where the step ended and where it never did."""

from __future__ import annotations

import numpy as np

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
