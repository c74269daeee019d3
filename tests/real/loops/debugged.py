"""A loop on the CPU in which anomaly mode stays on for a while, and later a thread takes Python's lock."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import torch

STEPS, ANOMALY = 360, range(120, 240)
THREAD_S = 4.0


def count_words() -> None:
    while True:
        total = 0
        for number in range(60_000):
            total += number
        time.sleep(0.002)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)


def main() -> None:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        if step in (ANOMALY.start, ANOMALY.stop):
            torch.autograd.set_detect_anomaly(step in ANOMALY)  # line: anomaly
        train_step(model, optimizer)
    threading.Thread(target=count_words, name="word count", daemon=True).start()
    end_s = time.monotonic() + THREAD_S
    while time.monotonic() < end_s:
        train_step(model, optimizer)
    lines = Path(__file__).read_text().splitlines()
    marks = {line.rpartition("# line: ")[2]: number for number, line in enumerate(lines, 1) if "  # line: " in line}
    print("COUNTED", json.dumps({"rank": 0, "lines": marks}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
