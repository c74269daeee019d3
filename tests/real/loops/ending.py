"""A hand-written loop whose rank 1 ends before its time: by a signal, with an exception in a function, or because its tensor
has another size."""

import atexit
import os
import signal
import sys
import time

if os.environ["RANK"] == "0":
    # DeepSpeed's launcher looks at its ranks once a second, in any order: it has to see the other one's end first. What is
    # registered before the probe is called after it.
    atexit.register(time.sleep, 1.5)

    # Both launchers would end it as soon as they have seen that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import torch
import torch.distributed as dist


def save_or_die(rank, how):
    if rank == 1 and how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "exception":
        raise ValueError("no such shape")
    if how == "sizes":
        dist.all_reduce(torch.ones(5 if rank == 1 else 3))


def main():
    dist.init_process_group("gloo")
    rank, how = dist.get_rank(), sys.argv[-1]  # DeepSpeed's launcher adds an argument before it
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(6):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            save_or_die(rank, how)


main()
