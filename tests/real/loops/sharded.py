"""Loops whose parameters PyTorch's FSDP shards, the first and the second version of it. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import argparse
import functools
import json
import os

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

ROWS, LENGTH, WORDS, WIDTH = 4, 6, 32, 8
STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.second(torch.relu(self.first(hidden)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def shard_model(version, model):
    if version == 1:
        wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return wrap(model, auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision)
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # before PyTorch 2.6
        from older_fsdp2 import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy)


def train_model(version, rank):
    torch.manual_seed(1)
    model = Model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sharded = shard_model(version, model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    losses, shapes = [], []
    for _ in range(STEPS):
        for _ in range(2):
            ids = torch.randint(WORDS, (ROWS, LENGTH))
            logits = sharded(ids)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()) / 2
            loss.backward()
            losses.append(loss.item())
            shapes.append(list(ids.shape))
        optimizer.step()
        optimizer.zero_grad()
    counted = {
        "rank": rank,
        "pid": os.getpid(),
        "losses": losses,
        "forwards": shapes,
        "steps": STEPS,
        "parameters": parameters,
        "local_parameters": sum(getattr(p, "_local_tensor", p).numel() for p in sharded.parameters()),
    }
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("version", type=int, choices=(1, 2))
    version = parser.parse_args().version
    torch.distributed.init_process_group("gloo")
    train_model(version, torch.distributed.get_rank())
    torch.distributed.destroy_process_group()


main()
