"""Two engines in one process, one trains, one only looks; things go wrong. It knows nothing of zerotop.

The last thing it prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import contextlib
import json
import os
import threading

import deepspeed
import torch

STEPS = 3


class Stumble(torch.autograd.Function):
    """Cannot be differentiated."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise MemoryError("as large batches do")


def make_engine(optimizer):
    model = torch.nn.Linear(8, 8)
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000000}
    if optimizer:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main():
    torch.manual_seed(1)
    policy, reference = make_engine(True), make_engine(False)
    batches = torch.utils.data.DataLoader(torch.randn(2 * STEPS, 8), batch_size=2)
    failures = 0
    for batch in batches:
        with torch.no_grad():
            target = reference(batch)
        with contextlib.suppress(MemoryError):
            policy.backward(Stumble.apply(policy(batch)).sum())
        failures += 1
        policy.backward((policy(batch) - target).square().mean())
        # Other threads fetch and compute too; none of that is a phase of the training.
        thread = threading.Thread(target=lambda: [reference(other) for other in batches])
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            policy(batch)
            os._exit(0)
        os.waitpid(child, 0)
        policy.step()
    with contextlib.suppress(AssertionError, AttributeError):
        reference.step()
    counted = {"steps": policy.global_steps, "failures": failures, "pid": os.getpid()}
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


if __name__ == "__main__":
    main()
