"""The cost of watching a training loop: zerotop's probe beside TraceML, each in paired blocks of one run of the same loop.

    python benchmarks/overhead.py [--width 256 ...] [--accumulation 1] [--stage 2]

Each product runs in a process of its own, in blocks of steps with it and without it, turn by turn. TraceML (pip install
traceml-ai==0.5.0) is left out where it is not installed. Of zerotop both the cost that the training felt and the cost that
the probe measures of itself are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import probe_cost

MARK = "OVERHEAD "
BUDGET_US, BUDGET_SHARE = 150.0, 0.003


def main() -> None:
    options = parse_options()
    if "TRACEML_SESSION_ID" in os.environ or options.peer:
        measure_peer(options)
        return
    print(f"{'us a micro-step':24}{'width':>8}{'without':>12}{'felt':>10}{'quartiles':>18}{'share':>9}")
    for width in options.width:
        ours = measure_zerotop(options, width)
        print_row("zerotop", width, ours)
        print(f"{'  measured by itself':24}{width:8}{'':12}{ours['measured_per_micro_step_us']:10.0f}")
        if importlib.util.find_spec("traceml_ai") is not None:
            print_row("traceml-ai", width, run_peer(options, width))
    print(f"budget: {BUDGET_US:.0f} us a micro-step where it takes 2 to 5 ms, {BUDGET_SHARE:.1%} where a step takes 100 ms")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--width", type=int, nargs="+", default=[256])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def build_arguments(options: argparse.Namespace, width: int) -> list[str]:
    names = ("steps", "block", "accumulation", "stage")
    given = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    return [*given, "--width", str(width)]


def measure_zerotop(options: argparse.Namespace, width: int) -> dict[str, float]:
    script = str(Path(__file__).with_name("probe_cost.py"))
    return last_json([sys.executable, script, "--json", "--torch-adam", *build_arguments(options, width)], "{")


def run_peer(options: argparse.Namespace, width: int) -> dict[str, float]:
    program = shutil.which("traceml") or "traceml"
    with tempfile.TemporaryDirectory() as logs:
        command = [program, "run", "--mode", "summary", "--logs-dir", logs, "--nproc-per-node", "1", __file__]
        return last_json([*command, "--args", "--peer", *build_arguments(options, width)], MARK)


def last_json(command: list[str], begins: str) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"\{.*\}", line) and begins in line]
    if not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    match = re.search(r"\{.*\}", lines[-1])
    assert match is not None
    return dict(json.loads(match[0]))


def measure_peer(options: argparse.Namespace) -> None:
    """Measure in a process that TraceML has started."""
    import traceml_ai as traceml

    options.width, options.torch_adam, options.offload = options.width[0], True, False
    engine = probe_cost.make_engine(options)
    source = probe_cost.make_batches(options, engine)
    for _ in range(3):
        measure_block(engine, source, options, traced=traceml.trace_step)
    without, differences = [], []
    for number in range(max(2, options.steps // options.block // 2)):
        times = {}
        for on in (True, False) if number % 2 else (False, True):
            times[on] = measure_block(engine, source, options, traced=traceml.trace_step if on else None)
        without.append(times[False])
        differences.append(times[True] - times[False])
    quarters = statistics.quantiles(differences, n=4)
    found = {
        "micro_step_without_us": statistics.median(without),
        "felt_per_micro_step_us": statistics.median(differences),
        "felt_lower_quartile_us": quarters[0],
        "felt_upper_quartile_us": quarters[2],
    }
    print(MARK + json.dumps(found), flush=True)
    import torch

    torch.distributed.destroy_process_group()


def measure_block(engine: Any, source: Any, options: argparse.Namespace, *, traced: Any) -> float:
    """Return the microseconds per micro-step over one block of steps."""
    begin = time.perf_counter_ns()
    for _ in range(options.block):
        with traced(engine) if traced is not None else contextlib.nullcontext():
            for _ in range(options.accumulation):
                loss = engine(next(source)).float().square().mean()
                engine.backward(loss)
                engine.step()
    return (time.perf_counter_ns() - begin) / 1000 / options.block / options.accumulation


def print_row(name: str, width: int, found: dict[str, float]) -> None:
    base, felt = found["micro_step_without_us"], found["felt_per_micro_step_us"]
    quartiles = f"{found['felt_lower_quartile_us']:.0f} to {found['felt_upper_quartile_us']:.0f}"
    print(f"{name:24}{width:8}{base:12.0f}{felt:10.0f}{quartiles:>18}{felt / base:9.2%}", flush=True)


if __name__ == "__main__":
    main()
