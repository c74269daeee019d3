"""Pipeline parallelism, where the engine executes a schedule of instructions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import AfterHook, BeforeHook, is_wrapped, on_removal, wrap_function, wrap_method
from zerotop_probe.inside.hooks.engine_hooks import EngineHooks
from zerotop_probe.inside.probe import Probe

_EXCHANGED = ("Activation", "Grad")
# The other stages wait for the last one in these, as it knows the loss.
_WAITS = ("_aggregate_total_loss", "_bcast_pipe_scalar")


def install_pipeline(engine_class: Any, hooks: EngineHooks, probe: Probe) -> None:
    """Wrap the functions that execute instructions; the forward is that of the base engine."""
    around_instruction: dict[str, tuple[BeforeHook, AfterHook]] = {
        "BackwardPass": (hooks.begin_backward, hooks.end_backward),
        "OptimizerStep": (hooks.begin_step, hooks.end_step),
        "LoadMicroBatch": (hooks.make_phase_hook("data"), hooks.end_span),
        **{f"Recv{what}": (hooks.make_phase_hook("stage_wait"), hooks.end_span) for what in _EXCHANGED},
        **{f"Send{what}": (hooks.make_phase_hook("stage_send"), hooks.end_span) for what in _EXCHANGED},
    }
    instructions: dict[type, Callable[..., Any]] = engine_class._INSTRUCTION_MAP
    for instruction, function in list(instructions.items()):
        if instruction.__name__ in around_instruction and not is_wrapped(function):
            before, after = around_instruction[instruction.__name__]
            where = f"{engine_class.__name__}.{instruction.__name__}"
            counting = None if instruction.__name__ == "OptimizerStep" else probe.counting
            instructions[instruction] = wrap_function(function, where, before, after, probe.meter, counting)
            on_removal(functools.partial(instructions.__setitem__, instruction, function))
    for name in _WAITS:
        wrap_method(engine_class, name, hooks.make_phase_hook("stage_wait"), hooks.end_span, probe.meter, probe.counting)
    wrap_method(engine_class, "eval_batch", hooks.make_phase_hook("eval"), hooks.end_span, probe.meter)
