"""A loop on GPUs that exchange parameters or gradients, of which one becomes slow. Without zerotop."""

import argparse
import functools
import multiprocessing
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

WORDS = 8192
SETTINGS = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
}


def make_model(engine, options, device):
    """Return the model as the engine trains it, and its optimizer, which ZeRO-3 has itself."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, vocab_size=WORDS, use_cache=False
    )
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16)
    if engine == "zero3":
        import deepspeed

        rows = {"train_micro_batch_size_per_gpu": options.rows}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=SETTINGS | rows)[0], None
    if engine == "fsdp2":
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    elif engine == "fsdp1":
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({GPT2Block}), device_id=device)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def compute_more(matrix, products, *_):
    """Multiply matrices that nobody needs."""
    for _ in range(products):
        torch.mm(matrix, matrix)


def use_links(seconds):
    """Copy between the first two GPUs, both ways at once. Another process, which knows nothing of the loop."""
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    pairs = [[torch.ones(1 << 28, device=f"cuda:{one}") for one in order] for order in ((0, 1), (1, 0))]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for stream, (source, target) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(20):
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)


def plant_fault(fault, model, options, device):
    """Let this rank be slow from now on, or the links of all."""
    if fault == "links":
        multiprocessing.get_context("spawn").Process(target=use_links, args=(options.seconds,), daemon=True).start()
        return
    blocks = [module for module in model.modules() if isinstance(module, GPT2Block)]
    matrix = torch.ones(options.side, options.side, device=device, dtype=torch.bfloat16)
    for block in blocks:
        if fault == "kernels":
            block.register_forward_hook(functools.partial(compute_more, matrix, options.more))
        else:
            block.register_forward_hook(lambda *_: time.sleep(options.pause))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("fault")
    parser.add_argument("--step", type=int, default=10)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--more", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.03)
    options = parser.parse_args()
    if options.fault == "sockets":  # as between nodes without a fast network
        os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    rank, is_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    model, optimizer = make_model(options.engine, options, device)
    ids = torch.randint(WORDS, (options.rows, options.length), device=device)
    end, step = time.monotonic() + options.seconds, 0
    is_planted = options.fault in ("none", "sockets")
    goes_on = torch.ones(1, device=device)
    while goes_on.item():
        # The links become slow at half time: their waits are compared with those in the first half.
        is_time = time.monotonic() > end - options.seconds / 2 if options.fault == "links" else step >= options.step
        if is_time and not is_planted and rank == options.rank:
            plant_fault(options.fault, model, options, device)
            is_planted = True
        loss = model(input_ids=ids, labels=ids).loss
        if optimizer is None:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 10 == 0:  # all ranks end together
            goes_on.fill_(time.monotonic() < end)
            dist.broadcast(goes_on, 0)
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
