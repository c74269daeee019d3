"""Keep hooks out of graphs that torch.compile makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hide_from_compiler(function: Callable[..., Any], *, with_callees: bool = True) -> None:
    """Tell torch.compile to run this Python function as it is, when a graph break lets it be called.

    Otherwise its frame would be compiled for itself, and again for other arguments. ``with_callees``: and all that it calls.
    Without effect in a torch that has no such switch; torch._dynamo is not imported.
    """
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:  # it is written in C
        return
    try:
        actions = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(actions.SKIP, actions.SKIP if with_callees else actions.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    except AttributeError:
        skip = getattr(eval_frame, "skip_code", None)
        if skip is not None:
            skip(code)
