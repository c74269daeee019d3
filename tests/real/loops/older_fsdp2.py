"""FSDP2 as PyTorch 2.4 and 2.5 have it, on a CPU: a private module, which needs CUDA's streams and a reduce-scatter.

A CPU computes one thing after the other, so that streams and events have nothing to do; gloo reduces all instead.
"""

import contextlib

import torch
import torch._dynamo  # looks at the classes that are replaced below
from torch import distributed


class Nothing:
    """A stream or an event."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return Nothing


def reduce_scatter(output, input, op=distributed.ReduceOp.SUM, group=None, async_op=False):
    whole, ranks = input.clone(), distributed.get_world_size(group)
    distributed.all_reduce(whole, group=group)
    if op == distributed.ReduceOp.AVG:
        whole /= ranks
    output.copy_(whole.chunk(ranks)[distributed.get_rank(group)])


torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Nothing
torch.cuda.stream = contextlib.nullcontext
distributed.reduce_scatter_tensor = reduce_scatter

from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402, F401
