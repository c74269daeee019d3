"""A script that asks to be recorded itself, instead of being started by ``zerotop run``.

The last thing it prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os

import deepspeed
import torch

import zerotop_probe


def main():
    model = torch.nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000000,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    answers = []
    for number in range(4):
        if number == 1:
            answers += [zerotop_probe.attach(engine), zerotop_probe.attach(engine)]
        engine.backward(engine(torch.randn(2, 8)).square().mean())
        engine.step()
    counted = {"answers": answers, "steps": engine.global_steps, "pid": os.getpid()}
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


if __name__ == "__main__":
    main()
