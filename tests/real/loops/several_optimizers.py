"""Loops with several optimizers, not all of which step in each iteration; one for each name. It knows nothing of zerotop.

Each rank is a forked process that trains in one way. It prints a line ``COUNTED {...}`` with the ends of its own iterations.
"""

import copy
import gc
import json
import os
import sys
import time

import torch
from torch import nn

PAUSE_S = 0.01


class Loop:
    """Two models, and the ends of the iterations so far."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ends, self.micro_steps, self.backwards = [], [], 0

    def backward(self, *models):
        time.sleep(PAUSE_S)
        value = torch.randn(4, 8)
        for model in models:
            value = model(value)
        value.square().mean().backward()
        self.backwards += 1

    def end_iteration(self):
        self.ends.append(time.monotonic_ns())
        self.micro_steps.append(self.backwards)
        self.backwards = 0


def make_optimizer(*models):
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.01)


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def create_for_later(loop, iterations=20):
    """Three optimizers, two of which take turns; the third is never used."""
    first, second, _later = make_optimizer(loop.model), make_optimizer(loop.other), make_optimizer(loop.model)
    for _ in range(iterations):
        for model, optimizer in ((loop.model, first), (loop.other, second)):
            loop.backward(model)
            update(optimizer)
        loop.end_iteration()


def end_before_it_shows(loop):
    """It ends before any rule can tell that one is not used."""
    create_for_later(loop, 3)


def copy_optimizer(loop):
    """A scheduler has a copy of the model and of its optimizer, with micro-steps."""
    optimizer = make_optimizer(loop.model)
    twin = make_optimizer(copy.deepcopy(loop.model))
    twin_too = copy.deepcopy(twin)
    torch.optim.lr_scheduler.LambdaLR(twin_too, lambda step: 1.0)
    for _ in range(20):
        loop.backward(loop.model)
        loop.backward(loop.model)
        update(optimizer)
        loop.end_iteration()


def take_turns(loop):
    """A critic steps twice, the generator once."""
    generator, critic = make_optimizer(loop.model), make_optimizer(loop.other)
    for _ in range(12):
        for _ in range(2):
            loop.backward(loop.model, loop.other)
            update(critic)
            generator.zero_grad()
        loop.backward(loop.model, loop.other)
        update(generator)
        critic.zero_grad()
        loop.end_iteration()


def replace_half_way(loop):
    """The second of two optimizers of the same model takes over."""
    optimizers = make_optimizer(loop.model), torch.optim.Adam(loop.model.parameters())
    for index in range(24):
        loop.backward(loop.model)
        update(optimizers[index >= 12])
        loop.end_iteration()


def replace_by_new(loop):
    """A new optimizer is made half way, and the old one is kept."""
    kept = [make_optimizer(loop.model)]
    for index in range(24):
        if index == 12:
            kept.append(torch.optim.Adam(loop.model.parameters()))
        loop.backward(loop.model)
        update(kept[-1])
        loop.end_iteration()


def accumulate(loop):
    """Two optimizers of one model step after each fourth backward."""
    optimizers = make_optimizer(loop.model), make_optimizer(loop.other)
    for _ in range(8):
        for _ in range(4):
            loop.backward(loop.model, loop.other)
        for optimizer in optimizers:
            update(optimizer)
        loop.end_iteration()


def step_rarely(loop, period=10):
    """A second optimizer steps in every tenth iteration."""
    often, rarely = make_optimizer(loop.model), make_optimizer(loop.other)
    for index in range(40):
        loop.backward(loop.model, loop.other)
        update(often)
        if index % period == period - 1:
            update(rarely)
        loop.end_iteration()


def step_now_and_then(loop):
    """As in every fourth one, after which nobody would take the optimizer for one that is not used."""
    step_rarely(loop, 4)


def step_in_backward(loop):
    """One optimizer for each parameter, which steps during the backward, and one that is never used."""
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in loop.model.parameters()}
    _later = make_optimizer(loop.other)
    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: update(optimizers[parameter]))
    for _ in range(20):
        loop.backward(loop.model)
        loop.end_iteration()


def drop_unused(loop):
    """An optimizer that was never used is deleted after a few iterations; a loss scaler, and data from a loader."""
    optimizer, later = make_optimizer(loop.model), make_optimizer(loop.other)
    scaler = torch.amp.GradScaler("cpu")
    for index, (rows,) in enumerate(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)))):
        if index == 4:
            later = None
        time.sleep(PAUSE_S)
        scaler.scale(loop.model(rows).square().mean()).backward()
        loop.backwards += 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loop.end_iteration()
    assert later is None


def main():
    gc.freeze()  # each process would go through all of its objects at its end
    torch.set_num_threads(1)
    for rank, name in enumerate(sys.argv[1:]):
        child = os.fork()
        if not child:
            os.environ["RANK"] = str(rank)
            loop = Loop()
            globals()[name](loop)
            counted = {"rank": rank, "pid": os.getpid(), "ends": loop.ends, "micro_steps": loop.micro_steps}
            os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())
            return
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


main()
