"""What the script calls its model, optimizer and scheduler, for advice that can be pasted. Values are not recorded."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from zerotop_probe.inside.growing_containers.names import get_attributes, is_good, list_variables
from zerotop_probe.inside.stacks.paths import PathNames

_MOST_FRAMES = 64


def find_names(modules: list[Any], optimizers: list[Any], paths: PathNames) -> dict[str, str]:
    """Return the names by ``model``, ``optimizer`` and ``scheduler``, as ``self.net``, in the outermost function with them.

    Those of a loop with several models or optimizers, or whose calling functions do not hold them, are left out.
    """
    model, optimizer = (parts[0] if len(parts) == 1 else None for parts in (modules, optimizers))
    names: dict[str, str] = {}
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        file = paths.name_file(frame.f_code.co_filename)
        if file is not None and file.is_own:
            names |= _name_in_frame(frame, model, optimizer)
        frame = frame.f_back
    return names


def _name_in_frame(frame: FrameType, model: Any, optimizer: Any) -> dict[str, str]:
    variables = dict(list_variables(frame))
    first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""  # self, by whatever name
    own = get_attributes(variables.get(first))
    named = [(f"{first}.{name}", value) for name, value in (own or {}).items()] + list(variables.items())
    found = ((_find_part(value, model, optimizer), name) for name, value in named if is_good(name.rpartition(".")[2]))
    return {part: name for part, name in found if part}


def _find_part(value: Any, model: Any, optimizer: Any) -> str:
    """Return which of them a value is; "" for another one. Calls no code of the script."""
    if value is None:
        return ""
    if value is model or value is optimizer:
        return "model" if value is model else "optimizer"
    if optimizer is None or (get_attributes(value) or {}).get("optimizer") is not optimizer:
        return ""
    methods = {name for one in type(value).__mro__ for name in one.__dict__}
    # Accelerate's wrapper of an optimizer has it as an attribute, too
    return "scheduler" if "get_last_lr" in methods else "optimizer" if "param_groups" in methods else ""
