"""Ranks that become slow where ranks gather parameters: whether that is said, and of which rank and step.

python benchmarks/faults/slow_ranks.py [--jobs 14] [--seed 1]

Two CPU ranks under ``fully_shard``, ``FullyShardedDataParallel`` and ZeRO-3, of random size. Two of seven jobs are clean.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from zerotop.analysis.findings import detect_findings
from zerotop.recording.reader import Recording

_SCRIPT = Path(__file__).with_name("gathering.py")
_ENGINES = ("fsdp2", "zero3", "fsdp1")
_FAULTS = ("forward", "none", "forward", "none", "core", "backward", "forward")


def main() -> None:
    """Print what was planted and what was said, a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    for number in range(options.jobs):
        engine, fault = _ENGINES[number % len(_ENGINES)], _FAULTS[number % len(_FAULTS)]
        facts = {
            "step": chance.randint(22, 40),
            "rank": chance.randint(0, 1),
            "more": chance.choice([3, 4, 6]),
            "width": chance.choice([128, 192, 256]),
            "layers": chance.choice([2, 3, 4]),
            "rows": chance.choice([4, 8]),
            "length": chance.choice([64, 96, 128]),
        }
        with tempfile.TemporaryDirectory() as folder:
            recording = _run_job(engine, fault, facts, 20000 + chance.randint(0, 20000), Path(folder, "recording"))
            found = [one for one in detect_findings(recording, recording.end_ns) if one.name == "slow_cores"]
        said = "; ".join(f"step {one.step}: {one.headline}" for one in found) or "-"
        print(f"{engine:6} {fault:9} step {facts['step']} rank {facts['rank']}  {said}", flush=True)


def _run_job(engine: str, fault: str, facts: dict[str, int], port: int, folder: Path) -> Recording:
    torchrun = ("torch.distributed.run", "--master-port", str(port), "--nproc-per-node", "2")
    deepspeed = ("deepspeed.launcher.runner", "--master_port", str(port), "--num_gpus=2")
    words = [word for name, value in facts.items() for word in (f"--{name}", str(value))]
    job = [sys.executable, "-m", *(deepspeed if engine == "zero3" else torchrun), str(_SCRIPT), engine, fault, *words]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder), "--", *job]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return Recording.open(folder)


if __name__ == "__main__":
    main()
