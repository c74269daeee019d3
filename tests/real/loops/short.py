"""A loop of steps of about 10 ms, with what is asked for in one of them.

Each rank writes the moments before and after each update to ``moments-rank<r>.json`` where it runs: as a line of output, the
kernel might mix that of one rank with another's.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed
from gloo_threads import finish_gloo_threads

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--slow", type=int, default=-1)
parser.add_argument("--evaluate", type=int, default=-1)
parser.add_argument("--save", type=int, default=-1)
parser.add_argument("--overflow", type=int, nargs="*", help="steps that a loss scaler skips; each has two micro-steps")
parser.add_argument("--late-from", type=int, default=10**9)
parser.add_argument(
    "--late-no-sync", action="store_true", help="a micro-step more, with no_sync() around its backward alone"
)


def main():
    options = parser.parse_args()
    rank, is_distributed = int(os.environ.get("RANK", "0")), "WORLD_SIZE" in os.environ
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    if is_distributed:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if options.overflow else None
    moments = []
    for step in range(options.steps):
        if scaler is not None:
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        if options.late_no_sync:
            loss = model(torch.randn(4, 8)).square().mean()
            with model.no_sync():
                loss.backward()
        loss = model(torch.randn(4, 8)).square().mean()
        time.sleep(0.01)
        if step == options.slow:
            time.sleep(0.5)
        if rank == 1 and step >= options.late_from:
            time.sleep(0.03)
        if scaler is not None:
            loss = scaler.scale(loss) * (float("inf") if step in options.overflow else 1.0)
        loss.backward()
        before_ns = time.monotonic_ns()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        moments.append((before_ns, time.monotonic_ns()))
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        if step == options.evaluate:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(6, 8))
                    time.sleep(0.02)
            model.train()
        if step == options.save:
            torch.save({"model": model.state_dict(), "slow": Slow()}, "checkpoint.pt")
    with open(f"moments-rank{rank}.json", "w") as file:
        json.dump(moments, file)
    if is_distributed:
        finish_gloo_threads()
        torch.distributed.destroy_process_group()


class Slow:
    """Takes its time when it is saved, as a slow disk does."""

    def __reduce__(self):
        time.sleep(1.2)
        return float, (0.0,)


main()
