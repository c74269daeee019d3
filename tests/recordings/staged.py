"""A DeepSpeed loop in which things go wrong on purpose, for recordings whose labels are known. It knows nothing of zerotop.

Steps are counted from 0; what is to happen happens from that step on, or in it.
"""

import argparse
import os
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

    def forward(self, input_ids):
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
            yield torch.randint(options.vocabulary, (options.rows, length))
            step += 1


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a pause is")
    parser.add_argument("--only-rank", type=int, help="whose data stalls [all ranks']")
    parser.add_argument("--stall-from", type=int, help="data comes late")
    parser.add_argument("--long-from", type=int, help="sequences are twice as long")
    parser.add_argument("--slow-from", type=int, help="something between the phases takes time")
    parser.add_argument("--leak-from", type=int, help="32 MiB are kept in each step")
    parser.add_argument("--hang-in", type=int, help="rank 1 does nothing for a while")
    parser.add_argument("--die-in", type=int, help="rank 1 is killed")
    parser.add_argument("--save-in", type=int, help="a checkpoint is saved")
    parser.add_argument("--save-to", default="/tmp/staged-checkpoint")
    return parser.parse_args()


def main():
    options = parse()
    torch.manual_seed(1)
    model = Model(options)
    config = {
        "train_micro_batch_size_per_gpu": options.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": True},
        "steps_per_print": 1000000,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    rank = torch.distributed.get_rank()
    stalls = rank if options.only_rank is not None else -1
    batches = iter(torch.utils.data.DataLoader(Tokens(options, stalls), batch_size=None))
    kept = []
    for step in range(options.steps):
        if step == options.die_in and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == options.hang_in and rank == 1:
            time.sleep(options.seconds)
        if options.slow_from is not None and step >= options.slow_from:
            time.sleep(options.seconds)
        engine.backward(engine(next(batches).to(engine.device)))
        engine.step()
        if options.leak_from is not None and step >= options.leak_from:
            kept.append(torch.ones(32 << 20, dtype=torch.uint8, device=engine.device))
        if step == options.save_in:
            engine.save_checkpoint(options.save_to)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
