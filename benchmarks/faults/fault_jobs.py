"""Run jobs with a fault, recorded by zerotop: several at a time, of which one trains on a GPU.

Most of a short job is the start of Python and of CUDA. A job therefore says when it is ready to train, and waits until it is
told that its GPUs are free; meanwhile others start. On a CPU one job trains at a time in the same way.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from fault_plans import KINDS, Plan, count_gpus, write_plan

# A job may take so long until it is ready, and from its turn on.
_PATIENCE_S = 120.0

# They begin with the fault.
_HOG = "input()\nwhile True: pass"
_NEIGHBOUR = """
import torch
one = torch.ones(4096, 4096, device="cuda")
keep = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
one @ one
torch.cuda.synchronize()
input()
while True:
    for _ in range(50): one @ one
    torch.cuda.synchronize()
"""


class _Turns:
    """A queue of jobs for each GPU, in the order of their requests."""

    def __init__(self) -> None:
        self._order = threading.Lock()
        self._devices: dict[int, threading.Lock] = {}

    @contextmanager
    def take(self, gpus: Sequence[int]) -> Iterator[None]:
        """Wait until all of them are free, and keep them. Without any: the machine's cores."""
        with ExitStack() as stack:
            with self._order:
                for gpu in gpus or (-1,):
                    stack.enter_context(self._devices.setdefault(gpu, threading.Lock()))
            yield


def run_jobs(
    plans: Sequence[tuple[str, Plan]], folder: Path, *, at_once: int, until_s: float, most_load: float
) -> Iterator[tuple[str, Plan]]:
    """Run jobs and write their recordings, packed, and their plans to ``folder``; yields them as they end.

    ``at_once``: jobs that start beside each other. ``until_s``: no job starts after this time (monotonic clock).
    ``most_load``: jobs wait until the machine's load is below it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    turns = _Turns()

    def run_one(job: tuple[str, Plan]) -> tuple[str, Plan] | None:
        while os.getloadavg()[0] > most_load:
            time.sleep(1)
        if time.monotonic() > until_s:
            return None
        return job if _run_job(job[1], folder / job[0], turns) else None

    with ThreadPoolExecutor(at_once) as pool:
        yield from filter(None, pool.map(run_one, plans))


def _run_job(plan: Plan, path: Path, turns: _Turns) -> bool:
    """Run a job and pack its recording; returns whether there is one."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder, "recording")
        with open(path.with_suffix(".log"), "w") as log:
            _record_job(plan, recording, turns, log)
        packed = [sys.executable, "-m", "zerotop", "pack", str(recording), "-o", str(path.with_suffix(".zerotop"))]
        if subprocess.run(packed, stdout=subprocess.DEVNULL).returncode != 0:
            return False
    write_plan(path.with_suffix(".json"), plan)
    return True


def _record_job(plan: Plan, recording: Path, turns: _Turns, log: TextIO) -> None:
    turn, began = recording.with_name("turn"), time.monotonic()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(recording), "--"]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, plan.gpus))} if plan.gpus else {})}
    # DeepSpeed's launcher chooses the GPUs itself.
    own = os.environ if plan.engine == "deepspeed" else environment
    with (
        ExitStack() as turn_taken,
        _run_beside(plan, environment) as begin,
        subprocess.Popen(
            [*command, *plan.build_command(port), "--turn", str(turn)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=own,
        ) as job,
    ):
        assert job.stdout is not None
        limit = threading.Timer(_PATIENCE_S, job.terminate)
        limit.start()
        waiting = training = plan.ranks
        beside = KINDS[plan.fault].beside if plan.fault in KINDS else ""
        for line in job.stdout:
            log.write(line)
            log.flush()
            # Ranks may write into each other's lines.
            if waiting > 0 and (waiting := waiting - line.count("READY")) <= 0:
                limit.cancel()
                # What takes the cores disturbs the jobs on all GPUs.
                turn_taken.enter_context(turns.take(range(count_gpus()) if beside == "hogs" else plan.gpus))
                log.write(f"{time.monotonic() - began:.1f} s until its turn\n")
                limit = threading.Timer(_PATIENCE_S, job.terminate)
                limit.start()
                turn.touch()
            elif "FAULT" in line:
                begin()
            elif "DONE" in line and (training := training - line.count("DONE")) <= 0 and not beside:
                turn_taken.close()  # the end of Python, and of the recording, need no GPU
        limit.cancel()
        log.write(f"{time.monotonic() - began:.1f} s in all\n")


@contextmanager
def _run_beside(plan: Plan, environment: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Start another program, on the GPU or on each core; gives a function that lets it begin."""
    beside = KINDS[plan.fault].beside if plan.fault in KINDS else ""
    count = {"": 0, "neighbour": 1, "hogs": os.cpu_count() or 1}[beside]
    code = _NEIGHBOUR if beside == "neighbour" else _HOG
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment) for _ in range(count)]

    def begin() -> None:
        for child in children:
            if child.stdin is not None and child.poll() is None:
                child.stdin.write(b"\n")
                child.stdin.flush()

    try:
        yield begin
    finally:
        for child in children:
            child.kill()
            child.wait()
