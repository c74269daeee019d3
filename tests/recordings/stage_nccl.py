"""Record two ranks on a CPU whose collectives NCCL's Inspector would measure; its files are written by the ranks.

Usage: stage_nccl.py FOLDER [NAME...]. The ranks and what reads the files are real. A rank writes for each of its collectives
what the Inspector does (format v4.3): how long Gloo took, in which a rank also waits for the others. ``nccl-late``: rank 1
comes 0.3 s late to each step from 40 on. ``nccl-clean``: nobody does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
LATE_S = {"nccl-late": 0.3, "nccl-clean": 0.0}
STEPS, LATE_FROM = 130, 40


def train(late_s: float) -> None:
    """One rank, most of whose time is a pause in the forward, so that a busy machine changes little."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    folder = Path(os.environ["NCCL_INSPECTOR_DUMP_DIR"])
    header = {"id": "0x7f8c496ae9f661", "comm_name": "unknown", "rank": rank, "n_ranks": ranks, "nnodes": 1}

    class Slow(torch.nn.Module):  # type: ignore[misc]
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.25)
            return inputs

    model = torch.nn.Sequential(Slow(), torch.nn.Linear(1024, 1024))
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    with (folder / f"{socket.gethostname()}-pid{os.getpid()}.log").open("w") as file:
        numbers = iter(range(1_000_000))

        def reduce_and_tell(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            """Reduce gradients, and write what the Inspector would."""
            gradients = bucket.buffer()
            began_s = time.perf_counter()
            distributed.all_reduce(gradients)
            seconds, size = time.perf_counter() - began_s, 4 * gradients.numel()
            speed = size / 1e9 / seconds
            call = {"coll": "AllReduce", "coll_sn": next(numbers), "coll_msg_size_bytes": size}
            call |= {"coll_exec_time_us": int(1e6 * seconds), "coll_algobw_gbs": speed, "coll_busbw_gbs": speed}
            mark = {"header": header, "metadata": {"pid": os.getpid()}, "dump_stats": {"coll_records": 1}}
            file.writelines(json.dumps(line) + "\n" for line in (mark, {"coll_perf": call}))
            file.flush()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(gradients.div_(ranks))
            return future

        reduce_and_tell.__annotations__.clear()  # which PyTorch compares with types, and here are texts
        parallel.register_comm_hook(None, reduce_and_tell)
        for step in range(STEPS):
            if rank == 1 and step >= LATE_FROM:
                time.sleep(late_s)
            parallel(torch.randn(4, 1024)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    distributed.destroy_process_group()


def record(name: str, folder: Path) -> None:
    """Record one job."""
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29873"]
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / name)]
    plugin = folder / "libnccl-profiler-inspector.so"
    plugin.touch()  # Gloo loads none
    command += ["--nccl-inspector", str(plugin), "--"]
    command += [*job, str(HERE), "--train", str(LATE_S[name])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"{name}.out").open("wb") as output:
        code = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    print(f"{name}: {code}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(float(sys.argv[2]))
    else:
        for each in sys.argv[2:] or LATE_S:
            record(each, Path(sys.argv[1]))
