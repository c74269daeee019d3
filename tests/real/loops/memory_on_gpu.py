"""A language model's loop that needs memory in known lines. Arguments: what it does, steps, device.

nothing; leak: keeps a tensor of each step from the middle on; jump: an operation that takes more from the middle on;
rows: twice the rows from the middle on; eval: evaluates with four times the rows; own: records PyTorch's history itself
from the middle on. It prints COUNTED {...}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

KIND, STEPS, DEVICE = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# The first step that does it.
FIRST = STEPS // 2
ON_GPU = DEVICE == "cuda"
ROWS, TOKENS, WIDTH, WORDS = (16, 512, 512, 16000) if ON_GPU else (2, 16, 32, 100)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(hidden))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(8)])
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(widen_batch(hidden, step))  # line: logits


def widen_batch(hidden: torch.Tensor, step: int) -> torch.Tensor:
    if KIND == "jump" and step >= FIRST:
        wide = hidden.repeat(1, 1, 100)  # line: jump
        return hidden * wide.square().mean()
    return hidden


def leak_memory(kept: list[torch.Tensor], loss: torch.Tensor, step: int) -> None:
    if KIND == "leak" and step >= FIRST:
        kept.append(torch.full((8 << 20,), loss.item(), device=DEVICE))  # line: leak


def evaluate_model(model: Model, step: int) -> None:
    if KIND == "eval" and step % (STEPS // 6) == STEPS // 12:
        model.eval()
        with torch.no_grad():
            for _ in range(4):
                logits = model(torch.randint(WORDS, (4 * ROWS, TOKENS), device=DEVICE), step)
                logits.softmax(-1).max().item()
        model.train()


def record_history(step: int) -> None:
    if KIND == "own" and step == FIRST:
        torch.cuda.memory._record_memory_history(max_entries=50_000)


def main() -> None:
    torch.manual_seed(1)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[torch.Tensor] = []
    losses, seconds = [], []
    begin = time.perf_counter()
    for step in range(STEPS):
        rows = 2 * ROWS if KIND == "rows" and step >= FIRST else ROWS
        tokens = torch.randint(WORDS, (rows, TOKENS), device=DEVICE)
        record_history(step)
        logits = model(tokens[:, :-1], step)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())  # line: loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        leak_memory(kept, loss, step)
        evaluate_model(model, step)
        end = time.perf_counter()
        seconds.append(end - begin)
        begin = end
    facts = {"first": FIRST, "losses": losses, "seconds": seconds}
    if KIND == "own":
        (history,) = (one for one in torch.cuda.memory._snapshot()["device_traces"] if one)
        facts["entries"] = len(history)
    lines = Path(__file__).read_text().splitlines()
    facts["lines"] = {
        line.rpartition("# line: ")[2]: number for number, line in enumerate(lines, 1) if ")  # line: " in line
    }
    print("COUNTED", json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
