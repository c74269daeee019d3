"""The cost of the probe in a training rank, per phase boundary and per micro-step.

    python benchmarks/probe_cost.py [--steps 400] [--accumulation 4] [--width 256]

One process trains a small model with a real engine, in blocks of steps with the probe and without it, turn by
turn, so that both see the same machine. The difference is the cost as the training feels it; the cost as the
probe measures itself is beside it. Differences of a few microseconds drown in the noise of a busy machine:
the spread of the paired differences is printed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerotop_probe.recording import directory

BUDGET_BOUNDARY_US = 20.0
BUDGET_MICRO_STEP_US = 150.0


def main() -> None:
    options = parse_options()
    if "RANK" not in os.environ:
        raise SystemExit(start_rank(options.budget))
    measure_engine(options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps in all [400]")
    parser.add_argument("--block", type=int, default=10, help="steps in a block [10]")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-steps in a step [4]")
    parser.add_argument("--width", type=int, default=256, help="of the model's layers [256]")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO [1]")
    parser.add_argument("--offload", action="store_true", help="the optimizer to the CPU")
    parser.add_argument("--torch-adam", action="store_true", help="an optimizer that needs no compiler")
    parser.add_argument("--cpu-time", action="store_true", help="of the training thread: for a busy machine without a GPU")
    parser.add_argument("--budget", default="100", help="in percent; 100: every step in full detail [100]")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


def start_rank(budget: str) -> int:
    """Run this file again as the only rank of a recorded job, with a budget in percent."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        recording = directory.create_recording(["python", *sys.argv], path=str(Path(folder) / "recording"))
        probe.bind(("127.0.0.1", 0))
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        variables = {"MASTER_PORT": str(probe.getsockname()[1]), directory.BUDGET_VARIABLE: budget}
        probe.close()
        agent = [sys.executable, "-m", "zerotop_probe.outside", "--foreground", recording, "--"]
        return subprocess.run([*agent, sys.executable, *sys.argv], env=os.environ | rank | variables, check=False).returncode


def make_engine(options: argparse.Namespace) -> Any:
    import deepspeed
    import torch

    layers = [torch.nn.Linear(options.width, options.width) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Embedding(1000, options.width), *layers)
    zero: dict[str, Any] = {"stage": options.stage}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": options.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": options.torch_adam}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "steps_per_print": 1000000000,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def wrapped_methods() -> list[tuple[Any, str, Any]]:
    """Return the methods that the probe wraps: (class, name of the method, wrapper)."""
    import deepspeed.runtime.engine as engine_module
    import torch.utils.data.dataloader as data

    classes = (engine_module.DeepSpeedEngine, data._BaseDataLoaderIter)
    found = [(owner, name, value) for owner in classes for name, value in vars(owner).items()]
    return [entry for entry in found if hasattr(entry[2], "__zerotop__")]


def make_switch(engine: Any) -> Callable[[bool], None]:
    """Return a function that takes the probe out of this process and puts it back."""
    methods = wrapped_methods()
    assert methods, "the probe is not installed here"
    timers = getattr(engine.optimizer, "timers", None)

    def turn_probe(on: bool) -> None:
        for owner, name, method in methods:
            setattr(owner, name, method if on else method.__wrapped__)
        if timers is not None:
            engine.optimizer.timers = timers if on else timers._inner

    return turn_probe


def make_batches(options: argparse.Namespace, engine: Any) -> Iterator[Any]:
    import torch

    ids = torch.randint(1000, (64, 32))
    while True:
        for batch in torch.utils.data.DataLoader(ids, batch_size=4):
            yield batch.to(engine.device)


def measure_block(engine: Any, source: Iterator[Any], options: argparse.Namespace) -> float:
    """Return the microseconds per micro-step over one block of steps."""
    clock = time.thread_time_ns if options.cpu_time else time.perf_counter_ns
    begin = clock()
    for _ in range(options.block * options.accumulation):
        loss = engine(next(source)).float().square().mean()
        engine.backward(loss)
        engine.step()
    return (clock() - begin) / 1000 / options.block / options.accumulation


