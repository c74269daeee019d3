"""Two pipeline stages, trained by ``train_batch()``. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

MICRO_BATCHES = 3


def make_batches():
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.randn(2, 8, generator=generator), torch.randn(2, 8, generator=generator)


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 1000000,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    source = make_batches()
    for _ in range(2):
        engine.train_batch(source)
    engine.eval_batch(source)
    counted = {"rank": torch.distributed.get_rank(), "steps": engine.global_steps, "pid": os.getpid()}
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


if __name__ == "__main__":
    main()
