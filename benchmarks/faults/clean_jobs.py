"""Clean jobs that are drawn by chance, and what zerotop warns of: each such warning is to be judged by hand.

    python benchmarks/faults/clean_jobs.py --jobs 60 --seed 1 --at-once 2 --folder clean      # one to four GPUs, or a CPU
    python benchmarks/faults/clean_jobs.py --judge clean

Loops around Llama-like models from launch-bound to GPU-bound, on one or two ranks, plain, DDP, FSDP2 or DeepSpeed, a quarter
of them beside processes that use half of the cores by turns. Prints a line of JSON for each job, then one for all. A job has
90 s to start and twice its time to train.
"""

from __future__ import annotations

import argparse
import json
import random

from drawn_jobs import add_options, describe_finding, describe_job, draw_job, list_warnings, run_all


def main() -> None:
    """Print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    drawn = [draw_job(chance, engines=options.engines, seconds=tuple(options.seconds)) for _ in range(options.jobs)]
    jobs = with_warnings = warnings = 0
    for outcome in run_all([(f"clean-{options.seed}-{at:03}", draw) for at, draw in enumerate(drawn)], options):
        told = list_warnings(outcome.findings)
        jobs, with_warnings, warnings = jobs + 1, with_warnings + bool(told), warnings + len(told)
        notes = [describe_finding(one) for one in outcome.findings if one.name.startswith(("iteration", "pace", "launch"))]
        row = {**describe_job(outcome), "warnings": [describe_finding(one) for one in told], "pace": notes}
        print(json.dumps(row), flush=True)
    print(json.dumps({"jobs": jobs, "with_warnings": with_warnings, "warnings": warnings}), flush=True)


if __name__ == "__main__":
    main()
