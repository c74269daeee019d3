"""Two ranks of a hand-written loop, of which one stops in the fourth step, before zerotop comes.

Argument: the kind of stop; with any other word they go on.

A line at which the odd rank stands is marked.
"""

import os
import queue
import sys
import time

import torch
import torch.distributed as dist

kind = sys.argv[1]
MIB = 1 << 20


def fetch(rows):
    return rows.get()  # hang: queue


def ask():
    input()  # hang: input


def load_batch():
    os.mkfifo("rows")
    with open("rows") as rows:  # hang: file
        rows.read()


def count_tokens():
    total = 0
    while True:
        total += sum(range(100))  # hang: loop


def stop():
    if kind == "queue":
        fetch(queue.Queue())
    if kind == "input":
        ask()
    if kind == "file":
        load_batch()
    if kind == "loop":
        count_tokens()
    if kind == "broadcast":
        dist.broadcast(torch.zeros(MIB), 1)  # hang: broadcast
    if kind == "barrier":
        dist.barrier()  # hang: barrier


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        model(torch.randn(4, 8)).pow(2).mean().backward()
        if step == 3:
            print("STOPS", flush=True)
            if dist.get_rank() == 1:
                stop()
        dist.all_reduce(torch.zeros(MIB) if step == 3 else model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0.02)


main()
