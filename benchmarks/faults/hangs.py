"""Hangs that are injected into real jobs: whether the rank and its line are named, and how soon.

    python benchmarks/faults/hangs.py [--hangs 42] [--pauses 8] [--at-once 3] [--seed 1] [--gpus] [--keep FOLDER]

Each job has 2 to 4 ranks and a loop of 30 ms steps; a rank chosen at random stops in a step chosen at random. In a pause it
saves or computes for 15 to 40 s while the others wait, which must not be reported. With ``--gpus`` there are one or two
ranks, each on a GPU, and kernels that do not end. Seconds are from the moment that the rank printed when it stopped until a
viewer, which looks four times a second, knows the finding. ``--keep`` keeps the packed recordings, ``--judge`` reads such a
folder again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "tests" / "support"))

from real_jobs import make_environment
from standing_jobs import LINES, StandingJob
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording

_HANGS = ("sleep", "lock", "disk", "native", "mismatch", "peer")
_PAUSES = ("save", "compute")
# A kernel that the rank waits for, and one that nobody waits for until the next batch is copied.
_GPU_HANGS = ("kernel", "sleep", "mismatch", "native", "kernel", "peer", "lock", "queue", "disk")
_GPU_PAUSES = ("multiply", "save")
_OF_SEVERAL = ("mismatch", "peer")  # a single rank does not wait for others
_ENDLESS_S = 3600.0
_PATIENCE_S = 180.0


class Case(NamedTuple):
    """The fault that is injected into a job."""

    kind: str
    ranks: int
    odd: int  # the rank that stops
    step: int
    stopped_ns: int | None  # when it stopped, in unix time


class Result(NamedTuple):
    """The findings about one job."""

    case: Case
    is_told: bool
    is_rank_right: bool
    is_line_right: bool | None  # None where the rank has ended
    seconds: float | None
    words: str


def main() -> None:
    """Print a line for each job, then a table by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=42)
    parser.add_argument("--pauses", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=3, help="jobs that run together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", action="store_true", help="train on GPUs, with NCCL")
    parser.add_argument("--kinds", nargs="+", help="only these, in turn [all]")
    parser.add_argument("--patience", type=float, default=_PATIENCE_S, help="seconds until a hang counts as not told")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings and their labels there")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="only judge the recordings that were kept there")
    options = parser.parse_args()
    _print_table(_judge_kept(options.judge) if options.judge else _run_jobs(options))


def _judge_kept(folder: Path) -> list[Result]:
    results = []
    for path in sorted(folder.glob("*.json")):
        recording = Recording.open(path.with_suffix(".zerotop"))
        findings = detect_findings(recording, recording.end_ns)
        found = next((one for one in findings if one.name in ("hung_ranks", "stuck_at_start")), None)
        case = Case(**json.loads(path.read_text()))
        results.append(_judge_finding(case, found, found.known_ns if found is not None else 0))
        _print_job(results[-1])
    return results


def _run_jobs(options: argparse.Namespace) -> list[Result]:
    chance = random.Random(options.seed)
    hangs, pauses = (_GPU_HANGS, _GPU_PAUSES) if options.gpus else (_HANGS, _PAUSES)
    if options.gpus and torch.cuda.device_count() == 1:
        hangs = tuple(kind for kind in hangs if kind not in _OF_SEVERAL)
    hangs = tuple(options.kinds or hangs)
    kinds = [hangs[number % len(hangs)] for number in range(options.hangs)]
    kinds += [pauses[number % len(pauses)] for number in range(options.pauses)]
    chance.shuffle(kinds)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(kinds), options.at_once):
            part = list(enumerate(kinds[first : first + options.at_once], first))
            jobs = [_start_job(Path(folder, f"{number:02}-{kind}"), kind, options.gpus, chance) for number, kind in part]
            try:
                results += _watch_jobs(jobs, options.patience)
            finally:
                with ThreadPoolExecutor(len(jobs)) as pool:
                    list(pool.map(StandingJob.stop, jobs))
            if options.keep:
                for job in jobs:
                    _keep_recording(job, options.keep, f"{options.seed}-{job.recording.parent.name}")
    return results


