"""A loop that keeps each loss with its graph, 8 MiB a step. Arguments: steps."""

import sys
import time

import torch


def train(steps: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(steps):
        begin = time.monotonic()
        loss = model(torch.randn(2048, 256)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        losses.append(loss)
        seconds.append(time.monotonic() - begin)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(int(sys.argv[1]))
