"""A training in a child that multiprocessing or the script forks: such children end by os._exit(), without atexit."""

import multiprocessing
import os
import sys
import time

import torch


def train():
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(12):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)  # so that the sampler sees this process


def fork_by_hand(code):
    child = os.fork()
    if not child:
        train()
        os._exit(code)
    os.waitpid(child, 0)


how = sys.argv[1]
if how == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
else:
    fork_by_hand(3 if how == "failing" else 0)
time.sleep(3)  # a notebook goes on
