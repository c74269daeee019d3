"""A training loop around a Llama-like model, with one fault from a step on or none. It knows nothing of zerotop.

The only argument is a ``drawn_jobs.Draw`` as JSON. The loop measures its own pace for some steps, and then trains for about
``seconds``. Lines at which a fault takes its time end in ``# fault: NAME``; the last line of output says what was true.
"""

import gc
import itertools
import json
import os
import statistics
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Steps that show the pace; the first ones are left out.
WARM_UP, MEASURED = 5, 15
LEAST_STEPS, MOST_STEPS = 60, 4000
THREADS = 3


class Block(nn.Module):
    """One layer: attention and a gated MLP, with RMS norms."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden, cos, sin):
        shape = (*hidden.shape[:2], self.heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norms[0](hidden)).chunk(3, -1))
        query, key = (rotate(part, cos, sin) for part in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norms[1](hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def rotate(part, cos, sin):
    first, second = part.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Llama(nn.Module):
    """Returns logits, or the loss where labels are given."""

    def __init__(self, draw):
        super().__init__()
        self.embedding = nn.Embedding(draw["vocabulary"], draw["width"])
        self.layers = nn.ModuleList(Block(draw["width"], draw["heads"]) for _ in range(draw["layers"]))
        self.norm, self.head = nn.RMSNorm(draw["width"]), nn.Linear(draw["width"], draw["vocabulary"], bias=False)
        self.half, self.checkpointing = draw["width"] // draw["heads"] // 2, draw["checkpointing"]

    def forward(self, input_ids, labels=None):
        hidden = self.embedding(input_ids)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = places[:, None] * 1e4 ** (-torch.arange(self.half, device=input_ids.device) / self.half)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.layers:
            if self.checkpointing and self.training:
                hidden = checkpoint(layer, hidden, cos, sin, use_reentrant=False)
            else:
                hidden = layer(hidden, cos, sin)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()), logits


class Tokens(torch.utils.data.Dataset):
    """Rows of random tokens."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return self.draw["rows"] * MOST_STEPS * 2

    def __getitem__(self, index):
        return torch.randint(self.draw["vocabulary"], (self.draw["length"],))


