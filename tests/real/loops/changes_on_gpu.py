"""A loop whose training or memory changes after some seconds, in a known line. Arguments: what changes, device.

unfreeze, method, float, recompute, optimizer, option, hook: the training itself. view, hook, state: what the script keeps;
stream, graph: memory that only a stream or a graph can use. oom: one step with eight times the tokens. replay: all further
steps are replays of one CUDA graph. by_hand: parameters are updated in hooks of their gradients. context: rank 1 loads a
file onto rank 0's GPU. It prints COUNTED {...}.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

KIND, DEVICE = sys.argv[1], sys.argv[2]
ON_GPU = DEVICE == "cuda"
ROWS, TOKENS, WIDTH, WORDS, LAYERS = (8, 512, 1024, 16000, 8) if ON_GPU else (2, 32, 64, 100, 2)
SECONDS = 4.0 if ON_GPU else 3.0
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
GIB = 1 << 30


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recompute = KIND == "recompute"
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(hidden))))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.mix, hidden, use_reentrant=False) if self.recompute else self.mix(hidden)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Keeper:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def keep_output(self, module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        self.seen.append(output.detach())  # line: keep


def set_trainable(model: Model) -> None:
    for parameter in model.blocks.parameters():
        parameter.requires_grad = True  # line: unfreeze


def use_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        whole = torch.empty(8 * GIB, dtype=torch.uint8, device=DEVICE)
    stream.synchronize()
    del whole


def make_graph() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph, source = torch.cuda.CUDAGraph(), torch.zeros(256 << 20, device=DEVICE)
    with torch.cuda.graph(graph):
        result = (source + 1).sum()
    return graph, result


def change(model: Model, optimizer: torch.optim.Optimizer, keeper: Keeper) -> torch.optim.Optimizer:
    if KIND == "unfreeze":
        set_trainable(model)
        return torch.optim.AdamW(model.parameters(), fused=ON_GPU)
    if KIND == "method":
        getattr(model.blocks, "requires_grad_")(True)  # noqa: B009  # line: method
        return torch.optim.AdamW(model.parameters(), fused=ON_GPU)
    if KIND == "float":
        model.to(torch.float32 if ON_GPU else torch.float64)  # line: float
        return torch.optim.AdamW(model.parameters(), fused=ON_GPU)
    if KIND == "recompute":
        for block in model.blocks:
            block.recompute = False  # line: recompute
    if KIND == "optimizer":
        return torch.optim.AdamW(model.parameters(), foreach=False, fused=False)  # line: optimizer
    if KIND == "option":
        for group in optimizer.param_groups:
            group["foreach"] = False  # line: option
    if KIND == "hook":
        model.blocks[1].register_forward_hook(keeper.keep_output)  # line: hook
    return optimizer


def train_step(model: Model, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, logits


def replay_steps(model: Model, tokens: torch.Tensor) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(model, optimizer, tokens)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_step(model, optimizer, tokens)
    steps, end = 0, time.monotonic() + 20
    while time.monotonic() < end:
        graph.replay()  # line: replay
        torch.cuda.synchronize()
        steps += 1
    return steps


def update_by_hand(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-5)  # type: ignore[arg-type]
    parameter.grad = None


def load_elsewhere() -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save({"weight": torch.zeros(1 << 20, device="cuda:0")}, path)
        return torch.load(path)  # line: load


def main() -> None:
    torch.manual_seed(1)
    counted: dict[str, object] = {}
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if ON_GPU:
        torch.cuda.set_device(rank)
    if KIND == "context" and rank:
        load_elsewhere()
    model = Model().to(DEVICE, DTYPE)
    if KIND in ("unfreeze", "method"):
        model.blocks.requires_grad_(False)
    tokens = torch.randint(WORDS, (ROWS, TOKENS), device=DEVICE)
    if KIND == "replay":
        counted["replays"] = replay_steps(model, tokens)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if KIND == "by_hand":
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(update_by_hand)
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()} if KIND == "state" else {}
    if KIND == "stream":
        use_stream()
    made = make_graph() if KIND == "graph" else None
    if KIND == "oom" and ON_GPU:
        torch.cuda.set_per_process_memory_fraction(8 * GIB / torch.cuda.get_device_properties(0).total_memory)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, fused=ON_GPU and KIND != "option")
    keeper, views, step = Keeper(), [], 0
    begin, changed = time.monotonic(), False
    while KIND != "replay" and time.monotonic() < begin + 2.5 * SECONDS:
        if not changed and time.monotonic() > begin + SECONDS:
            changed, counted["first"] = True, step
            optimizer = change(model, optimizer, keeper)
            if KIND == "oom":
                tokens = torch.randint(WORDS, (ROWS, 8 * TOKENS), device=DEVICE)
        if KIND == "by_hand":
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        else:
            try:
                loss, logits = train_step(model, optimizer, tokens)
            except torch.OutOfMemoryError:
                counted |= {"step": step, "allocated": torch.cuda.memory_allocated()}
                break
        loss.item()
        if KIND == "view" and changed and step % 2:
            views.append(logits[:, -1].detach())  # line: view
        step += 1
    if ON_GPU:
        counted["allocated_at_end"] = torch.cuda.memory_allocated()
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    marks = {found[1]: number for number, line in lines if (found := re.search(r"  # line: (\w+)$", line))}
    print("COUNTED", json.dumps(counted | {"steps": step, "lines": marks}), flush=True)
    time.sleep(1.5)  # so that NVML is read once more
    del made, kept


if __name__ == "__main__":
    main()
