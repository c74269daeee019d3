"""A loop on the CPU that is slow in known lines. Arguments: the number of steps. Prints the lines by their mark."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path

import torch

STEPS = int(sys.argv[1])
# Steps in which something is slow.
PAUSE, FORWARD, COLLECTIONS, SLOWER = 100, 120, range(150, 220, 10), range(720, 750)


def build_batch(step: int) -> torch.Tensor:
    if step == PAUSE:
        time.sleep(0.6)  # line: pause
    if step in COLLECTIONS:
        gc.collect()  # line: collect
    if step in SLOWER:
        time.sleep(0.08)  # line: slower
    time.sleep(0.01)  # line: always
    return torch.randn(8, 64)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        self.step = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.step == FORWARD:
            wait_in_forward()
        result: torch.Tensor = self.layers(rows)
        return result


def wait_in_forward() -> None:
    end = time.monotonic() + 0.5
    # On one line, because the sampled stack may show any line of a loop.
    any(sorted(range(1000)) and time.monotonic() > end for _ in itertools.count())  # line: forward


def main() -> None:
    junk = [[number] for number in range(1_000_000)]  # what the garbage collector looks at
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        batch = build_batch(step)
        model.step = step
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lines = Path(__file__).read_text().splitlines()
    marks = {line.rpartition("# line: ")[2]: number for number, line in enumerate(lines, 1) if "  # line: " in line}
    print("COUNTED", json.dumps({"rank": 0, "junk": len(junk), "lines": marks}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
