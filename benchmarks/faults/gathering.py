"""A loop on CPU ranks that gather parameters in forward and backward, of which one becomes slow. Without zerotop."""

import argparse
import functools
import os
import subprocess
import sys

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WORDS = 512


class Block(nn.Module):
    """A part whose parameters are gathered together."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.more = 0

    def forward(self, hidden):
        with torch.no_grad():
            rows = hidden.detach().flatten(0, 1)
            for _ in range(4 * self.more):
                rows @ torch.ones(rows.shape[-1], rows.shape[-1])
        return hidden + self.second(torch.relu(self.first(hidden)))


class Model(nn.Module):
    """A model of a few blocks that returns its loss."""

    def __init__(self, width, layers):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.slow_backward = False

    def forward(self, input_ids):
        hidden = self.words(input_ids)
        if self.slow_backward:
            hidden.register_hook(compute_more)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), input_ids.flatten())


def compute_more(_gradient):
    """Multiply matrices that nobody needs."""
    for _ in range(40):
        torch.ones(512, 512) @ torch.ones(512, 512)


def take_core(core):
    """Start two processes that compute on a core."""
    code = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    return [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(2)]


def shard_model(options, model):
    """Return what is called for the loss, and what makes the update."""
    if options.engine == "zero3":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": options.rows,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "steps_per_print": 1000000,
        }
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

        def update_engine(loss):
            engine.backward(loss)
            engine.step()

        return engine, update_engine
    if options.engine == "fsdp1":
        wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
        sharded = wrap(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    else:
        for block in model.blocks:
            fully_shard(block)
        sharded = fully_shard(model)
    optimizer = torch.optim.AdamW(sharded.parameters(), 1e-4)

    def update_weights(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return sharded, update_weights


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("fsdp1", "fsdp2", "zero3"))
    parser.add_argument("fault", choices=("none", "forward", "backward", "core"))
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=30)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--more", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=96)
    return parser.parse_args()


def main():
    options = parse_options()
    torch.set_num_threads(1)
    rank, others = int(os.environ["RANK"]), []
    if options.fault == "core":
        os.sched_setaffinity(0, [rank])
    if options.engine == "zero3":
        import deepspeed

        deepspeed.init_distributed()
    else:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = Model(options.width, options.layers)
    compute_loss, update = shard_model(options, model)
    for step in range(90):
        if step == options.step and rank == options.rank:
            model.slow_backward = options.fault == "backward"
            others = take_core(rank) if options.fault == "core" else []
            for block in model.blocks if options.fault == "forward" else ():
                block.more = options.more
        update(compute_loss(torch.randint(WORDS, (options.rows, options.length))))
    for other in others:
        other.kill()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
