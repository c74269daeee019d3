"""A training loop with pauses that are no hangs, for hours. It knows nothing of zerotop. Arguments: hours, seed."""

import os
import random
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

hours, seed = float(sys.argv[1]), int(sys.argv[2])


def build_model():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))


def evaluate_model(model, seconds):
    """Evaluate on all ranks, in steps."""
    model.eval()
    with torch.no_grad():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            model(torch.randn(64, 32))
            time.sleep(0.2)
    model.train()


class Slow:
    """An object that takes some seconds to write and to read, as on a slow disk."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        time.sleep(self.seconds / 2)
        return (_restore_slowly, (self.seconds / 2,))


def _restore_slowly(seconds):
    time.sleep(seconds)
    return Slow(seconds)


def save_weights(seconds):
    torch.save({"weights": Slow(2 * seconds)}, "model.pt")


def load_weights(seconds):
    torch.save({"weights": Slow(seconds)}, "state.pt")
    torch.load("state.pt", weights_only=False)


def compute_samples(seconds):
    """Compute for some seconds, as a sampler that sorts the samples of the next epoch."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def upload_checkpoint(seconds):
    """Run another program for some seconds, as one that uploads the checkpoint."""
    code = f"import time\nfor _ in range({int(seconds)}): open('copy.bin', 'ab').write(bytes(10**6)); time.sleep(1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    os.unlink("copy.bin")


def compile_model(_):
    compiled = torch.compile(build_model(), dynamic=False)
    compiled(torch.randn(random.randrange(2, 2000), 32)).sum().backward()
    torch._dynamo.reset()


# By how often each comes.
PAUSES = [
    evaluate_model,
    save_weights,
    save_weights,
    load_weights,
    upload_checkpoint,
    upload_checkpoint,
    compute_samples,
    compile_model,
]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    chance = random.Random(seed)  # the same on all ranks
    model = nn.parallel.DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters())
    end = time.monotonic() + hours * 3600
    is_over = torch.zeros(1)
    while not is_over.item():
        for _ in range(chance.randrange(60, 240)):
            optimizer.zero_grad()
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            time.sleep(0.1)
        pause, seconds, pausing = chance.choice(PAUSES), chance.uniform(5, 60), chance.randrange(dist.get_world_size())
        began = time.monotonic()
        if pause is evaluate_model:
            evaluate_model(model.module, seconds)
        elif rank == pausing:
            pause(min(seconds, 20) if pause is compute_samples else seconds)
        if rank == pausing:
            print(f"PAUSE {pause.__name__} {time.monotonic() - began:.1f} s on rank {rank}", flush=True)
        is_over.fill_(float(time.monotonic() > end))
        dist.all_reduce(is_over)
    dist.destroy_process_group()


main()
