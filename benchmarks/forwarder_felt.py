"""What a training job feels of the process that sends its recording to another node, beside what it feels of the recording.

One real PyTorch job on the CPU is recorded by ``zerotop run``, sent by ``zerotop forward`` through a real nats-server, and
collected. In turns of a few seconds, in random order, all of it runs, or the recording alone (the forwarder is stopped by a
signal), or neither. Each process makes up for what it missed in its next turn. Steps of the same job are compared, turn by
turn. Server and collector run here, too, where in reality another node has them: what is printed is at least what is felt.

    python benchmarks/forwarder_felt.py [--rounds 40] [--turn 3] [--threads 1] [--width 512]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from nats_servers import TOKEN, NatsServer
from programs import ZEROTOP, make_environment
from zerotop_probe.outside.job import job_control

BUDGET = 0.003
_NAME = "felt"
_WARM_S = 15.0
_SETTLE_S = 0.4  # of each turn, which is left out
_END_S = 60.0

# Trains until the file is there that its first argument names; then writes there when each step ended, and its
# processor time.
JOB = """
import json, os, sys, time
import torch
target, threads, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
torch.manual_seed(0)
layers = [part for _ in range(4) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(128, width)
steps = []
while not os.path.exists(target):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    steps.append((time.monotonic_ns(), time.process_time_ns()))
with open(target, "w") as file:
    json.dump(steps, file)
"""


class Turn(NamedTuple):
    who: str
    begin_ns: int
    end_ns: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turn", type=float, default=3.0, help="seconds; a node that is silent for 6 counts as lost")
    parser.add_argument("--threads", type=int, default=1, help="of the job")
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        steps, turns, cpu = run_job(folder, options, running)
    print_result(options, steps, turns)
    for who, share in cpu.items():
        print(f"{who} itself: {share:.2%} of a core")


def run_job(
    folder: Path, options: argparse.Namespace, running: contextlib.ExitStack
) -> tuple[np.ndarray, list[Turn], dict[str, float]]:
    """Return when each step ended and the job's processor time then; the turns; and what the others used."""
    script, recording, target = folder / "train.py", folder / "recording", folder / "steps.json"
    script.write_text(JOB)
    server = running.enter_context(NatsServer(folder))
    environment = make_environment(folder, ZEROTOP_TOKEN=TOKEN)

    def start(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*ZEROTOP, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running.callback(_end, process)
        return process

    training = [sys.executable, str(script), str(target), str(options.threads), str(options.width)]
    start("collect", server.url, "--job", _NAME, "--headless", "--recording", str(folder / "collected"))
    run = start("run", "--headless", "--recording", str(recording), "--", *training)
    while not (facts := job_control.read_facts(str(recording))).ranks or not facts.samplers:
        assert run.poll() is None, "the job has ended"
        time.sleep(0.2)
    forwarder = start("forward", str(recording), "--collector", server.url, "--job", _NAME)
    while not any((folder / "collected").glob("*-rank0-*.rec")):
        assert forwarder.poll() is None, "the forwarder has ended"
        time.sleep(0.2)
    time.sleep(_WARM_S)
    samplers = [handle.pid for handle in facts.samplers]
    stopped = {"all": [], "recording": [forwarder.pid], "nothing": [forwarder.pid, *samplers]}
    turns: list[Turn] = []
    used = {"forwarder": _read_cpu_ns([forwarder.pid]), "sampler": _read_cpu_ns(samplers)}
    began_ns = time.monotonic_ns()
    try:
        for number in range(options.rounds):
            for who in random.Random(number).sample(list(stopped), len(stopped)):
                for pid in (forwarder.pid, *samplers):
                    os.kill(pid, signal.SIGSTOP if pid in stopped[who] else signal.SIGCONT)
                begin_ns = time.monotonic_ns()
                time.sleep(options.turn)
                turns.append(Turn(who, begin_ns + int(_SETTLE_S * 1e9), time.monotonic_ns()))
    finally:
        for pid in (forwarder.pid, *samplers):
            os.kill(pid, signal.SIGCONT)
    wall_ns = time.monotonic_ns() - began_ns
    now = {"forwarder": _read_cpu_ns([forwarder.pid]), "sampler": _read_cpu_ns(samplers)}
    target.touch()
    run.wait(_END_S)
    return np.array(json.loads(target.read_text())), turns, {who: (now[who] - used[who]) / wall_ns for who in used}


def _read_cpu_ns(pids: list[int]) -> int:
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids)  # the kernel's id of a process's processor clock


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def print_result(options: argparse.Namespace, steps: np.ndarray, turns: list[Turn]) -> None:
    """Print what each of the two adds to a step, and to its processor time."""
    ends, times, cpu = steps[1:, 0], np.diff(steps[:, 0]) / 1e6, np.diff(steps[:, 1]) / 1e6
    found: dict[str, list[tuple[float, float]]] = {"all": [], "recording": [], "nothing": []}
    pooled: dict[str, list[np.ndarray]] = {who: [] for who in found}
    for turn in turns:
        mask = (ends - times * 1e6 >= turn.begin_ns) & (ends <= turn.end_ns)
        found[turn.who].append((float(np.median(times[mask])), float(np.mean(cpu[mask]))))
        pooled[turn.who].append(np.stack((times[mask], cpu[mask])))
    median = {who: np.median(np.concatenate(parts, axis=1), axis=1) for who, parts in pooled.items()}
    print(
        f"{len(found['all'])} rounds of three turns of {options.turn:.0f} s, {options.threads} threads,"
        f" load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; a step alone takes {median['nothing'][0]:.2f} ms,"
        f" {median['nothing'][1]:.2f} ms of the processor"
    )
    for title, one, other in (
        ("the forwarder, beside the recording", "all", "recording"),
        ("the recording alone", "recording", "nothing"),
        ("both", "all", "nothing"),
    ):
        for place, what in enumerate(("step time", "processor time")):
            ratios = np.array([a[place] / b[place] for a, b in zip(found[one], found[other], strict=True)]) - 1
            print(
                f"{title}, {what}: {median[one][place] / median[other][place] - 1:+.2%} by the medians of all steps;"
                f" {np.median(ratios):+.2%} by rounds (95 %: {_format_range(*_bootstrap(ratios))};"
                f" quartiles {_format_range(*np.percentile(ratios, (25, 75)))})"
            )
    print(f"asked: at most {BUDGET:.1%}")


def _format_range(low: float, high: float) -> str:
    return f"{low:+.2%} to {high:+.2%}"


def _bootstrap(values: np.ndarray) -> np.ndarray:
    """Return where the median lies, with 95 %."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    return np.percentile(np.median(drawn, axis=1), (2.5, 97.5))


if __name__ == "__main__":
    main()
