"""Jobs of ``drawn_loop.py`` that are drawn by chance: their sizes, engines and faults, and how they are run and recorded."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import read_rank_steps

SCRIPT = Path(__file__).with_name("drawn_loop.py")
LINES = {
    line.rpartition("# fault: ")[2]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# fault: " in line
}
# True of a busy machine, and of jobs that run side by side.
OF_THE_MACHINE = ("cores_taken", "crowded_cores", "others_on_gpu", "others_arrived", "stuck_at_start", "core_binding")
# Beside the training: the start of Python, CUDA and the ranks, and the end.
_START_S = 90.0
# Width, layers, heads, rows and tokens, from launch-bound to GPU-bound.
_GPU_SIZES = (
    (256, 2, 4, 4, 128),
    (256, 12, 4, 4, 128),
    (512, 4, 8, 4, 256),
    (512, 16, 8, 2, 256),
    (768, 12, 12, 4, 512),
    (1024, 8, 16, 4, 512),
    (1024, 8, 16, 8, 1024),
    (1536, 12, 16, 4, 512),
    (2048, 8, 16, 8, 1024),
    (2048, 16, 16, 8, 2048),
)
_CPU_SIZES = ((32, 1, 2, 2, 16), (64, 2, 4, 2, 32), (64, 3, 4, 4, 64), (128, 2, 4, 4, 64))


@dataclass(frozen=True)
class Draw:
    """One job. ``begin``: the share of its steps before the fault. ``amount``: seconds that a fault takes."""

    engine: str
    ranks: int
    width: int
    layers: int
    heads: int
    rows: int
    length: int
    vocabulary: int
    dtype: str
    optimizer: str
    accumulation: int
    workers: int
    log_every: int
    clip: bool
    checkpointing: bool
    stage: int
    is_busy: bool
    seconds: float
    begin: float = 1.0
    amount: float = 0.0
    objects: int = 0
    fault: str = ""


class Outcome(NamedTuple):
    """A finished job: its draw, what its output says was true, and its recording."""

    name: str
    draw: Draw
    truth: dict[str, Any]  # empty if the job was stopped
    recording: Recording | None
    findings: tuple[Finding, ...]


def draw_job(chance: random.Random, *, engines: Sequence[str], seconds: tuple[float, float], **fixed: Any) -> Draw:
    """Draw everything of a job that ``fixed`` does not say."""
    on_gpu = torch.cuda.is_available()
    width, layers, heads, rows, length = chance.choice(_GPU_SIZES if on_gpu else _CPU_SIZES)
    engine = chance.choice(engines)
    drawn: dict[str, Any] = {
        "engine": engine,
        "ranks": 1 if engine == "plain" else 2,
        "width": width,
        "layers": layers,
        "heads": heads,
        "rows": rows,
        "length": length,
        "vocabulary": chance.choice((4096, 32000)) if on_gpu else 256,
        "dtype": chance.choice(("bf16", "bf16", "fp32")) if on_gpu else "fp32",
        "optimizer": chance.choice(("fused", "foreach")),
        "accumulation": chance.choice((1, 1, 1, 2)),
        "workers": chance.choice((0, 0, 2)),
        "log_every": chance.choice((1, 10, 50)),
        "clip": chance.random() < 0.5,
        "checkpointing": chance.random() < 0.2,
        "stage": chance.choice((1, 2, 3)),
        "is_busy": chance.random() < 0.25,
        "seconds": round(chance.uniform(*seconds), 1),
    }
    return Draw(**{**drawn, **fixed})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both scripts."""
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=["plain", "ddp", "fsdp2", "deepspeed"])
    parser.add_argument("--seconds", nargs=2, type=float, default=(20.0, 40.0), help="the training of a job [20 40]")
    parser.add_argument("--at-once", type=int, default=1, help="jobs on each GPU, or on the CPU [1]")
    parser.add_argument("--until", type=float, default=float("inf"), help="start no job after so many seconds")
    parser.add_argument("--folder", type=Path, help="keep packed recordings, labels and output there")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="only judge the recordings of such a folder")


