"""Gradients that are clipped while they are still multiplied by the loss scale: ``scaler.unscale_`` was not called."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import is_wrapped, on_removal
from zerotop_probe.inside.stacks import code_positions
from zerotop_probe.inside.stacks.paths import PathNames

_MODULE = "torch.nn.utils.clip_grad"
# What ``clip_grad_norm_`` calls in its module: scripts import ``clip_grad_norm_`` itself by name. Absent in older versions.
_FUNCTION = "_clip_grads_with_norm_"
_CALL = "clip_grad_norm_()"
# Updates in a row that show it.
_UPDATES = 3


class ClippingWatch:
    """Follows from update to update whether a norm was clipped. A call costs a Python call more."""

    def __init__(self) -> None:
        self._max_norm: float | None = None  # of the last call since an update
        self._updates = 0

    def install_hooks(self) -> None:
        """Wrap PyTorch's function. Without effect before it is loaded."""
        module = sys.modules.get(_MODULE)
        original = getattr(module, _FUNCTION, None)
        if original is not None and not is_wrapped(original):
            setattr(module, _FUNCTION, self._wrap(original))
            on_removal(functools.partial(setattr, module, _FUNCTION, original))

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # torch.compile traces it: it does nothing else.
        @functools.wraps(original)
        def call_original(*args: Any, **kwargs: Any) -> Any:
            norm = args[1] if len(args) > 1 else kwargs.get("max_norm")
            self._max_norm = norm if type(norm) in (int, float) else None
            return original(*args, **kwargs)

        setattr(call_original, "__zerotop__", True)  # noqa: B010 as mypy knows no such attribute
        return call_original

    def end_update(self, scaler: Any, optimizer: Any, scale: float | None, *, is_only: bool) -> dict[str, Any] | None:
        """Follow ``scaler.step(optimizer)`` as it begins. Returns the facts of an event once, else None.

        ``is_only``: no other optimizer may have the gradients that were clipped.
        """
        max_norm, self._max_norm = self._max_norm, None
        is_small = max_norm is not None and scale is not None and 0 < max_norm < scale
        if not is_small or not is_only or _is_unscaled(scaler, optimizer):
            self._updates = min(0, self._updates)
            return None
        self._updates += 1
        if self._updates != _UPDATES:
            return None
        self._updates = -sys.maxsize
        paths = PathNames.for_this_process()
        places = {use.place for use in code_positions.find_uses((_CALL,), sys._getframe(), paths, ())}
        place = places.pop()._asdict() if len(places) == 1 else {}
        return {"updates": _UPDATES, "max_norm": max_norm, "loss_scale": scale, **place}


def _is_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Return whether a scaler has divided the gradients of an optimizer by the loss scale, or that is unknown."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        return True
    state = states.get(id(optimizer))
    return state is not None and getattr(state.get("stage"), "name", "") != "READY"
