"""A training loop with one fault from a step on, or in it; plain PyTorch, DDP or DeepSpeed. It knows nothing of zerotop.

Lines at which a fault takes its time, or fails, end in ``# fault: NAME``.
"""

import argparse
import gc
import os
import signal
import tempfile
import time

import torch
from torch import nn

VOCABULARY = 512


class Model(nn.Module):
    """A transformer of a few layers that returns the loss of the next tokens."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids):
        logits = self.head(self.layers(self.embedding(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), input_ids.flatten())


class Batches(torch.utils.data.Dataset):
    """Batches of random tokens; an item is a whole batch."""

    def __init__(self, options):
        self.options = options

    def __len__(self):
        return self.options.steps

    def __getitem__(self, step):
        options = self.options
        rows, length = options.rows, options.length
        if step >= options.step:
            rows *= 3 if options.fault == "rows" else 1
            length *= 3 if options.fault == "longer" else 1
            if options.fault == "slow_item":
                time.sleep(options.seconds)  # fault: slow_item
        return torch.randint(VOCABULARY, (rows, length))


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("--engine", choices=("plain", "ddp", "deepspeed"), default="plain")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step", type=int, default=25)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--objects", type=int, default=500_000, help="that the garbage collector looks at")
    parser.add_argument("--turn", help="a file: training begins when it is there")
    return parser.parse_args()


def set_up(options, device):
    """Return what is called for the loss, for backward and update, and to save a checkpoint in a folder."""
    model = Model(options.width, options.layers).to(device)
    if options.engine == "deepspeed":
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": options.rows,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "bf16": {"enabled": True},
            # With the default buckets of 1 GB no evaluation of so small a model raises the peak.
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 5_000_000},
            "steps_per_print": 1000000,
        }
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

        def update_weights(loss):
            engine.backward(loss)
            engine.step()

        return engine, update_weights, engine.save_checkpoint
    if options.engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def update_plain(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def save_checkpoint(folder, client_state):
        torch.save({"model": model.state_dict(), **client_state}, f"{folder}/checkpoint.pt")

    return model, update_plain, save_checkpoint


def collect_garbage(junk):
    """Collect garbage after each step, which visits every object of the process."""
    gc.collect()  # fault: gc
    return len(junk)


def delay_step(options, rank, junk):
    """Spend time between the phases, as the fault asks for, from its step on."""
    if options.fault == "sleep":
        time.sleep(options.seconds)  # fault: sleep
    elif options.fault == "slow_rank" and rank == options.rank:
        time.sleep(options.seconds)  # fault: slow_rank
    elif options.fault == "gc":
        collect_garbage(junk)
    elif options.fault == "empty_cache":
        torch.cuda.empty_cache()  # fault: empty_cache


def end_rank(options, rank):
    """End a rank, in the fault's step."""
    if rank != options.rank:
        return
    if options.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options.fault == "exception":
        raise ValueError("a label lies outside of the vocabulary")  # fault: exception


class SlowDisk:
    """An object that takes some seconds to save."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        time.sleep(self.seconds)
        return (float, (self.seconds,))


def pause_training(options, model, save, device):
    """Save or evaluate, once."""
    if options.fault == "checkpoint":
        with tempfile.TemporaryDirectory() as folder:
            save(folder, client_state={"slow": SlowDisk(2.0)})
    elif options.fault == "evaluation":
        model.eval()
        with torch.no_grad():
            model(torch.randint(VOCABULARY, (16 * options.rows, options.length), device=device))
        model.train()


def await_turn(options):
    """Wait until the devices are free: other jobs may train on them while this one starts."""
    if options.turn:
        os.write(1, b"READY\n")  # not through Python's buffers, from which the end of the line may come late
        while not os.path.exists(options.turn):
            time.sleep(0.02)


def warm_up(options, device):
    """Start what takes long and happens once: CUDA, its libraries, and the connections between ranks."""
    shares = device.type == "cuda" and torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", "1"))
    if options.engine == "ddp":
        torch.distributed.init_process_group("nccl" if device.type == "cuda" and not shares else "gloo")
    elif options.engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed()
    one = torch.ones(64, 64, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(one)
    (one @ one).sum().item()


def main():
    options = parse_options()
    on_gpu = torch.cuda.is_available()
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    warm_up(options, device)
    await_turn(options)
    torch.manual_seed(rank)
    compute_loss, update, save = set_up(options, device)
    junk = [[number] for number in range(options.objects)] if options.fault == "gc" else []
    kept = []
    for step, batch in enumerate(torch.utils.data.DataLoader(Batches(options), batch_size=None)):
        if step == options.step:
            os.write(1, b"FAULT\n")
            pause_training(options, compute_loss, save, device)
            end_rank(options, rank)
        update(compute_loss(batch.to(device)))
        if step >= options.step:
            delay_step(options, rank, junk)
            if options.fault == "leak":
                kept.append(torch.ones(32 << 20, dtype=torch.uint8, device=device))  # fault: leak
    os.write(1, b"DONE\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
