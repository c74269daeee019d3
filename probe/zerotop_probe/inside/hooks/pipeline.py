"""Pipeline parallelism: its engine trains by a schedule of instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import After, Before, around, is_wrapped, on_removal, wrapped
from zerotop_probe.inside.hooks.engine_hooks import Hooks
from zerotop_probe.inside.probe import Probe


def install_pipeline(engine_class: Any, hooks: Hooks, probe: Probe) -> None:
    """Wraps the functions that carry out the instructions; forward is done by the base engine's own."""
    around_instruction: dict[str, tuple[Before, After]] = {
        "BackwardPass": (hooks.backward_begins, hooks.backward_ends),
        "OptimizerStep": (hooks.step_begins, hooks.step_ends),
        "LoadMicroBatch": (hooks.phase("data"), hooks.ends),
    }
    instructions: dict[type, Callable[..., Any]] = engine_class._INSTRUCTION_MAP
    for instruction, function in list(instructions.items()):
        if instruction.__name__ in around_instruction and not is_wrapped(function):
            before, after = around_instruction[instruction.__name__]
            where = f"{engine_class.__name__}.{instruction.__name__}"
            instructions[instruction] = wrapped(function, where, before, after, probe.meter)
            on_removal(functools.partial(instructions.__setitem__, instruction, function))
    around(engine_class, "eval_batch", hooks.phase("eval"), hooks.ends, probe.meter)
