"""A loop of very short steps for so many seconds. The last thing a rank prints is a line ``COUNTED`` with its steps."""

import sys
import time

import deepspeed
import torch


def main():
    model = torch.nn.Linear(8, 8)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000000,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    end_s = time.monotonic() + float(sys.argv[1])
    ends = torch.zeros(1)
    while not ends.item():  # all ranks stop after the same step
        engine.backward(engine(torch.randn(2, 8)).square().mean())
        engine.step()
        ends.fill_(time.monotonic() > end_s)
        torch.distributed.all_reduce(ends)
    print(f"COUNTED {engine.global_steps}", flush=True)


if __name__ == "__main__":
    main()
