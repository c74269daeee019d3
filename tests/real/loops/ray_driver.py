"""Train on each node of a Ray cluster, one actor on each; it gets its number after PyTorch is imported, as with Ray Train.

Usage: ray_driver.py STEPS
"""

from __future__ import annotations

import os
import sys
import time

import ray  # type: ignore[import-not-found]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]


class Trainer:
    """A rank."""

    def train(self, rank: int, address: str, steps: int) -> str:
        """Train; return the variable that the driver has set."""
        import torch
        from torch import distributed

        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR=address, MASTER_PORT="29877")
        distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(steps):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
        distributed.destroy_process_group()
        return os.environ["OWN"]


ray.init(address="auto", log_to_driver=False, runtime_env={"env_vars": {"OWN": "kept"}})
nodes = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes())
places = [NodeAffinitySchedulingStrategy(node_id=node, soft=False) for _, node in nodes]
actors = [ray.remote(Trainer).options(num_cpus=1, scheduling_strategy=place).remote() for place in places]
print(ray.get([actor.train.remote(rank, nodes[0][0], int(sys.argv[1])) for rank, actor in enumerate(actors)]), flush=True)
ray.shutdown()
