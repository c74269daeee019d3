"""The ways of using torch.compile in a loop, and how many graphs each makes. It knows nothing of zerotop.

The last thing it prints is a line ``COUNTED {...}``: what it saw itself, to compare a recording with.
"""

import json
import os

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

STEPS = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch):
        return torch.relu(self.layer(batch))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, batch):
        return self.blocks(batch)


def compile_module(model, optimizer, graphs):
    return torch.compile(model, backend=graphs, fullgraph=True), optimizer.step


def compile_method(model, optimizer, graphs):
    model.compile(backend=graphs, fullgraph=True)
    return model, optimizer.step


def compile_blocks(model, optimizer, graphs):
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    return model, optimizer.step


def compile_step(model, optimizer, graphs):
    return model, torch.compile(optimizer.step, backend=graphs)


def compile_function(model, optimizer, graphs):
    return torch.compile(lambda batch: model(batch), backend=graphs, fullgraph=True), optimizer.step


def main():
    torch.manual_seed(1)
    counts, losses = {}, []
    for prepare in (compile_module, compile_method, compile_blocks, compile_step, compile_function):
        torch._dynamo.reset()
        graphs, model = CompileCounter(), Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        call, step = prepare(model, optimizer, graphs)
        for _ in range(STEPS):
            loss = call(torch.randn(4, 8)).square().mean()
            loss.backward()
            step()
            optimizer.zero_grad()
            losses.append(loss.item())
        counts[prepare.__name__.removeprefix("compile_")] = graphs.frame_count
    counted = {"rank": 0, "pid": os.getpid(), "graphs": counts, "steps": len(losses), "losses": losses}
    os.write(1, f"COUNTED {json.dumps(counted)}\n".encode())


main()
