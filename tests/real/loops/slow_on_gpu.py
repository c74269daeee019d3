"""A loop that is slow in known lines on a GPU. Arguments: what is slow (nothing, empty, collect), steps, device."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

KIND, STEPS, DEVICE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# The first slow step.
FIRST = STEPS // 2


def clean_up(step: int) -> None:
    if KIND == "empty" and step >= FIRST:
        torch.cuda.empty_cache()  # line: empty
    if KIND == "collect" and step >= FIRST:
        gc.collect()  # line: collect


def main() -> None:
    junk = [[number] for number in range(1_000_000)]
    # On a GPU many large gradients and few rows: what an emptied cache has to allocate anew takes longer than the step.
    layers, width = (48, 2048) if DEVICE == "cuda" else (12, 256)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    total = 0.0
    for step in range(STEPS):
        rows = torch.randn(256, width, device=DEVICE)
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()  # waits for the GPU, as in most loops
        clean_up(step)
    lines = Path(__file__).read_text().splitlines()
    marks = {line.rpartition("# line: ")[2]: number for number, line in enumerate(lines, 1) if ")  # line: " in line}
    print("COUNTED", json.dumps({"junk": len(junk), "first": FIRST, "lines": marks}), flush=True)


if __name__ == "__main__":
    main()
