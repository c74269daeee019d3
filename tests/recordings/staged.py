"""A DeepSpeed loop in which things go wrong on purpose, for recordings whose labels are known. It knows nothing of zerotop.

Steps are counted from 0; what is to happen happens from that step on, or in it.
"""

import argparse
import os
import random
import signal
import time

import deepspeed
import torch


class Model(torch.nn.Module):
    """Predicts the next token with a small transformer."""

    def __init__(self, options):
        super().__init__()
        self.embedding = torch.nn.Embedding(options.vocabulary, options.width)
        layer = torch.nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, batch_first=True, dropout=0.0)
        self.layers = torch.nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(options.width, options.vocabulary)
        self.computes_more = False

    def forward(self, input_ids):
        if self.computes_more:
            for _ in range(60):
                torch.ones(512, 512) @ torch.ones(512, 512)
        logits = self.head(self.layers(self.embedding(input_ids[:, :-1])))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())


class Tokens(torch.utils.data.IterableDataset):
    """Batches of random tokens, of the length and at the pace that is asked for."""

    def __init__(self, options, rank):
        self.options, self.rank = options, rank

    def __iter__(self):
        options, step = self.options, 0
        while True:
            if options.stall_from is not None and step >= options.stall_from and self.rank in (options.only_rank, -1):
                time.sleep(options.seconds)
            long = options.long_from is not None and step >= options.long_from
            length = options.length * (2 if long else 1)
            for _ in range(options.accumulation):
                uneven = random.uniform(1 - options.uneven, 1 + options.uneven)
                yield torch.randint(options.vocabulary, (options.rows, int(length * uneven)))
            step += 1


class Slow:
    """Takes its time when it is saved, as a slow disk does."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        time.sleep(self.seconds)
        return (float, (self.seconds,))


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--scale-power", type=int, default=8, help="fp16's first loss scale is 2 to this")
    parser.add_argument("--offload", action="store_true", help="the optimizer on the CPU, DeepSpeed's own")
    parser.add_argument("--uneven", type=float, default=0.0, help="by which share lengths differ, at random")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a pause is")
    parser.add_argument("--only-rank", type=int, help="whose data stalls [all ranks']")
    parser.add_argument("--stall-from", type=int, help="data comes late")
    parser.add_argument("--long-from", type=int, help="sequences are twice as long")
    parser.add_argument("--slow-from", type=int, help="something between the phases takes time")
    parser.add_argument("--slow-until", type=int, default=1000000, help="and then no longer")
    parser.add_argument("--slow-rank", type=int, help="only this rank is slow [all]")
    parser.add_argument("--compute-from", type=int, help="the rank that is slow computes more in each forward")
    parser.add_argument("--drift-from", type=int, help="it takes --seconds more in each step than in the one before")
    parser.add_argument("--leak-from", type=int, help="32 MiB are kept in each step")
    parser.add_argument("--grow-from", type=int, help="--grow MiB of host memory are kept in each step")
    parser.add_argument("--grow", type=int, default=16)
    parser.add_argument("--hang-in", type=int, help="a rank does nothing for a while")
    parser.add_argument("--die-in", type=int, help="a rank is killed, in the job's first attempt")
    parser.add_argument("--bad-rank", type=int, default=1, help="which one hangs or is killed")
    parser.add_argument("--save-in", type=int, help="a checkpoint is saved")
    parser.add_argument("--save-seconds", type=float, default=0.0, help="how long that takes more")
    parser.add_argument("--save-to", default="/tmp/staged-checkpoint")
    return parser.parse_args()


def compute_pause(options, rank, step):
    """How long something between the phases takes."""
    if options.slow_rank not in (None, rank):
        return 0.0
    slow = options.slow_from is not None and options.slow_from <= step < options.slow_until
    drifted = 0 if options.drift_from is None else max(0, step - options.drift_from + 1)
    return options.seconds * (slow + drifted)


def main():
    options = parse_options()
    torch.manual_seed(1)
    model = Model(options)
    config = {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_accumulation_steps": options.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": not options.offload}},
        "zero_optimization": {"stage": options.stage},
        "steps_per_print": 1000000,
    }
    if options.dtype != "fp32":
        scale = {"initial_scale_power": options.scale_power} if options.dtype == "fp16" else {}
        config[options.dtype] = {"enabled": True, **scale}
    if options.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    rank = torch.distributed.get_rank()
    stalls = rank if options.only_rank is not None else -1
    batches = iter(torch.utils.data.DataLoader(Tokens(options, stalls), batch_size=None))
    kept, first = [], "STAGED_AGAIN" not in os.environ
    for step in range(options.steps):
        if step == options.compute_from and rank == options.slow_rank:
            model.computes_more = True
        if step == options.die_in and rank == options.bad_rank and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == options.hang_in and rank == options.bad_rank:
            time.sleep(options.seconds)
        time.sleep(compute_pause(options, rank, step))
        for _ in range(options.accumulation):
            engine.backward(engine(next(batches).to(engine.device)))
            engine.step()
        if options.leak_from is not None and step >= options.leak_from:
            kept.append(torch.ones(32 << 20, dtype=torch.uint8, device=engine.device))
        if options.grow_from is not None and step >= options.grow_from:
            kept.append(bytearray(b"1") * (options.grow << 20))
        if step == options.save_in:
            engine.save_checkpoint(options.save_to, client_state={"slow": Slow(options.save_seconds)})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
