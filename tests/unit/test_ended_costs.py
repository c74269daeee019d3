"""What standing still cost, where the step ended and where it never did; and waiting for launches, which ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import recordings
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.findings.pace import iteration_shift, waits_for_launches
from zerotop.analysis.findings.ranks import long_end
from zerotop.analysis.findings.support.causes import batch_causes
from zerotop.analysis.reports.cost_text import describe_cost
from zerotop.analysis.reports.finding_costs import measure_training_s, overlap, rank_findings
from zerotop.analysis.reports.finding_json import list_findings_json
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.reports.recording_report import read_recording_report
from zerotop.recording.samples import Rows
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.report.recording_page import write_recording_page


def tell_cost(run: RecordedRun, steps: Rows, end_ns: int) -> str:
    cost = next(one for one in rank_findings(run.findings, steps, end_ns) if one.finding.name == "hung_ranks")
    return describe_cost(cost, run.view)


def test_the_cost_of_standing_still_is_the_whole_wait() -> None:
    """It was found after 30 s and lasted 45 s; a job that is ended meanwhile has no such step."""
    run = RecordedRun(recordings.open_recording("cpu-hang"), memory=False)
    steps = run.source.job_steps
    assert tell_cost(run, steps, run.source.end_ns) == "about 45 s in all, 97 % of the training time"
    hung = next(finding for finding in run.findings if finding.name == "hung_ranks")
    finished = steps[steps["end_unix_ns"] <= hung.begin_ns]
    trained_s = measure_training_s(finished)
    end_ns = hung.begin_ns + int(np.rint(trained_s * 3e9))
    assert tell_cost(run, finished, end_ns).endswith(" s in all, 75 % of the training time")


def test_all_shares_are_of_one_time_and_those_of_the_same_steps_are_told_to_overlap() -> None:
    """A wait that no finished step includes is a part of that time for all findings, not only for its own."""
    run = RecordedRun(recordings.open_recording("cpu-hang"), memory=False)
    hung = next(finding for finding in run.findings if finding.name == "hung_ranks")
    steps = run.source.job_steps[run.source.job_steps["end_unix_ns"] <= hung.begin_ns]
    slow = replace(hung, name="slow_forward", kind=None, begin_ns=int(steps["begin_unix_ns"][0]), cost=0.5, evidence={})
    trained_s = measure_training_s(steps)
    ranked = rank_findings([hung, slow], steps, hung.begin_ns + round(trained_s * 1e9))
    shares = {cost.finding.name: cost.share for cost in ranked}
    assert shares == {"hung_ranks": pytest.approx(0.5), "slow_forward": pytest.approx(0.25, rel=0.05)}
    assert not overlap(ranked)
    ended = replace(hung, name="long_end", kind=long_end._KIND, evidence={"waited_s": trained_s})
    costliest, other = rank_findings([ended, slow], steps, hung.begin_ns)
    assert other.share == pytest.approx(0.5, rel=0.05)  # nothing trained in the end
    assert costliest.share == pytest.approx(0.5)
    assert describe_cost(costliest, run.view).endswith(", 50 % of the training time and the end")
    report = replace(read_recording_report(run.recording), findings=(costliest,))
    assert ">50 % of the training time and the end<" in write_recording_page(report)
    twice = rank_findings([slow, replace(slow, name="slow_cores")], steps, run.source.end_ns)
    assert [cost.share for cost in twice] == [pytest.approx(0.5, rel=0.1)] * 2
    assert overlap(twice)


def test_iterations_that_became_longer_for_another_reason_wait_no_longer_for_data() -> None:
    """A wait of 80 ms in iterations of 100 ms is one of 80 ms in iterations of 200 ms, too."""
    run = RecordedRun(recordings.open_recording("cpu-hang"), memory=False)
    steps = run.source.job_steps[:30].copy()
    steps["iteration_s"], steps["steps"] = np.repeat((0.1, 0.2), (10, 20)), 1
    evidence = {"data_s": 0.08, "iteration_s": 0.1, "share": 0.8}
    begin_ns = int(steps["begin_unix_ns"][0])
    stall = replace(run.findings[0], name="data_stall", kind=None, begin_ns=begin_ns, cost=0.8, evidence=evidence)
    assert rank_findings([stall], steps, run.source.end_ns)[0].seconds == pytest.approx(30 * 0.08, rel=0.01)


@pytest.mark.parametrize(("name", "own"), [("hand-rank0", 2), ("gpu-counted-hogs", 1), ("hardware-pcie", 2)])
def test_gpu_hours_are_those_of_the_gpus_with_ranks_of_the_job(name: str, own: int) -> None:
    """The first two jobs leave GPUs of their machine alone; of the third no allocator was recorded."""
    run = RecordedRun(recordings.open_recording(name), memory=False)
    assert len(run.view.job_gpus) == own
    cost = replace(rank_findings(run.findings, run.source.job_steps, run.source.end_ns)[0], seconds=3600.0)
    assert f", {own}.00 GPU hours" in describe_cost(cost, run.view)


def test_programs_get_the_share_that_is_shown() -> None:
    run = RecordedRun(recordings.open_recording("story"), memory=False)
    ranked = rank_findings(run.findings, run.source.job_steps, run.source.end_ns)
    shares = {one["name"]: one["lost_share"] for one in list_findings_json(run) if one["lost_share"] is not None}
    assert shares == {cost.finding.name: cost.share for cost in ranked if cost.share is not None}
    assert len(shares) > 1


def test_waiting_for_launches_costs_nothing_after_its_end() -> None:
    """From step 100 on pauses take most of the time: the steps up to 79 were judged to wait for launches."""
    run = RecordedRun(recordings.open_recording("hand-rank0"), memory=False)
    steps = run.source.job_steps
    (cost,) = [one for one in rank_findings(run.findings, steps, run.source.end_ns) if one.finding.name == "launch_bound"]
    assert str(cost.finding.headline).endswith("up to step 79")
    assert str(cost.finding.details).startswith("Steps 50 to 79 take ")
    waited = steps[(steps["step"] >= 20) & (steps["step"] <= 79)]
    assert cost.seconds is not None
    # The first of them began earlier on the other rank, and the last ones waited for a little more of the time.
    assert cost.seconds == pytest.approx(cost.finding.cost * measure_training_s(waited), rel=0.05)
    assert cost.seconds_text == " in steps 20 to 79"
    assert cost.seconds < measure_training_s(steps) / 5


def test_a_share_of_some_steps_is_not_that_of_all_steps_that_it_costs() -> None:
    """Kernels ran in 60 % of the time in steps 40 to 79, in 80 % before: 30 % of the time from step 20 on was lost."""
    steps = np.zeros(200, STEP_DTYPE)
    steps["steps"], steps["step"], steps["iteration_s"] = 1, np.arange(200), 0.1
    steps["begin_unix_ns"] = np.arange(200) * 100_000_000
    steps["end_unix_ns"] = steps["begin_unix_ns"] + 100_000_000
    head = "launch_bound", int(steps["begin_unix_ns"][20]), int(steps["end_unix_ns"][79]), int(steps["end_unix_ns"][79])
    shown = {"share": 0.4, "use": 0.6, "iteration_s": 0.1, "cores": 1.0}
    found = Finding(*head, 20, (0,), Severity.INFO, 0.9, "", evidence=shown, cost=0.3, kind=waits_for_launches._LAUNCHES)
    (cost,) = rank_findings([found], steps, int(steps["end_unix_ns"][-1]))
    assert cost.seconds == pytest.approx(0.3 * 18)
    assert cost.seconds_text == " in steps 20 to 199"
    (cost,) = rank_findings([replace(found, evidence=shown | {"first_step": 40})], steps, int(steps["end_unix_ns"][-1]))
    assert cost.seconds == pytest.approx(0.3 * 2 + 0.4 * 16)
    larger = iteration_shift._KIND.with_changes(measured_cause=batch_causes.BATCH_GROWTH)
    shift = replace(found, name="iteration_shift", kind=larger, begin_ns=int(steps["begin_unix_ns"][120]), step=120)
    shift = replace(shift, evidence={"before_s": 0.1, "after_s": 0.15})
    costs = rank_findings([found, shift], steps, int(steps["end_unix_ns"][-1]))
    assert [one.seconds_text for one in costs if one.finding is found] == [" in steps 20 to 119"]
    steps["iteration_s"][190:] = 3.0  # another cause, such as a thread that holds Python's lock
    steps["end_unix_ns"] = np.cumsum(steps["iteration_s"] * 1e9).astype(np.int64)
    steps["begin_unix_ns"][1:] = steps["end_unix_ns"][:-1]
    (with_pauses,) = rank_findings([found], steps, int(steps["end_unix_ns"][-1]))
    assert with_pauses.seconds == pytest.approx(0.3 * (17 + 2))
    (beside,) = rank_findings([replace(found, name="time_between_phases")], steps, int(steps["end_unix_ns"][-1]))
    assert beside.seconds == pytest.approx(with_pauses.seconds)
    (of_all,) = rank_findings([replace(found, kind=None)], steps, int(steps["end_unix_ns"][-1]))
    assert of_all.seconds_text == ""


def test_ranks_that_wait_in_turn_do_not_lose_more_than_the_time_that_passed() -> None:
    """Rank 0 pauses in one iteration, and the other rank waits for it in the next one."""
    steps = np.zeros(40, STEP_DTYPE)
    steps["steps"], steps["step"] = 1, np.arange(40)
    steps["iteration_s"] = np.where(steps["step"] % 4 < 2, 1.0, 0.1)  # of the slower rank
    ends_s = np.cumsum(np.where(steps["step"] % 4 == 0, 1.0, 0.1))
    steps["end_unix_ns"] = (ends_s * 1e9).astype(np.int64)
    steps["begin_unix_ns"][1:] = steps["end_unix_ns"][:-1]
    assert measure_training_s(steps) == pytest.approx(13.0)
    assert measure_training_s(steps[2:4]) == pytest.approx(0.2)


@pytest.mark.parametrize("long", [0, 7])
def test_a_change_of_iterations_that_vary_costs_their_mean(long: int) -> None:
    """They vary by as much as they became longer. One has a pause: that of the first step is a part of the change."""
    steps = np.zeros(400, STEP_DTYPE)
    steps["steps"], steps["step"] = 1, np.arange(400)
    steps["iteration_s"] = np.random.default_rng(1).normal(0.05, 0.01, 400)
    steps["iteration_s"][long] = 20.0
    steps["end_unix_ns"] = (np.cumsum(steps["iteration_s"]) * 1e9).astype(np.int64)
    steps["begin_unix_ns"][1:] = steps["end_unix_ns"][:-1]
    times = {"before_s": 0.04, "after_s": 0.05}
    shift = Finding("iteration_shift", 0, 1, 1, 0, (0,), Severity.WARNING, 0.9, "", evidence=times, cost=0.2)
    (cost,) = rank_findings([shift], steps, int(steps["end_unix_ns"][-1]))
    lost = steps["iteration_s"] - 0.04
    assert cost.seconds == pytest.approx(float((np.delete(lost, long) if long else lost).sum()), rel=0.03)


@pytest.mark.parametrize(("until", "lost_s"), [(219.0, 2.6), (None, 1.0)], ids=["has ended", "goes on"])
def test_a_slowdown_goes_on_to_cost_after_one_within_it(until: float | None, lost_s: float) -> None:
    """From 10 to 20 ms in step 100, and to 40 ms in step 200, for 20 steps or for good."""
    steps = np.zeros(380, STEP_DTYPE)
    steps["steps"], steps["step"], steps["iteration_s"] = 1, np.arange(380), 0.01
    steps["iteration_s"][100:] = 0.02
    steps["iteration_s"][200 : 380 if until is None else 220] = 0.04
    steps["end_unix_ns"] = (np.cumsum(steps["iteration_s"]) * 1e9).astype(np.int64)
    steps["begin_unix_ns"][1:] = steps["end_unix_ns"][:-1]
    changes = [(100, {"before_s": 0.01, "after_s": 0.02}), (200, {"before_s": 0.02, "after_s": 0.04})]
    changes[1][1].update({"until_step": until} if until is not None else {})
    shifts = [
        Finding("iteration_shift", begin, begin, begin, step, (0,), Severity.WARNING, 0.9, "", evidence=times, cost=0.5)
        for step, times in changes
        for begin in [int(steps["begin_unix_ns"][step])]
    ]
    costs = {cost.finding.step: cost.seconds for cost in rank_findings(shifts, steps, int(steps["end_unix_ns"][-1]))}
    assert costs[100] == pytest.approx(lost_s, rel=0.03)


@pytest.mark.parametrize(("before_s", "lost_s"), [(0.0, 20 * 0.3), (0.1, 20 * 0.2)])
def test_what_each_n_th_iteration_took_longer_before_is_no_part_of_its_pauses(before_s: float, lost_s: float) -> None:
    steps = np.zeros(200, STEP_DTYPE)
    steps["steps"], steps["step"], steps["iteration_s"] = 1, np.arange(200), 0.1
    steps["iteration_s"][::10] = 0.4
    steps["end_unix_ns"] = np.cumsum(steps["iteration_s"] * 1e9).astype(np.int64)
    steps["begin_unix_ns"][1:] = steps["end_unix_ns"][:-1]
    shown = {"iteration_s": 0.1, "pause_s": 0.3 - before_s, "longer_before_s": before_s}
    head = "repeated_pause", 0, int(steps["end_unix_ns"][-1]), int(steps["end_unix_ns"][-1])
    found = Finding(*head, 0, (0,), Severity.WARNING, 0.9, "", evidence=shown, cost=0.5)
    (cost,) = rank_findings([found], steps, int(steps["end_unix_ns"][-1]))
    assert cost.seconds == pytest.approx(lost_s)
