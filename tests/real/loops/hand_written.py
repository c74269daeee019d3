"""A training loop as people write them by hand around a DeepSpeed engine. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import argparse
import contextlib
import hashlib
import json
import os
import time

import deepspeed
import torch

VOCABULARY = 64


class Model(torch.nn.Module):
    """Predicts the next token; enough parameters for ZeRO to have something to divide."""

    def __init__(self, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.middle = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, input_ids, fail=False):
        if fail:
            raise MemoryError("as large batches do")
        logits = self.head(self.middle(self.embedding(input_ids[:, :-1])))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())


class Tokens(torch.utils.data.Dataset):
    """Random token ids, the same ones in every run."""

    def __init__(self, count, length, seed):
        self.ids = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index]


def make_config(options):
    config = {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_accumulation_steps": options.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": options.torch_adam}},
        "zero_optimization": {"stage": options.stage},
        "steps_per_print": 1000000,
        "wall_clock_breakdown": options.wall_clock_breakdown,
        "tracker_api_key": "not-for-recordings",
    }
    if options.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if options.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": options.scale_power, "hysteresis": 1}
        # Torch computes in fp16 on any CPU; DeepSpeed refuses those that have no instructions for it.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if options.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--scale-power", type=int, default=16)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=9)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, in which others have the cores")
    parser.add_argument("--until", help="end before --steps, once this file is there, all ranks after the same step")
    parser.add_argument("--direct", action="store_true", help="loss.backward() instead of engine.backward(loss)")
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--evaluation-rows", type=int, default=4)
    parser.add_argument(
        "--checkpoint", help="save after half of the steps, by PyTorch one step later; at the end go back for one more"
    )
    parser.add_argument("--stumble", type=int, default=-1, help="the micro-step in which a forward fails and is repeated")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--torch-adam", action="store_true", help="an optimizer that needs no compiler")
    parser.add_argument("--wall-clock-breakdown", action="store_true")
    return parser.parse_args()


class Loop:
    def __init__(self, options):
        torch.manual_seed(1)
        self.options = options
        model = Model(options.width)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=make_config(options))
        self.counted = {"forwards": [], "evaluations": [], "steps": [], "losses": [], "stumbles": 0}
        seed = 7 + torch.distributed.get_rank()
        count = (options.steps + 2) * options.accumulation * options.rows
        loader = torch.utils.data.DataLoader(
            Tokens(count, options.length, seed), batch_size=options.rows, num_workers=options.workers
        )
        self.batches = iter(loader)
        self.held_out = torch.utils.data.DataLoader(
            Tokens(3 * options.evaluation_rows - 1, options.length, 99), batch_size=options.evaluation_rows
        )

    def step(self):
        """One optimizer step: as many micro-batches as are accumulated."""
        engine = self.engine
        began = engine.global_steps
        while engine.global_steps == began:
            ids = next(self.batches).to(engine.device)
            loss = self.forward(ids)
            self.counted["forwards"].append([began, *ids.shape])
            self.counted["losses"].append(loss.item().hex())
            if self.options.direct:
                scale = getattr(engine, "scale", None)
                (scale(loss) if scale and self.options.dtype == "fp16" else loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        scale = getattr(engine.optimizer, "cur_scale", None)
        self.counted["steps"].append([began, engine.skipped_steps, scale])

    def forward(self, ids):
        if len(self.counted["forwards"]) == self.options.stumble:
            with contextlib.suppress(MemoryError):
                self.engine(ids, fail=True)
            self.counted["stumbles"] += 1
        return self.engine(ids)

    def evaluate_model(self):
        self.engine.eval()
        with torch.no_grad():
            for ids in self.held_out:
                self.engine(input_ids=ids.to(self.engine.device))
                self.counted["evaluations"].append([self.engine.global_steps, *ids.shape])
        self.engine.train()

    def is_to_end(self):
        """Whether any rank has seen the file; collective."""
        if not self.options.until:
            return False
        seen = torch.tensor([float(os.path.exists(self.options.until))])
        torch.distributed.all_reduce(seen)
        return bool(seen)

    def run_steps(self):
        options = self.options
        for number in range(options.steps):
            if options.evaluate_every and number % options.evaluate_every == 0:
                self.evaluate_model()
            self.step()
            if options.checkpoint and number + 1 == options.steps // 2:
                self.engine.save_checkpoint(options.checkpoint)
            if options.checkpoint and number == options.steps // 2:
                torch.save(self.engine.module.state_dict(), f"{options.checkpoint}-{self.engine.global_rank}.pt")
            time.sleep(options.pause)
            if self.is_to_end():
                break
        if options.checkpoint:
            self.engine.load_checkpoint(options.checkpoint)
            self.step()


def device_memory(engine):
    """What torch says of the device's memory at the end: whoever watches must not show in it."""
    if engine.device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.allocated")
    return {name: stats[name] for name in names}


def strange_methods(*objects):
    """The methods of their classes, by class and name, that are not written where the class is."""
    found = []
    for kind in {kind for one in objects for kind in type(one).__mro__}:
        package = f"/{kind.__module__.split('.')[0]}/"
        for name, method in vars(kind).items():
            code = getattr(method, "__code__", None)
            if code is not None and package not in code.co_filename:
                found.append(f"{kind.__name__}.{name}")
    return sorted(found)


def digest_weights(engine):
    """A digest of the final weights, bit by bit; collective."""
    digest = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main():
    loop = Loop(parse_options())
    loop.run_steps()
    engine, counted = loop.engine, loop.counted
    counted.update(
        strange_methods=strange_methods(engine, engine.optimizer, loop.batches),
        memory=device_memory(engine),
        rank=torch.distributed.get_rank(),
        pid=os.getpid(),
        global_steps=engine.global_steps,
        skipped_steps=engine.skipped_steps,
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        weights=digest_weights(engine),
    )
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
