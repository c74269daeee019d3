"""Record two ranks on a CPU whose GPUs fail in NVML's answers, which are played back.

Usage: stage_faults.py FOLDER [NAME...]. The ranks are real, and so is everything that records them; the library is that of
tests/support/played_nvml.py. NVML lists rank 0 on GPU 0 and rank 1 on GPU 1. In step 30 rank 1 lets the fault happen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
# What NVML answers from step 30 on; "end" lets rank 1 raise an error 0.4 s later, "wait" lets it hang.
FAULTS = {
    "hardware-bus": ("event 1 8 79", "1.lost 1", "end"),
    "hardware-event": ("operational 1 GPU-RAS 23 2 40 1 7 0", "operational 0 GPU-RAS 24 2 20 0 8 0", "end"),
    "hardware-address": ("event 1 8 31", "event 1 8 43", "end"),
    "hardware-nvlink-hang": ("event 1 8 74", "1.link.7 0", "wait"),
    "hardware-memory": ("1.field.3 900", "1.field.4 1", "1.field.143 1", "1.field.144 1"),
    "hardware-pcie": ("0.pcie_width 4", "0.field.94 4000"),
    "hardware-driver": ("hang nvmlDeviceGetMemoryInfo 1",),
    "hardware-clean": (),
}


def train(folder: Path, ending: str) -> None:
    """One rank: 90 steps, most of whose time is a pause in the forward, so that a busy machine changes little."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))

    class Slow(torch.nn.Module):  # type: ignore[misc]
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.08)
            return inputs

    model = torch.nn.Sequential(Slow(), torch.nn.Linear(16, 16))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    for step in range(90):
        parallel(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and step == 30:
            (folder / "now").touch()
            if ending == "end":
                time.sleep(0.4)
                raise RuntimeError("CUDA error: unspecified launch failure")
            time.sleep(30 if ending == "wait" else 0)
    distributed.destroy_process_group()


def record(name: str, folder: Path) -> None:
    """Record one job and its fault."""
    from played_nvml import PlayedNvml

    *lines, ending = FAULTS[name] if FAULTS[name] and FAULTS[name][-1] in ("end", "wait") else (*FAULTS[name], "")
    work = folder / f"{name}.files"
    work.mkdir()
    nvml = PlayedNvml(work, gpus=2)
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29871"]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / name), "--"]
    command += ["env", "-u", "LD_LIBRARY_PATH", *job, str(HERE), "--train", str(work), ending]
    with (folder / f"{name}.out").open("wb") as output:
        environment = nvml.environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            for rank in (0, 1):
                if (file := work / f"pid{rank}").exists() and (pid := file.read_text()):
                    nvml.add(f"pid {rank} {pid}")
                    file.rename(work / f"seen{rank}")
            if (work / "now").exists():
                nvml.add(*lines)
                (work / "now").rename(work / "done")
            time.sleep(0.02)
    print(f"{name}: {process.returncode}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.path.insert(0, str(HERE.parents[1] / "support"))
        for each in sys.argv[2:] or FAULTS:
            record(each, Path(sys.argv[1]))
