"""A loop of steps of about 2 ms, nearly all of which are only counted, with one odd thing after each tenth of them.

It writes its own number of updates, and digests of its losses and weights, to ``odd-steps.json`` where it runs.
"""

import copy
import gc
import hashlib
import json
import os
import threading
import time

import torch
from torch.utils.checkpoint import checkpoint

BEGIN, PERIOD = 40, 10


class Failing(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("planted")


class OwnAdam(torch.optim.AdamW):
    """Its step() calls that of its base class, which PyTorch's hooks see too."""

    def step(self, closure=None):
        return super().step(closure)


class OddLoop:
    """A model, its optimizer, and what may happen to them."""

    def __init__(self):
        self.updates = 0
        self.losses = []
        self.make_model()

    def make_model(self):
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8)
        )
        self.make_optimizer(torch.optim.AdamW)

    def make_optimizer(self, optimizer_class):
        self.optimizer = optimizer_class(self.model.parameters(), lr=1e-3)

    def forward(self, rows=4):
        time.sleep(0.0015)
        loss = self.model(torch.randn(rows, 8)).square().mean()
        self.losses.append(loss.item())
        return loss

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1

    def train_step(self):
        self.forward().backward()
        self.update()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            for _ in range(3):
                self.forward(rows=8)
        self.model.train()

    def infer(self):
        with torch.inference_mode():
            self.forward()

    def fail_in_forward(self):
        try:
            self.model(torch.randn(4, 9))
        except RuntimeError:
            self.losses.append("forward")

    def fail_in_backward(self):
        try:
            Failing.apply(self.forward()).backward()
        except RuntimeError:
            self.losses.append("backward")
        self.optimizer.zero_grad()

    def fail_in_step(self):
        self.forward().backward()
        rate = self.optimizer.param_groups[0].pop("lr")
        try:
            self.optimizer.step()
        except KeyError:
            self.losses.append("step")
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()

    def step_twice(self):
        self.forward().backward()
        self.optimizer.step()
        self.update()

    def step_without_backward(self):
        self.optimizer.step()

    def accumulate(self):
        for _ in range(3):
            self.forward().backward()
        self.update()

    def update_from_grad(self):
        parameters = list(self.model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.forward(), parameters), strict=True):
            parameter.grad = gradient
        self.update()

    def penalize_gradient(self):
        first = next(self.model.parameters())
        (gradient,) = torch.autograd.grad(self.forward(), first, create_graph=True)
        gradient.square().sum().backward()
        self.optimizer.zero_grad()

    def recompute(self):
        for is_reentrant in (False, True):
            rows = torch.randn(4, 8, requires_grad=True)
            checkpoint(self.model, rows, use_reentrant=is_reentrant).square().mean().backward()
        self.update()

    def train_in_thread(self):
        thread = threading.Thread(target=self.train_step)
        thread.start()
        thread.join()

    def fork(self):
        if (child := os.fork()) == 0:
            try:
                self.train_step()
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    def scale_loss(self):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(self.forward()).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        self.updates += 1

    def copy_optimizer(self):
        self.optimizer = copy.deepcopy(self.optimizer)
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())

    def inherit_optimizer(self):
        self.make_optimizer(OwnAdam)

    def update_in_closure(self):
        def compute_loss():
            self.optimizer.zero_grad()
            loss = self.forward()
            loss.backward()
            return loss

        self.optimizer.step(compute_loss)
        self.updates += 1

    def fail_in_closure(self):
        def fail():
            raise KeyError("planted")

        try:
            self.optimizer.step(fail)
        except KeyError:
            self.losses.append("closure")


# Those with a closure come last: from then on all steps have phases.
ODD_THINGS = (
    OddLoop.evaluate,
    OddLoop.infer,
    OddLoop.fail_in_forward,
    OddLoop.fail_in_backward,
    OddLoop.fail_in_step,
    OddLoop.step_twice,
    OddLoop.step_without_backward,
    OddLoop.accumulate,
    OddLoop.update_from_grad,
    OddLoop.penalize_gradient,
    OddLoop.recompute,
    OddLoop.train_in_thread,
    OddLoop.fork,
    gc.collect,
    OddLoop.inherit_optimizer,
    OddLoop.copy_optimizer,
    OddLoop.make_model,
    OddLoop.scale_loss,
    OddLoop.update_in_closure,
    OddLoop.fail_in_closure,
)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loop = OddLoop()
    for step in range(BEGIN + PERIOD * len(ODD_THINGS)):
        loop.train_step()
        number, rest = divmod(step - BEGIN, PERIOD)
        if number >= 0 and not rest:
            odd = ODD_THINGS[number]
            odd() if odd is gc.collect else odd(loop)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in loop.model.parameters())
    with open("odd-steps.json", "w") as file:
        json.dump({"updates": loop.updates, "losses": loop.losses, "weights": hashlib.sha256(weights).hexdigest()}, file)


main()