def measure_engine(options: argparse.Namespace) -> None:
    measure_blocks(options, make_engine(options), make_switch)
    import torch

    torch.distributed.destroy_process_group()


def measure_blocks(options: argparse.Namespace, engine: Any, make_switch: Callable[[Any], Callable[[bool], None]]) -> None:
    """Measure and print. ``make_switch(engine)`` returns the function that takes the probe out and puts it back."""
    from zerotop_probe.inside.hooks.hook_installer import PROBE

    source, meter = make_batches(options, engine), PROBE.meter
    for _ in range(10):
        measure_block(engine, source, options)
    turn = pause_budget(PROBE, make_switch(engine))
    without, differences, cost, boundaries = [], [], 0, 0
    for number in range(max(2, options.steps // options.block // 2)):
        times = {}
        # Whichever comes first in a pair comes second in the next.
        for on in (True, False) if number % 2 else (False, True):
            turn(on)
            before = (meter.cost_ns, meter.boundaries)
            times[on] = measure_block(engine, source, options)
            cost += meter.cost_ns - before[0]
            boundaries += meter.boundaries - before[1]
        without.append(times[False])
        differences.append(times[True] - times[False])
    turn(True)
    print_figures(compute_figures(without, differences, cost, boundaries, options), options)


def pause_budget(probe: Any, turn: Callable[[bool], None]) -> Callable[[bool], None]:
    """Return ``turn``, after which steps without the probe are no time that it may spend."""
    paused: list[tuple[int, int]] = []  # time and cost when the probe was taken out

    def turn_and_pause(on: bool) -> None:
        turn(on)
        now, cost = time.monotonic_ns(), probe.meter.total_ns
        if on and paused:
            begin_ns, cost_before = paused.pop()
            shift_clock(probe.recorder, now - begin_ns, cost - cost_before)
        elif not on and not paused:
            paused.append((now, cost))

    return turn_and_pause


def shift_clock(recorder: Any, passed_ns: int, cost_ns: int) -> None:
    """Let a recorder of any version forget a time without the probe, and what its threads have cost meanwhile."""
    budget, counting = getattr(recorder, "budget", getattr(recorder, "_budget", None)), getattr(recorder, "_counting", None)
    if budget is not None:
        budget._last_end_ns += passed_ns
        name = "_last_threads_ns" if hasattr(budget, "_last_threads_ns") else "_last_cost_ns"
        setattr(budget, name, getattr(budget, name) + cost_ns)
        for name in ("_last_full_ns", "_last_longer_ns"):
            if getattr(budget, name, 0):
                setattr(budget, name, getattr(budget, name) + passed_ns)
    if counting is not None:
        counting.begin_ns += passed_ns


def compute_figures(
    without: list[float], differences: list[float], cost: int, boundaries: int, options: argparse.Namespace
) -> dict[str, float]:
    micro_steps = len(without) * options.block * options.accumulation
    quarters = statistics.quantiles(differences, n=4)
    return {
        "micro_step_without_us": statistics.median(without),
        "felt_per_micro_step_us": statistics.median(differences),
        "felt_lower_quartile_us": quarters[0],
        "felt_upper_quartile_us": quarters[2],
        "measured_per_micro_step_us": cost / 1000 / micro_steps,
        "measured_per_boundary_us": cost / 1000 / boundaries,
        "boundaries_per_micro_step": boundaries / micro_steps,
        "pairs": len(without),
    }


def print_figures(found: dict[str, float], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(found))
        return
    base = found["micro_step_without_us"]
    for name, value in found.items():
        print(f"{name:32}{value:12.2f}")
    print(f"{'felt / training':32}{found['felt_per_micro_step_us'] / base:12.2%}")
    print(f"{'measured / training':32}{found['measured_per_micro_step_us'] / base:12.2%}")
    print(f"{'boundary / budget':32}{found['measured_per_boundary_us'] / BUDGET_BOUNDARY_US:12.2f}")
    print(f"{'micro-step / budget':32}{found['measured_per_micro_step_us'] / BUDGET_MICRO_STEP_US:12.2f}")


if __name__ == "__main__":
    main()
