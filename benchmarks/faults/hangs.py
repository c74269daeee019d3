"""Hangs that are injected into real jobs on the CPU: whether the rank and its line are named, and how soon.

    python benchmarks/faults/hangs.py [--hangs 42] [--pauses 8] [--at-once 3] [--seed 1]

Each job has 2 to 4 ranks and a loop of 30 ms steps; a rank chosen at random stops in a step chosen at random. In a pause it
saves or computes for 15 to 40 s while the others wait, which must not be reported. Seconds are from the moment that the rank
printed when it stopped until a viewer, which looks four times a second, knows the finding.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "tests" / "support"))

from real_jobs import make_environment
from standing_jobs import LINES, StandingJob

_HANGS = ("sleep", "lock", "disk", "native", "mismatch", "peer")
_PAUSES = ("save", "compute")
_ENDLESS_S = 3600.0
_PATIENCE_S = 180.0


class Result(NamedTuple):
    """What was said about one job."""

    kind: str
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
    options = parser.parse_args()
    chance = random.Random(options.seed)
    kinds = [_HANGS[number % len(_HANGS)] for number in range(options.hangs)]
    kinds += [_PAUSES[number % len(_PAUSES)] for number in range(options.pauses)]
    chance.shuffle(kinds)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(kinds), options.at_once):
            part = list(enumerate(kinds[first : first + options.at_once], first))
            jobs = [_start_job(Path(folder, f"{number}-{kind}"), kind, chance) for number, kind in part]
            try:
                results += _watch_jobs(jobs)
            finally:
                for job in jobs:
                    job.stop()
    _print_table(results)


def _start_job(folder: Path, kind: str, chance: random.Random) -> StandingJob:
    ranks = chance.randint(3 if kind == "mismatch" else 2, 4)
    # Rank 0 serves the store that the others of a rank that is gone wait for.
    odd = chance.randrange(1 if kind == "peer" else 0, ranks)
    pause_s = _ENDLESS_S if kind in _HANGS else chance.uniform(15, 40)
    step = chance.randrange(15, 80)
    return StandingJob(folder, make_environment(), kind, ranks=ranks, odd=odd, step=step, pause_s=pause_s)


def _watch_jobs(jobs: list[StandingJob]) -> list[Result]:
    """Wait until each job has a finding, has ended, or has stood still for long."""
    results: dict[StandingJob, Result] = {}
    end = time.monotonic() + 600
    while len(results) < len(jobs) and time.monotonic() < end:
        for job in jobs:
            if job not in results and (result := _check_job(job)) is not None:
                results[job] = result
                print(
                    f"{job.kind:10} rank {job.odd} step {job.step:3}  {result.seconds or 0:5.1f} s  {result.words}",
                    flush=True,
                )
        time.sleep(0.25)
    return [results.get(job, Result(job.kind, False, False, False, None, "nothing")) for job in jobs]


def _check_job(job: StandingJob) -> Result | None:
    finding, stopped_ns = job.find_named("hung_ranks"), job.stopped_ns
    if finding is None:
        has_ended = job.process.poll() is not None
        is_late = stopped_ns is not None and time.time_ns() - stopped_ns > _PATIENCE_S * 1e9
        return Result(job.kind, False, False, False, None, "nothing") if has_ended or is_late else None
    seconds = (time.time_ns() - stopped_ns) / 1e9 if stopped_ns is not None else None
    line = None if job.kind not in LINES or job.kind == "peer" else finding.fix == f"hanging.py:{LINES[job.kind]}"
    return Result(job.kind, True, finding.ranks == (job.odd,), line, seconds, finding.headline)


def _print_table(results: list[Result]) -> None:
    by_kind = defaultdict(list)
    for result in results:
        by_kind[result.kind].append(result)
    print("\n| kind | jobs | told | rank right | line right | seconds until told, median | most |")
    print("|---|---|---|---|---|---|---|")
    for kind in (*_HANGS, *_PAUSES):
        found = by_kind.get(kind, [])
        lines = [one.is_line_right for one in found if one.is_line_right is not None]
        times = [one.seconds for one in found if one.seconds is not None]
        told, ranks = sum(one.is_told for one in found), sum(one.is_rank_right for one in found)
        shown = [f"{statistics.median(times):.1f}", f"{max(times):.1f}"] if times else ["", ""]
        own = ["", ""] if kind in _PAUSES else [str(ranks), f"{sum(lines)} of {len(lines)}" if lines else ""]
        print(" | ".join(["", kind, str(len(found)), str(told), *own, *shown, ""]).strip())


if __name__ == "__main__":
    main()
