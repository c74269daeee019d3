"""A plain loop of short steps until a file appears. The last thing it prints is a line ``COUNTED`` with its steps."""

import os
import sys
import time

import torch


def main():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    steps = 0
    print("ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
        time.sleep(0.01)
    print(f"COUNTED {steps}", flush=True)


main()
