"""Record two actors of Ray that train, on a CPU; each sets its RANK inside itself, as trainers on Ray do.

Usage: stage_ray.py FOLDER PYTHON. PYTHON has Ray and PyTorch, and no zerotop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
STEPS = 60


class Trainer:
    """An actor that is a rank."""

    def train(self, rank: int, port: int) -> int:
        """Train; return the process's id."""
        os.environ.update(
            RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")

        class Slow(torch.nn.Module):  # type: ignore[misc]
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                time.sleep(0.2)
                return inputs

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(Slow(), torch.nn.Linear(16, 16)))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(STEPS):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        distributed.destroy_process_group()
        return os.getpid()


def drive() -> None:
    """Be Ray's driver."""
    import ray  # type: ignore[import-not-found]

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(Trainer).options(num_cpus=1).remote() for _ in range(2)]
    print(ray.get([actor.train.remote(rank, 29877) for rank, actor in enumerate(actors)]), flush=True)
    ray.shutdown()


def record(folder: Path, python: str) -> None:
    """Record the job."""
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / "ray-actors"), "--"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "ray-actors.out").open("wb") as output:
        command += [python, str(HERE), "--drive"]
        code = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    print(f"ray-actors: {code}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--drive":
        drive()
    else:
        record(Path(sys.argv[1]), sys.argv[2])