def run_all(draws: Sequence[tuple[str, Draw]], options: argparse.Namespace) -> Iterator[Outcome]:
    """Run jobs side by side, and yield each when it has ended."""
    if options.judge:
        for path in sorted(options.judge.glob("*.json")):
            label = json.loads(path.read_text())
            yield _read_outcome(path.stem, Draw(**label["draw"]), label["truth"], options.judge)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        gpus = list(range(torch.cuda.device_count())) or [-1]
        places: queue.SimpleQueue[int] = queue.SimpleQueue()
        for gpu in itertools.chain.from_iterable([gpus] * options.at_once):
            places.put(gpu)
        until_s = time.monotonic() + options.until
        with ThreadPoolExecutor(len(gpus) * options.at_once) as pool:
            jobs = [pool.submit(_run_one, name, draw, folder, places, until_s) for name, draw in draws]
            for job in as_completed(jobs):
                if (outcome := job.result()) is not None:
                    yield outcome


def _run_one(name: str, draw: Draw, folder: Path, places: queue.SimpleQueue[int], until_s: float) -> Outcome | None:
    gpu = places.get()
    try:
        if time.monotonic() > until_s:
            return None
        truth = _record_job(name, draw, folder, gpu)
    finally:
        places.put(gpu)
    (folder / f"{name}.json").write_text(json.dumps({"draw": asdict(draw), "truth": truth}) + "\n")
    return _read_outcome(name, draw, truth, folder)


def _record_job(name: str, draw: Draw, folder: Path, gpu: int) -> dict[str, Any]:
    """Run a job under zerotop and pack its recording; return the truth that it printed."""
    environment = dict(os.environ)
    if gpu >= 0:
        count = torch.cuda.device_count()
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str((gpu + one) % count) for one in range(min(draw.ranks, count)))
    with tempfile.TemporaryDirectory() as temporary, _keep_busy(draw):
        recording = Path(temporary, "recording")
        command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(recording), "--"]
        command += _build_command(draw)
        with open(folder / f"{name}.log", "w") as log:
            job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
            try:
                job.wait(_START_S + 2 * draw.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGTERM)
                try:
                    job.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
        packed = [sys.executable, "-m", "zerotop", "pack", str(recording), "-o", str(folder / f"{name}.zerotop")]
        subprocess.run(packed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    truth: dict[str, Any] = {}
    for line in (folder / f"{name}.log").read_text(errors="replace").splitlines():
        for word in ("PLAN ", "TRUTH "):
            if word in line:
                truth |= json.JSONDecoder().raw_decode(line.split(word, 1)[1])[0]
    return truth


def _build_command(draw: Draw) -> list[str]:
    script = [str(SCRIPT), json.dumps(asdict(draw))]
    if draw.engine == "plain":
        return [sys.executable, *script]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--master-port", str(port), "--nproc-per-node", str(draw.ranks)]
    return [sys.executable, *torchrun, *script]


@contextmanager
def _keep_busy(draw: Draw) -> Iterator[None]:
    """Keep half of the cores busy if the draw says so, by turns, as other jobs on a host do."""
    code = "import random, time\nwhile True:\n    end = time.monotonic() + random.uniform(0.2, 3)\n" + (
        "    while time.monotonic() < end: sum(range(1000))\n    time.sleep(random.uniform(0.2, 3))\n"
    )
    count = (os.cpu_count() or 2) // 2 if draw.is_busy else 0
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _read_outcome(name: str, draw: Draw, truth: dict[str, Any], folder: Path) -> Outcome:
    path = folder / f"{name}.zerotop"
    if not path.exists():
        return Outcome(name, draw, truth, None, ())
    recording = Recording.open(path)
    return Outcome(name, draw, truth, recording, detect_findings(recording, recording.end_ns))


def describe_job(outcome: Outcome) -> dict[str, Any]:
    """Return the columns that both scripts print."""
    draw = outcome.draw
    rows = read_rank_steps(outcome.recording) if outcome.recording is not None else []
    return {
        "job": outcome.name,
        "engine": draw.engine,
        "size": f"{draw.width}x{draw.layers}, {draw.rows}x{draw.length}, {draw.dtype}",
        "is_busy": draw.is_busy,
        "recorded_steps": len(rows[0]) if rows else 0,
        **outcome.truth,
    }


def describe_finding(finding: Finding) -> dict[str, Any]:
    """Return the columns of a finding."""
    return {
        "name": finding.name,
        "step": finding.step,
        "severity": finding.severity.value,
        "cost": round(finding.cost, 3),
        "headline": str(finding.headline),
        "details": str(finding.details),
        "advice": str(finding.advice),
    }


def list_warnings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the warnings and errors that are not of the machine."""
    return [one for one in findings if one.severity is not Severity.INFO and one.name not in OF_THE_MACHINE]
