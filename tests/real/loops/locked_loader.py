"""A loop that waits for its data: its loader's worker looks each item up in a locked file. Arguments: steps."""

from __future__ import annotations

import fcntl
import sys
import time

import torch


class Items(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.look_up(index)

    def look_up(self, index: int) -> torch.Tensor:
        with open(__file__) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.1)
            return torch.full((32,), float(index))


def train(steps: int) -> None:
    model = torch.nn.Linear(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step, rows in enumerate(torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=1)):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == steps:
            break


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(int(sys.argv[1]))
