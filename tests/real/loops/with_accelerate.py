"""A loop that Accelerate runs, as its documentation has it. It knows nothing of zerotop.

The last thing each rank prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os

import torch
from accelerate import Accelerator
from gloo_threads import finish_gloo_threads

ROWS = 4


def main():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(ROWS * 2 * 8, 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, updates = [], 0
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            losses.append(loss.item())
            updates += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("state")
    counted = {
        "rank": accelerator.process_index,
        "pid": os.getpid(),
        "losses": losses,
        "steps": updates,
        "rows": [ROWS] * len(losses),
    }
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())
    finish_gloo_threads()
    accelerator.end_training()


main()