class Loop:
    """The objects of the training, and the faults that replace or slow them."""

    def __init__(self, draw, rank, ranks, device):
        self.draw, self.rank, self.ranks, self.device = draw, rank, ranks, device
        self.is_broken = torch.zeros((), dtype=torch.bool).share_memory_()  # read by the collate function, in workers too
        self.kept, self.junk = [], [[number] for number in range(draw["objects"])]
        torch.manual_seed(rank)
        model = Llama(draw).to(device)
        if draw["dtype"] == "bf16":
            model = model.bfloat16()
        if draw["fault"] == "unfreeze":
            model.embedding.requires_grad_(False)
            model.layers.requires_grad_(False)
        self.inner, self.engine = model, None
        self.model = self.wrap(model)
        if self.engine is None:
            self.optimizer = self.make_optimizer(fused=draw["optimizer"] == "fused" and device.type == "cuda")

    def wrap(self, model):
        """Return the model as its engine calls it."""
        draw = self.draw
        if draw["engine"] == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if draw["engine"] == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for layer in model.layers:
                fully_shard(layer)
            return fully_shard(model)
        if draw["engine"] == "deepspeed":
            import deepspeed

            config = {
                "train_micro_batch_size_per_gpu": draw["rows"],
                "gradient_accumulation_steps": draw["accumulation"],
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
                "bf16": {"enabled": draw["dtype"] == "bf16"},
                "zero_optimization": {"stage": draw["stage"]},
                "gradient_clipping": 1.0 if draw["clip"] else 0.0,
                "steps_per_print": 10**9,
            }
            self.engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            return self.engine
        return model

    def make_optimizer(self, **options):
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        return torch.optim.AdamW(parameters, lr=1e-4, **options)

    def make_batches(self):
        loader = torch.utils.data.DataLoader(
            Tokens(self.draw), self.draw["rows"], num_workers=self.draw["workers"], collate_fn=self.collate
        )
        while True:
            yield from loader

    def collate(self, rows):
        batch = torch.stack(rows)
        if self.draw["fault"] == "collate" and self.is_broken:
            spend_seconds(self.draw["amount"])  # fault: collate
        return batch

    def train_step(self, batches, step):
        for _ in range(self.draw["accumulation"]):
            ids = next(batches).to(self.device)
            if self.draw["fault"] == "longer" and self.is_broken:
                ids = ids.repeat(1, 2)
            loss, logits = self.model(ids, labels=ids)
            if self.draw["fault"] == "logits" and self.is_broken:
                self.kept.append(logits[:, -1].detach())  # fault: logits
            if self.engine is not None:
                self.engine.backward(loss)
                self.engine.step()
            else:
                (loss / self.draw["accumulation"]).backward()
        if self.engine is None:
            if self.draw["clip"]:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if step % self.draw["log_every"] == 0:
            float(loss)  # as a script that prints its loss
        if self.is_broken:
            self.spend_fault(loss, step)

    def begin_fault(self, ids):
        """Do what the fault does once, before the step with which it begins."""
        fault, model = self.draw["fault"], self.inner
        self.is_broken.fill_(True)
        if fault == "unfreeze":
            model.requires_grad_(True)  # fault: unfreeze
            self.optimizer = self.make_optimizer()
        elif fault == "float":
            model.float()  # fault: float
            self.optimizer = self.make_optimizer()
        elif fault == "checkpointing_off":
            model.checkpointing = False  # fault: checkpointing_off
        elif fault == "foreach_off":
            self.optimizer = self.make_optimizer(foreach=False, fused=False)  # fault: foreach_off
        elif fault == "threads":
            for _ in range(THREADS):
                threading.Thread(target=count_forever, daemon=True).start()
        elif fault == "generate_once":
            self.generate(ids)  # fault: generate_once
        elif fault == "giant_pause":
            time.sleep(80 * self.draw["amount"])  # fault: giant_pause

    def spend_fault(self, loss, step):
        """Do what the fault does in each step."""
        fault = self.draw["fault"]
        if fault == "empty_cache":
            torch.cuda.empty_cache()  # fault: empty_cache
        elif fault == "item":
            loss.item()  # fault: item
        elif fault == "sleep":
            time.sleep(self.draw["amount"])  # fault: sleep
        elif fault == "gc":
            gc.collect()  # fault: gc
        elif fault == "logger":
            self.write_log(loss, step)
        elif fault == "rank0_eval" and self.rank == 0 and step % 4 == 0:
            spend_seconds(4 * self.draw["amount"])  # fault: rank0_eval

    def write_log(self, loss, step):
        text = json.dumps({"step": step, "loss": [float(loss)] * 64})
        until = time.perf_counter() + self.draw["amount"]
        while time.perf_counter() < until:
            json.loads(text)  # fault: logger

    @torch.no_grad()
    def generate(self, ids):
        self.inner.eval()
        row, until = ids[:1, :8].to(self.device), time.perf_counter() + 80 * self.draw["amount"]
        while time.perf_counter() < until:
            following = self.inner(row[:, -32:])[:, -1].argmax(-1, keepdim=True)
            row = torch.cat([row, following], 1)
        self.inner.train()


def spend_seconds(seconds):
    """Compute in Python for some seconds."""
    until, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        total += sum(range(100))  # fault: compute
    return total


def count_forever():
    while True:
        sum(range(10**6))  # fault: threads


def agree(value, ranks, device):
    """Return rank 0's value."""
    if ranks == 1:
        return value
    shared = torch.tensor(float(value), device=device)
    dist.broadcast(shared, 0)
    return shared.item()


def main():
    draw = json.loads(sys.argv[1])
    rank, ranks, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    ranks = max(1, ranks)
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if ranks > 1 and draw["engine"] != "deepspeed":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    elif draw["engine"] == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    loop = Loop(draw, rank, ranks, device)
    batches, ends = loop.make_batches(), [time.perf_counter()]
    for step in range(WARM_UP + MEASURED):
        loop.train_step(batches, step)
        ends.append(time.perf_counter())
    usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends[WARM_UP:]))
    steps = int(agree(min(MOST_STEPS, max(LEAST_STEPS, draw["seconds"] / usual)), ranks, device))
    begin = int(draw["begin"] * steps) if draw["fault"] else steps
    print(f"PLAN {json.dumps({'begin': begin, 'steps': steps})}" if rank == 0 else "", flush=True)
    for step in range(WARM_UP + MEASURED, steps):
        if step == begin:
            loop.begin_fault(next(batches))
        loop.train_step(batches, step)
        ends.append(time.perf_counter())
    lasted = [1000 * (later - earlier) for earlier, later in itertools.pairwise(ends)]
    medians = {"before_ms": lasted[WARM_UP:begin], "after_ms": lasted[begin:]}
    truth = {name: round(statistics.median(part), 2) for name, part in medians.items() if part}
    if rank == 0:
        print(f"TRUTH {json.dumps({**truth, 'longest_after_ms': round(max(lasted[begin:], default=0.0), 1)})}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
