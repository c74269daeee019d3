"""The shapes of the models' inputs without their rows, as forwards show them: longer sequences, larger images."""

from __future__ import annotations

from typing import Any

from zerotop_probe.inside.inspection.batch_shape import find_inputs
from zerotop_probe.recording.event_values import INPUTS

# Inputs that had more shapes, or an earlier one again, vary: their shape says nothing about a change.
_MOST_SHAPES = 8


class InputShapes:
    """The shapes of the first tensor that each class of model is called with. Two forwards have to show a new one."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        """The shape and dtype by setting, of those that do not vary."""
        self._seen: dict[str, list[Any]] = {}  # the present one is the last
        self._shown_ns: dict[str, int] = {}  # the last forward with the present one
        self._pending: dict[str, int] = {}  # the last forward before a new one that was seen once

    def note(self, module: Any, args: Any, kwargs: Any, time_ns: int) -> tuple[str, int] | None:
        """Note the inputs of a forward of a model; return the setting that is another one now, and until when it was not.

        ``time_ns``: of this forward.
        """
        tensor = find_inputs(args, kwargs)
        if tensor is None or getattr(tensor, "is_nested", False) or len(tensor.shape) < 2:
            return None
        name, shape = f"{INPUTS}{type(module).__name__}", (tensor.shape[1:], getattr(tensor, "dtype", ""))
        seen, shown_ns = self._seen.setdefault(name, []), self._shown_ns.get(name, time_ns)
        self._shown_ns[name] = time_ns
        if not seen:
            self.settings[name] = _describe(*shape)
        elif seen[-1] == shape:
            if (stood_ns := self._pending.pop(name, None)) is None or name not in self.settings:
                return None
            self.settings[name] = _describe(*shape)
            return name, stood_ns
        elif name in self.settings:
            self._pending.setdefault(name, shown_ns)
            if shape in seen or len(seen) >= _MOST_SHAPES:
                del self.settings[name]
        if not seen or name in self.settings:
            seen.append(shape)
        return None


def _describe(sizes: Any, dtype: Any) -> str:
    return f"{' x '.join(str(int(size)) for size in sizes)} {str(dtype).replace('torch.', '')}"
