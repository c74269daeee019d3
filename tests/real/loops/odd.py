"""Jobs put together oddly: engines that train in turn, or only look; another allocator of device memory; ranks that share a
GPU. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import argparse
import ctypes
import json
import os
import sys
import time

import torch

WIDTH = 1024


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--no-optimizer", action="store_true")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--own-allocator", action="store_true")
    parser.add_argument("--too-much", type=int, default=0)
    parser.add_argument("--linger", type=float, default=0.0)
    return parser.parse_args()


def use_own_allocator():
    """What CUDAPluggableAllocator does with a library of C; these functions are Python's. Returns what must not be freed."""
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    runtime.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    runtime.cudaFree.argtypes = [ctypes.c_void_p]

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    def allocate_memory(size, device, stream):
        address = ctypes.c_void_p()
        failed = size and runtime.cudaMalloc(ctypes.byref(address), size)
        return None if failed else address.value

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    def free_memory(address, size, device, stream):
        runtime.cudaFree(address)

    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate_memory, free_memory)]
    allocator = torch._C._cuda_customAllocator(*addresses)
    torch._C._cuda_changeCurrentAllocator(allocator)
    return allocate_memory, free_memory, allocator


def make_engine(options):
    import deepspeed

    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": options.stage},
        "steps_per_print": 1000000,
    }
    if options.no_optimizer:
        return deepspeed.initialize(model=model, config=config)[0]
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train_step(engine, batch):
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def evaluate_batch(engine, batch):
    engine.eval()
    with torch.no_grad():
        return engine(batch).square().mean().item()


def run_out(size, device):
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        print(error, flush=True)


def read_torch_stats():
    """Torch's own counters, if it has any of this allocator."""
    try:
        return torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
    except (RuntimeError, NotImplementedError) as error:
        return {"error": str(error).splitlines()[0]}


def main():
    options = parse_options()
    own_allocator = use_own_allocator() if options.own_allocator else None
    if options.one_gpu:
        os.environ["LOCAL_RANK"] = "0"
    import deepspeed

    torch.manual_seed(1)
    if options.gloo:
        deepspeed.init_distributed(dist_backend="gloo")
    engines = [make_engine(options) for _ in range(options.engines)]
    batch = torch.randn(4, WIDTH).to(engines[0].device)
    work = evaluate_batch if options.no_optimizer else train_step
    losses = [[work(engine, batch) for engine in engines] for _ in range(options.steps)]
    if options.too_much:
        run_out(options.too_much, engines[0].device)
    time.sleep(options.linger)
    counted = {
        "rank": torch.distributed.get_rank(),
        "pid": os.getpid(),
        "steps": [engine.global_steps for engine in engines],
        "losses": losses,
        "stats": read_torch_stats(),
    }
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if own_allocator:
        # Nothing may be freed by functions that are gone.
        sys.stdout.flush()
        os._exit(0)


main()
