"""Faults that are injected into real jobs at random: which findings follow, and whether they name cause, rank and line.

    python benchmarks/faults/causes.py [--jobs 24] [--seed 1] [--parallel 1] [--seconds 500] [--keep FOLDER]

A third of the jobs is clean. The others have one fault of a random kind, from a random step on and of a random strength, in
a plain loop, under DDP or under DeepSpeed, with a model and batch of random size. On a machine with GPUs they train there,
and faults of GPUs are drawn too. With ``--parallel`` jobs start beside each other, and still train one after the other on
each GPU. What is said of other work on the machine (cores and GPUs that others use) is no false alarm. ``--keep`` keeps
the packed recordings, their labels and the output of the jobs, ``--judge`` reads such a folder again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from fault_jobs import run_jobs
from fault_plans import KINDS, NO_FAULT, Kind, Plan, draw_plan, list_faults, read_plan

from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.recording.reader import Recording

# Findings about other work on the machine, and explanations of memory that every job has; and that a job waits for its turn.
_NOT_COUNTED = ("stuck_at_start", "cores_taken", "crowded_cores", "others_on_gpu", "others_arrived", "steps_not_recorded")
_SAME_STEPS = 3
_LATE_STEPS = 60


class Result(NamedTuple):
    """The findings about a job."""

    plan: Plan
    found: Finding | None
    is_cause_right: bool
    is_rank_right: bool
    is_line_right: bool | None  # None where there is no line
    false_alarms: tuple[Finding, ...]


def main() -> None:
    """Print a line for each job, then a table by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--engines", nargs="+", default=["plain", "ddp", "deepspeed"], help="one named twice is drawn twice as often"
    )
    parser.add_argument("--faults", nargs="+", choices=(NO_FAULT, *KINDS), help="only these [all, and a third clean]")
    parser.add_argument("--most-load", type=float, default=float("inf"), help="wait until the machine's load is below this")
    parser.add_argument("--parallel", type=int, default=1, help="jobs that start beside each other")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no job after that")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="only judge the recordings that were kept there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep recordings, labels and output there")
    parser.add_argument("--only-run", action="store_true", help="judge nothing, for a machine whose time is short")
    options = parser.parse_args()
    if options.judge:
        _print_table(
            [_judge_job(path.stem, read_plan(path), options.judge) for path in sorted(options.judge.glob("*.json"))]
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        _run_and_judge(options, options.keep or Path(folder))


def _run_and_judge(options: argparse.Namespace, folder: Path) -> None:
    chance, until_s = random.Random(options.seed), time.monotonic() + options.seconds
    faults = options.faults or list_faults(options.jobs, chance)
    drawn = [draw_plan(faults[number % len(faults)], options.engines, number, chance) for number in range(options.jobs)]
    plans = [(f"{options.seed}-{number:02}-{plan.fault}", plan) for number, plan in enumerate(drawn)]
    results = []
    for name, plan in run_jobs(plans, folder, at_once=options.parallel, until_s=until_s, most_load=options.most_load):
        if options.only_run:
            print(name, flush=True)
        else:
            results.append(_judge_job(name, plan, folder))
    _print_table(results)


def _judge_job(name: str, plan: Plan, folder: Path) -> Result:
    recording = Recording.open(folder / f"{name}.zerotop")
    result = _judge_findings(plan, detect_findings(recording, recording.end_ns))
    _print_job(name, result)
    return result


def _judge_findings(plan: Plan, findings: tuple[Finding, ...]) -> Result:
    kind = KINDS.get(plan.fault)
    told = [one for one in findings if kind is not None and _is_told(plan, kind, one)]
    # The other findings follow from that of the fault itself, and are linked to it.
    found = next((one for one in told if kind is not None and one.name == kind.finding), told[0] if told else None)
    allowed = (kind.finding, *kind.also) if kind is not None else ()
    alarms = tuple(one for one in findings if _is_alarm(one) and not (one.name in allowed and _is_in_time(plan, one)))
    if kind is None or found is None:
        return Result(plan, found, False, False, None, alarms)
    text, place = f"{found.headline} {found.details}", plan.place
    is_rank_right = plan.fault not in ("slow_rank", "kill", "exception") or found.ranks == (plan.rank,)
    is_line_right = place in f"{text} {found.fix}" if place else None
    return Result(plan, found, _names_cause(plan, kind, found), is_rank_right, is_line_right, alarms)


def _is_told(plan: Plan, kind: Kind, finding: Finding) -> bool:
    is_right = finding.name == kind.finding or (finding.name in kind.also and _names_cause(plan, kind, finding))
    return is_right and _is_in_time(plan, finding)


def _names_cause(plan: Plan, kind: Kind, finding: Finding) -> bool:
    return kind.words.format(place=plan.place) in f"{finding.headline} {finding.details}"


def _is_in_time(plan: Plan, finding: Finding) -> bool:
    """Return whether a finding begins with the fault; programs beside the job take a while to start."""
    if finding.step is None:
        return True
    if plan.fault == "hogs":  # on a machine that others use it is told earlier
        return finding.name == "cores_taken" or finding.step >= plan.step - _SAME_STEPS
    late = _LATE_STEPS if plan.fault == "neighbour" else _SAME_STEPS
    return plan.step - _SAME_STEPS <= finding.step <= plan.step + late


def _is_alarm(finding: Finding) -> bool:
    return finding.severity is not Severity.INFO and finding.name not in _NOT_COUNTED


def _print_job(name: str, result: Result) -> None:
    plan = result.plan
    words = result.found.headline if result.found is not None else "-"
    alarms = "".join(f"\n    FALSE {one.name}@{one.step}: {one.headline} | {one.details}" for one in result.false_alarms)
    right = "".join(
        mark if is_right else "."
        for mark, is_right in (("c", result.is_cause_right), ("r", result.is_rank_right), ("l", result.is_line_right))
    )
    print(f"{name:18} {plan.engine:9} step {plan.step} rank {plan.rank} {right} {words} {alarms}", flush=True)


def _print_table(results: list[Result]) -> None:
    by_kind = defaultdict(list)
    for result in results:
        by_kind[result.plan.fault].append(result)
    print("\n| fault | jobs | found | cause right | rank right | line right | false findings |")
    print("|---|---|---|---|---|---|---|")
    for kind in (NO_FAULT, *KINDS):
        if kind in by_kind:
            print(_format_row(kind, by_kind[kind]))
    faulty = [result for result in results if result.plan.fault != NO_FAULT]
    print(_format_row("all", results))
    found, false = sum(one.found is not None for one in faulty), sum(len(one.false_alarms) for one in results)
    precision, recall = found / max(1, found + false), found / max(1, len(faulty))
    counts = f"{len(faulty)} jobs with a fault, {len(results) - len(faulty)} clean"
    print(f"\nprecision {precision:.0%}, recall {recall:.0%}, {counts}")


def _format_row(name: str, results: list[Result]) -> str:
    lines = [one.is_line_right for one in results if one.is_line_right is not None]
    found = [one for one in results if one.found is not None]
    counts = (
        [str(len(found)), str(sum(one.is_cause_right for one in found)), str(sum(one.is_rank_right for one in found))]
        if name != NO_FAULT
        else ["", "", ""]
    )
    false = sum(len(one.false_alarms) for one in results)
    named = f"{sum(lines)} of {len(lines)}" if lines else ""
    return " | ".join(["", name, str(len(results)), *counts, named, str(false), ""]).strip()


if __name__ == "__main__":
    main()
