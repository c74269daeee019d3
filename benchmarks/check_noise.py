"""The share of pairs of equal runs that ``zerotop check`` calls slower, and that of runs slower by 3 % which it finds.

    python benchmarks/check_noise.py [--runs 100] [--slow 20] [--computes] [--into FOLDER]

Real jobs, one after the other, on the machine as it is: of a job that sleeps in its forward, as one that waits for its GPU,
or with ``--computes`` of one that computes. Every pair of equal runs is compared both ways, every slow run with each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zerotop.analysis.checks.budget import Budget
from zerotop.analysis.checks.pace import MeasuredPace, compare_paces, measure_pace
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording

STEPS = 120
SLOWER = 1.03
# Seconds of sleep, or matrix products, of one forward.
WORK_SLEEPS, WORK_COMPUTES = 0.04, 200
JOB = """
import sys, time, torch
torch.set_num_threads(1)
work, computes = float(sys.argv[1]), sys.argv[2] == "computes"
left, right, product = torch.randn(128, 256), torch.randn(256, 256), torch.empty(128, 256)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, batch):
        if computes:
            with torch.no_grad():
                for _ in range(int(work)):
                    torch.mm(left, right, out=product)
        else:
            time.sleep(work)
        return self.layer(batch)

model, batch = Model(), torch.randn(4, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[3])):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def main() -> None:
    """Run the jobs, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--slow", type=int, default=20)
    parser.add_argument("--computes", action="store_true")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        into = options.into or Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        work = WORK_COMPUTES if options.computes else WORK_SLEEPS
        count = options.runs + options.slow
        # Slow runs are spread over the others: what the machine does meanwhile is then the same for both.
        is_slow = [(number + 1) * options.slow // count > number * options.slow // count for number in range(count)]
        paces = [
            _measure_job(into / f"{number:03}", work * (SLOWER if slow else 1), options.computes)
            for number, slow in enumerate(is_slow)
        ]
        same, slow = (
            [pace for pace, flag in zip(paces, is_slow, strict=True) if flag is wanted] for wanted in (False, True)
        )
    _print_outcome(same, slow)


def _measure_job(path: Path, work: float, computes: bool) -> MeasuredPace:
    if not path.exists():
        job = [sys.executable, "-c", JOB, str(work), "computes" if computes else "sleeps", str(STEPS)]
        command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(path), "--", *job]
        subprocess.run(command, check=True, capture_output=True)
    pace = measure_pace(RecordingSource(Recording.open(path)), Budget().warmup_steps)
    assert pace is not None
    return pace


def _is_slower(pace: MeasuredPace, baseline: MeasuredPace) -> bool:
    slower, explained = compare_paces(pace, baseline)
    return slower > max(explained, Budget().slowdown_percent / 100)


def _print_outcome(same: Sequence[MeasuredPace], slow: Sequence[MeasuredPace]) -> None:
    pairs = [(one, other) for one in same for other in same if one is not other]
    false_alarms = sum(_is_slower(one, other) for one, other in pairs)
    found = sum(_is_slower(one, other) for one in slow for other in same)
    print(f"{len(same)} equal runs: {false_alarms} false alarms in {len(pairs)} comparisons")
    print(f"{len(slow)} runs slower by 3 %: found in {found} of {len(slow) * len(same)} comparisons")


if __name__ == "__main__":
    main()