def _start_job(folder: Path, kind: str, on_gpus: bool, chance: random.Random) -> StandingJob:
    ranks = min(2, torch.cuda.device_count()) if on_gpus else chance.randint(3 if kind == "mismatch" else 2, 4)
    # Rank 0 serves the store that the others of a rank that is gone wait for.
    odd = chance.randrange(1 if kind == "peer" and ranks > 1 else 0, ranks)
    pause_s = chance.uniform(15, 40) if kind in (*_PAUSES, *_GPU_PAUSES) else _ENDLESS_S
    step = chance.randrange(15, 80)
    variables = make_environment()
    if on_gpus:
        variables = {name: value for name, value in variables.items() if name != "DS_ACCELERATOR"} | {
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks))))
        }
    return StandingJob(folder, variables, kind, ranks=ranks, odd=odd, step=step, pause_s=pause_s)


def _watch_jobs(jobs: list[StandingJob], patience_s: float) -> list[Result]:
    """Wait until each job has a finding, has ended, or has stood still for long."""
    results: dict[StandingJob, Result] = {}
    end = time.monotonic() + patience_s + 120
    while len(results) < len(jobs) and time.monotonic() < end:
        for job in jobs:
            if job not in results and (result := _check_job(job, patience_s)) is not None:
                results[job] = result
                _print_job(result)
        time.sleep(0.25)
    return [results.get(job, Result(_describe_job(job), False, False, False, None, "nothing")) for job in jobs]


def _check_job(job: StandingJob, patience_s: float) -> Result | None:
    finding, case = job.find_named("hung_ranks"), _describe_job(job)
    if finding is None:
        has_ended = job.process.poll() is not None
        is_late = case.stopped_ns is not None and time.time_ns() - case.stopped_ns > patience_s * 1e9
        return _judge_finding(case, None, 0) if has_ended or is_late else None
    return _judge_finding(case, finding, time.time_ns())


def _describe_job(job: StandingJob) -> Case:
    return Case(job.kind, job.ranks, job.odd, job.step, job.stopped_ns)


def _judge_finding(case: Case, finding: Finding | None, known_ns: int) -> Result:
    place = f"hanging.py:{LINES[case.kind]}" if case.kind in LINES and case.kind != "peer" else ""
    if finding is None:
        return Result(case, False, False, False if place else None, None, "nothing")
    seconds = (known_ns - case.stopped_ns) / 1e9 if case.stopped_ns is not None else None
    words = f"{finding.headline}. {finding.details}"
    # Of two ranks in different collectives none is the odd one: both must be named, with their lines.
    is_pair = case.kind == "mismatch" and case.ranks == 2
    is_rank_right = finding.ranks == (case.odd,) or (is_pair and finding.ranks == (0, 1))
    is_line_right = (place == finding.fix or (is_pair and place in words)) if place else None
    return Result(case, True, is_rank_right, is_line_right, seconds, words)


def _keep_recording(job: StandingJob, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.log").write_text(job.output)
    packed = [sys.executable, "-m", "zerotop", "pack", str(job.recording), "-o", str(folder / f"{name}.zerotop")]
    if subprocess.run(packed, stdout=subprocess.DEVNULL).returncode == 0:
        (folder / f"{name}.json").write_text(json.dumps(_describe_job(job)._asdict()) + "\n")


def _print_job(result: Result) -> None:
    case = result.case
    right = "".join(
        mark if is_right else "." for mark, is_right in (("r", result.is_rank_right), ("l", result.is_line_right))
    )
    print(
        f"{case.kind:10} rank {case.odd} step {case.step:3} {right} {result.seconds or 0:5.1f} s  {result.words}", flush=True
    )


def _print_table(results: list[Result]) -> None:
    by_kind = defaultdict(list)
    for result in results:
        by_kind[result.case.kind].append(result)
    print("\n| kind | jobs | told | rank right | line right | seconds until told, median | most |")
    print("|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys((*_HANGS, *_GPU_HANGS, *_PAUSES, *_GPU_PAUSES)):
        found = by_kind.get(kind, [])
        if not found:
            continue
        lines = [one.is_line_right for one in found if one.is_line_right is not None]
        times = [one.seconds for one in found if one.seconds is not None]
        told, ranks = sum(one.is_told for one in found), sum(one.is_rank_right for one in found)
        shown = [f"{statistics.median(times):.1f}", f"{max(times):.1f}"] if times else ["", ""]
        is_pause = kind in (*_PAUSES, *_GPU_PAUSES)
        own = ["", ""] if is_pause else [str(ranks), f"{sum(lines)} of {len(lines)}" if lines else ""]
        print(" | ".join(["", kind, str(len(found)), str(told), *own, *shown, ""]).strip())


if __name__ == "__main__":
    main()
