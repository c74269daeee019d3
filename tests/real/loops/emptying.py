"""A loop that empties the allocator's cache in each step. Without a GPU a sleep stands for what the driver does."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

FIRST = 40


class AddFunction:
    """Adds the function that a build without CUDA lacks, before the hooks on PyTorch are installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Called for each import; finds nothing itself."""
        if name == "torch.optim":
            sys.modules["torch._C"]._cuda_emptyCache = lambda: time.sleep(0.02)  # type: ignore[attr-defined]


sys.meta_path.insert(0, AddFunction)  # type: ignore[arg-type]

import torch  # noqa: E402
from torch.cuda import empty_cache  # noqa: E402

torch.cuda.memory.is_initialized = lambda: True  # type: ignore[attr-defined]


class Waiting(torch.nn.Module):
    """Takes the time of a step, however busy the cores are."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return rows


def tidy_up(step: int) -> None:
    if step >= FIRST:
        empty_cache()  # line: empty


def main() -> None:
    model = torch.nn.Sequential(Waiting(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3 * FIRST):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tidy_up(step)
    # Calls that torch.compile has within a graph stay there.
    compiled = torch.compile(lambda rows: (torch.cuda.empty_cache(), rows + 1)[1], backend="eager", fullgraph=True)
    lines = Path(__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith("  # line: empty"))
    print("COUNTED", json.dumps({"line": line, "compiled": compiled(torch.ones(1)).item()}), flush=True)


if __name__ == "__main__":
    main()
