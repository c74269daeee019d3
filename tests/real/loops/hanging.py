"""Ranks of a hand-written loop, of which one stops in a step or before it. Arguments: kind of hang, rank, step, pause.

A line that hangs is marked. What can end, ends after the pause in seconds.
"""

import ctypes
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

kind, odd, when, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
lock = threading.Lock()
PREPARING_SHARE = 0.1
"""Of one core; a rank that uses less than 0.05 counts as idle."""


def announce_stop():
    print("STOPS", time.time_ns(), flush=True)


def hold_lock():
    with lock:
        time.sleep(pause)


def wait_for_lock():
    threading.Thread(target=hold_lock, daemon=True).start()
    time.sleep(0.1)
    lock.acquire()  # hang: lock
    lock.release()


def read_fifo():
    os.mkfifo("rows")
    threading.Timer(pause, lambda: open("rows", "w").close()).start()
    with open("rows") as rows:  # hang: disk
        rows.read()


def compute():
    end = time.monotonic() + pause
    while time.monotonic() < end:
        sum(range(1000))


def multiply():
    matrix = torch.ones(4096, 4096, device=device)
    end = time.monotonic() + pause
    while time.monotonic() < end:
        (matrix @ matrix).sum().item()


def wait_for_kernel():
    torch.cuda._sleep(int(2e9 * pause))
    torch.cuda.current_stream().synchronize()  # hang: kernel


def prepare():
    announce_stop()
    if kind == "start":
        time.sleep(pause)  # hang: start
        return
    began, used = time.monotonic(), time.process_time()
    while (passed := time.monotonic() - began) < pause:  # as one that reads a data set, and leaves the core to others
        if time.process_time() - used < PREPARING_SHARE * passed:
            sum(range(1_000_000))
        else:
            time.sleep(0.02)


def build_batch(rank, step):
    if rank == odd and step == when:
        if kind in ("sleep", "lock", "disk", "compute", "native", "multiply", "kernel", "queue"):
            announce_stop()
        if kind == "sleep":
            time.sleep(pause)  # hang: sleep
        if kind == "lock":
            wait_for_lock()
        if kind == "native":
            ctypes.PyDLL(None).sleep(int(pause))  # hang: native
        if kind == "disk":
            read_fifo()
        if kind == "compute":
            compute()
        if kind == "multiply":
            multiply()
        if kind == "kernel":
            wait_for_kernel()
        if kind == "queue":  # nobody waits for this kernel until the next batch is copied
            torch.cuda._sleep(int(2e9 * pause))
    return torch.randn(4, 8)


on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["RANK"])) if on_gpus else torch.device("cpu")


def main():
    if on_gpus:
        torch.cuda.set_device(device)
    if kind in ("start", "prepare") and int(os.environ["RANK"]) == odd:
        prepare()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(when + 20):
        model(build_batch(rank, step).to(device)).pow(2).mean().backward()
        if kind == "mismatch" and rank == odd and step == when:
            announce_stop()
            dist.barrier()  # hang: mismatch
        if kind == "shapes" and step == when:
            rows = torch.zeros((2 if rank == odd else 4) * 1024, 1024, device=device)
            if rank == odd:
                announce_stop()
            dist.all_reduce(rows)  # hang: shapes
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if kind == "peer" and step == when:
            if rank == odd:
                announce_stop()
                os._exit(3)  # hang: peer
            store.get("written by the rank that is gone")
        if kind == "save" and rank == odd and step == when:
            announce_stop()
            torch.save(Slow(), "model.pt")
        time.sleep(0.02)


class Slow:
    """Takes its time when it is saved, as on a slow disk."""

    def __reduce__(self):
        time.sleep(pause)
        return (float, (1.0,))


main()
