"""What jobs of the tests import of PyTorch's compiler: nothing until they compile, and then all of it."""

from __future__ import annotations

import subprocess
import sys

from real_jobs import make_environment

JOB = """
import sys, torch
def has_compiler(): return "torch._dynamo.eval_frame" in sys.modules
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([parameter])
def train():
    parameter.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
train()
print(has_compiler(), "torch._inductor" in sys.modules)
from deepspeed.runtime import compiler
graphs = []
def note_graph(graph, inputs):
    graphs.append(graph)
    return graph.forward
torch.compile = lambda function, compile=torch.compile: compile(function, backend=note_graph)
double = compiler.compile()(lambda x: 2 * x)
print(has_compiler(), len(graphs))
print(double(parameter.detach()).tolist() == (2 * parameter).tolist(), has_compiler(), len(graphs))
from torch._dynamo import disable, graph_break
print(disable.__module__, graph_break.__module__)
train()
"""


def test_it_is_there_once_something_is_compiled() -> None:
    command = [sys.executable, "-W", "ignore", "-c", JOB]
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-4:]
    assert lines == ["False False", "False 0", "True True 1", "torch._dynamo.decorators torch._dynamo.decorators"]
