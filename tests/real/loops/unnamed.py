import os
import time
from pathlib import Path

import torch

STEPS, MOST_STEPS = 90, 300
kept = []
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def pause():
    time.sleep(0.1)


def is_found():
    """Whether the probe has recorded the list that grows, which takes longer where others use the cores."""
    recording = Path(os.environ["PYTHONZEROTOP_SESSION"])
    return any(b'"growing_containers"' in path.read_bytes() for path in recording.glob("events-rank*"))


torch.set_num_threads(1)
while len(kept) < MOST_STEPS and (len(kept) < STEPS or not is_found()):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.ones(2 << 20))
    pause()
raise ValueError("planned")
