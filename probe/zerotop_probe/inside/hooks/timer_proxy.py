"""Stands in for the timers of a DeepSpeed optimizer: the same to DeepSpeed, and we hear of start and stop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import Meter, Part

Watchers = dict[str, tuple[Callable[[], None], Callable[[], None]]]


class Timers:
    """``inner`` is DeepSpeed's own: a NoopTimer, or the real thing when its wall-clock breakdown is on."""

    def __init__(self, inner: Any, watchers: Watchers, meter: Meter) -> None:
        """``watchers``: by name of a timer, what to call when it starts and stops."""
        self._inner = inner
        self._watchers = watchers
        self._meter = meter
        self._watched: dict[str, _Timer] = {}

    def __call__(self, name: str) -> Any:
        timer = self._watched.get(name)
        if timer is None:
            watcher = self._watchers.get(name)
            if watcher is None:
                return self._inner(name)
            timer = self._watched[name] = _Timer(self._inner(name), watcher, Part(f"timer {name}", self._meter))
        return timer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce__(self) -> Any:
        # A copy or a pickle of the optimizer takes DeepSpeed's object along, not ours.
        return copy.copy, (self._inner,)


class _Timer:
    def __init__(self, inner: Any, watcher: tuple[Callable[[], None], Callable[[], None]], part: Part) -> None:
        self._inner = inner
        self._starts, self._stops = watcher
        self._part = part

    def start(self, *args: Any, **kwargs: Any) -> Any:
        result = self._inner.start(*args, **kwargs)
        self._part.run(self._starts)
        return result

    def stop(self, *args: Any, **kwargs: Any) -> Any:
        self._part.run(self._stops)
        return self._inner.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)
