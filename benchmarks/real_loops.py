"""The cost of watching loops of Hugging Face models with steps of about 5, 20, 60 and 300 ms, in paired blocks.

    python benchmarks/real_loops.py [--before FOLDER] [--targets 5 20 60 300] [--pairs 100] [--device cuda] [--sequence 256]

*Felt* is the mean of the paired differences without the fifth at both ends, for blocks are interrupted now and then, and
*+-* its standard error (Yuen's, from the winsorized differences).

Every product runs in a process of its own under its own sampler, in blocks of steps with it and without it, turn by turn: so
both see the same machine. ``--before`` is a folder with another version's ``probe`` (``git archive COMMIT probe | tar x -C
FOLDER``). On a CPU short sequences give steps of the wished length. TraceML (pip install traceml-ai==0.5.0) is left out
where it is not installed. With the defaults an H100 needs about eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
MARK = "REAL LOOP "
# (layers, width) of a GPT-2, steps in a block, and blocks in the place of one pair, by the milliseconds of a step: short
# blocks, because the speed of a machine that others use drifts.
SHAPES = {5: (2, 256, 4, 12), 20: (8, 512, 4, 5), 60: (12, 768, 2, 4), 300: (24, 1024, 1, 1)}
# Of other products, and of every step in full: so many pairs for one of the default.
PEERS_PART = 0.3
# Left out at each end of the differences.
CUT_PART = 0.2


def main() -> None:
    options = parse_options()
    if options.child:
        measure_product(options)
        return
    titles = "a step, us", "pairs", "felt, us", "of it", "+-, us", "median, us", "by itself, us", "in full", "counted"
    print(f"| | {' | '.join(titles)} |\n{'|---' * (len(titles) + 1)}|", flush=True)
    run_product("after", "after", options, HERE.parents[1] / "probe", options.targets)
    options.pairs = max(10, round(PEERS_PART * options.pairs))
    # Every step in full: what a full step costs.
    run_product(
        "after, every step in full", "after", options, HERE.parents[1] / "probe", options.full, PYTHONZEROTOP_BUDGET="100"
    )
    if options.before:
        run_product("before", "before", options, Path(options.before) / "probe", options.peers)
    if importlib.util.find_spec("traceml_ai") is not None:
        run_product("TraceML", "traceml", options, None, options.peers)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="*", default=list(SHAPES), help="milliseconds of a step [5 20 60 300]")
    parser.add_argument("--peers", type=int, nargs="*", default=[5, 20, 60], help="the same for other products [5 20 60]")
    parser.add_argument("--full", type=int, nargs="*", default=[20, 60], help="the same with every step in full [20 60]")
    parser.add_argument("--pairs", type=int, default=100, help="at 300 ms; more at less [100]")
    parser.add_argument("--before", help="folder with the probe of another version")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a row [256]")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_product(
    name: str, child: str, options: argparse.Namespace, probe: Path | None, targets: list[int], **variables: str
) -> None:
    """Run one product in a process of its own, with these environment variables, and print its rows."""
    if not targets:
        return
    given = ["--targets", *map(str, targets), "--pairs", str(options.pairs), "--device", options.device]
    given += ["--sequence", str(options.sequence)]
    script = [str(HERE), "--child", child, *given]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ}
        if probe is None:
            program = shutil.which("traceml") or "traceml"
            command = [program, "run", "--mode", "summary", "--logs-dir", folder, "--nproc-per-node", "1", str(HERE)]
            command += ["--args", *script[1:]]
        else:
            from zerotop_probe.recording import directory

            recording = directory.create_recording(["python", "train.py"], path=os.path.join(folder, "recording"))
            path = [str(probe), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(path), **variables}
            command = [
                sys.executable,
                "-m",
                "zerotop_probe.outside",
                "--foreground",
                recording,
                "--",
                sys.executable,
                *script,
            ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    found = [json.loads(line.split(MARK, 1)[1]) for line in done.stdout.splitlines() if MARK in line]
    for row in found:
        print_row(name, row)
    if len(found) < len(targets):
        print(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}", flush=True)


def print_row(name: str, row: dict[str, float]) -> None:
    felt, base = row["felt_us"], row["step_us"]
    cells = [f"{base:.0f}", f"{row['pairs']}", f"{felt:.0f}", f"{felt / base:.2%}", f"{row['error_us']:.0f}"]
    cells.append(f"{row['median_us']:.0f}")
    cells += (
        [f"{row['measured_us']:.0f}", f"{row['full']:.0%}", f"{row['counted']:.0%}"] if "measured_us" in row else [""] * 3
    )
    print(f"| {' | '.join([name, *cells])} |", flush=True)


class Loop:
    """A training loop of one model, of which a step takes about as long as wished."""

    def __init__(self, target_ms: int, device: str, sequence: int) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        layers, width, _, _ = SHAPES[target_ms]
        torch.manual_seed(0)
        if device == "cpu":
            torch.set_num_threads(1)  # threads that wait for each other would be most of what is measured
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=8192, use_cache=False)
        self.device = device
        self._sequence = sequence
        self.model = GPT2LMHeadModel(config).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self._rows = 1
        self._batches = self._make_batches()
        self._find_batch(target_ms)

    def _make_batches(self) -> Iterator[Any]:
        import torch

        ids = torch.randint(8192, (4096, self._sequence))
        while True:
            yield from torch.utils.data.DataLoader(ids, batch_size=self._rows, drop_last=True)

    def _find_batch(self, target_ms: int) -> None:
        """Enlarge the batch until a step takes about as long as wished."""
        while True:
            self.run_steps(3)
            step_ms = self.run_steps(5) / 1000
            if step_ms > 0.7 * target_ms or self._rows >= 256:
                return
            self._rows *= 2
            self._batches = self._make_batches()

    def run_steps(self, count: int, before: Callable[[], Any] = contextlib.nullcontext) -> float:
        """Make steps, each within ``before()``; return the microseconds of one."""
        import torch

        begin_ns = time.perf_counter_ns()
        for _ in range(count):
            with before():
                ids = next(self._batches).to(self.device)
                with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                    loss = self.model(input_ids=ids, labels=ids).loss
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                loss.item()  # as a script that prints its loss: nothing hides behind the GPU's work
        return (time.perf_counter_ns() - begin_ns) / 1000 / count


def measure_product(options: argparse.Namespace) -> None:
    """Measure every target, in the process of one product."""
    for target in options.targets:
        loop = Loop(target, options.device, options.sequence)
        product = make_product(options.child, loop)
        product.turn_hooks(True)
        loop.run_steps(60 if target < 100 else 25, product.around_step)  # the first steps are recorded in full
        # Collecting the garbage of imported modules takes longer than what is measured, at random times.
        gc.collect()
        gc.freeze()
        product.reset_costs()
        without, differences = [], []
        for number in range(options.pairs * SHAPES[target][3]):
            times = {}
            # Whichever comes first in a pair comes second in the next.
            for is_on in (True, False) if number % 2 else (False, True):
                product.turn_hooks(is_on)
                times[is_on] = loop.run_steps(SHAPES[target][2], product.around_step)
            without.append(times[False])
            differences.append(times[True] - times[False])
        product.turn_hooks(False)
        felt_us, error_us = compute_trimmed_mean(differences)
        row = {
            "step_us": statistics.median(without),
            "felt_us": felt_us,
            "median_us": statistics.median(differences),
            "error_us": error_us,
            "pairs": len(differences),
            **product.read_figures(),
        }
        print(MARK + json.dumps(row), flush=True)


def make_product(child: str, loop: Loop) -> Any:
    if child == "traceml":
        return TraceMl(loop)
    from switched_probe import SwitchedProbe  # TraceML's process must not load the probe

    return SwitchedProbe(loop.model)


def compute_trimmed_mean(values: list[float]) -> tuple[float, float]:
    """Return the mean without the lowest and highest part, and its standard error (Yuen 1974)."""
    ordered, cut = sorted(values), int(CUT_PART * len(values))
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorized) / (1 - 2 * CUT_PART) / len(values) ** 0.5
    return statistics.mean(kept), error


class TraceMl:
    """TraceML in a process that it has started."""

    def __init__(self, loop: Loop) -> None:
        import traceml_ai

        self._trace = lambda: traceml_ai.trace_step(loop.model)
        self._is_on = True

    def turn_hooks(self, is_on: bool) -> None:
        self._is_on = is_on

    def reset_costs(self) -> None:
        """Do nothing: TraceML does not say what it costs."""

    def around_step(self) -> Any:
        return self._trace() if self._is_on else contextlib.nullcontext()

    def read_figures(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    main()
