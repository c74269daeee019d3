"""The cost of sampling a loop's stacks: nothing while all is well, and its part of the budget while a rank is slow.

    python benchmarks/stack_cost.py [--pairs 20] [--seconds 2]

One recorded process runs a loop of PyTorch in blocks with the sampler's thread and without it, turn by turn, so that both
see the same machine. ``calm`` has no gaps, ``share`` spends a third of each step in ``time.sleep``, ``slow`` also pauses in
one step of twenty. The difference is the cost as the training feels it, with its quartiles; beside it the processor time
of the sampler's thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from zerotop_probe.recording import directory

KINDS = ("calm", "share", "slow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks of each kind [20]")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block [2]")
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024], help="of the model's layers [256 1024]")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(start_rank())
    print(f"{'loop':8}{'width':>7}{'a step, ms':>12}{'felt':>10}{'quartiles':>20}{'own thread':>12}")
    for width in options.width:
        for kind in KINDS:
            measure_loop(kind, width, options)


def start_rank() -> int:
    """Run this file again as the only rank of a recorded job."""
    with tempfile.TemporaryDirectory() as folder:
        recording = directory.create_recording(["python", *sys.argv], path=str(Path(folder) / "recording"))
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        agent = [sys.executable, "-m", "zerotop_probe.outside", "--foreground", recording, "--"]
        return subprocess.run([*agent, sys.executable, *sys.argv], env=os.environ | rank, check=False).returncode


def make_step(kind: str, width: int) -> Callable[[], None]:
    """Return a function that trains one step."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows = torch.randn(32, width)
    begin = time.perf_counter()
    steps = 0

    def train_step() -> None:
        nonlocal begin, steps
        steps += 1
        if kind != "calm":
            time.sleep((time.perf_counter() - begin) / 2)
        if kind == "slow" and steps % 20 == 0:
            time.sleep(0.2)
        begin = time.perf_counter()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_step


def measure_loop(kind: str, width: int, options: argparse.Namespace) -> None:
    """Measure one kind of loop and print its line."""
    from zerotop_probe.inside.hooks.hook_installer import PROBE
    from zerotop_probe.inside.stacks.stack_sampler import NAME
    from zerotop_probe.inside.ticker import Ticker

    train = make_step(kind, width)
    for _ in range(50):
        train()
    count = max(1, round(options.seconds / time_steps(train, 50)))
    assert PROBE.recorder is not None
    assert PROBE._stack_sampler is not None, "the sampler does not run here"
    own_ns, run_s, without, differences = 0, 0.0, [], []
    for number in range(options.pairs):
        times = {}
        # Whichever comes first in a pair comes second in the next.
        for on in (True, False) if number % 2 else (False, True):
            if PROBE._stack_ticker is not None:
                PROBE._stack_ticker.stop()
                PROBE._stack_ticker = None
            if on:
                PROBE._stack_ticker = Ticker(PROBE.recorder.stack, NAME, PROBE._stack_sampler.look, PROBE.meter)
                PROBE._stack_ticker.start()
            before_ns = PROBE.meter.thread_ns[NAME]
            times[on] = time_steps(train, count)
            own_ns += PROBE.meter.thread_ns[NAME] - before_ns
            run_s += times[on] * count if on else 0.0
        without.append(times[False])
        differences.append(times[True] / times[False] - 1)
    low, felt, high = statistics.quantiles(differences, n=4)
    step_ms = 1e3 * statistics.median(without)
    print(
        f"{kind:8}{width:7}{step_ms:12.2f}{felt:10.2%}{f'{low:.2%} to {high:.2%}':>20}{own_ns / 1e9 / run_s:12.3%}",
        flush=True,
    )


def time_steps(train: Callable[[], None], count: int) -> float:
    """Return the seconds of a step, as the mean of so many."""
    begin = time.perf_counter()
    for _ in range(count):
        train()
    return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    main()
