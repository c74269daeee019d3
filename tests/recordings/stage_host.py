"""Record two ranks on a CPU in a control group with a memory limit, as root.

Usage: stage_host.py FOLDER [NAME...]. ``host-killed``: rank 1 keeps a tensor of each step, until the kernel kills it.
``host-cache``: it writes files, whose pages fill the group, and each 150 steps a checkpoint that is copied in memory first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
LIMITS = {"host-killed": 1800 << 20, "host-cache": 2200 << 20}
STEPS = {"host-killed": 2000, "host-cache": 700}
MIB = 1 << 20


def train(name: str, folder: Path) -> None:
    """One rank: steps of about 0.1 s."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    class Slow(torch.nn.Module):  # type: ignore[misc]
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.08)
            return inputs

    model = torch.nn.Sequential(Slow(), torch.nn.Linear(16, 16))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    kept = []
    for step in range(STEPS[name]):
        parallel(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if name == "host-killed" and rank == 1 and step >= 100:
            kept.append(torch.ones(MIB // 4))
        if name == "host-cache" and rank == 1:
            (folder / f"{step}.bin").write_bytes(b"x" * (4 * MIB))
            if step % 150 == 149:
                parts = []
                for _ in range(60):
                    parts.append(torch.ones(MIB))
                    time.sleep(0.05)
                torch.save(parts, folder / "checkpoint.pt")
    distributed.destroy_process_group()


def record(name: str, folder: Path) -> None:
    """Record one job in a group of its own."""
    from machine import run_in_cgroup, small_group

    work = folder / f"{name}.files"
    work.mkdir()
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29873"]
    with small_group(LIMITS[name]) as group, (folder / f"{name}.out").open("wb") as output:
        command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / name), "--"]
        command += run_in_cgroup(group, *job, str(HERE), "--train", name, str(work))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False)
    print(f"{name}: {done.returncode}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.path.insert(0, str(HERE.parents[1] / "support"))
        for each in sys.argv[2:] or LIMITS:
            record(each, Path(sys.argv[1]))
