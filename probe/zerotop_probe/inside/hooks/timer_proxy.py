"""A proxy for the timers of a DeepSpeed optimizer that calls the probe when a timer starts or stops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard, call_from_c
from zerotop_probe.recording.interruptions import hide_frames

Watchers = dict[str, tuple[Callable[[], None], Callable[[], None]]]


class WatchedTimers:
    """Proxy of ``inner``: DeepSpeed's NoopTimer, or its real timers if wall-clock breakdown is on."""

    def __init__(self, inner: Any, watchers: Watchers, meter: CostMeter) -> None:
        """``watchers``: timer name -> functions to call when it starts and when it stops."""
        self._inner = inner
        self._watchers = watchers
        self._meter = meter
        self._timer_by_name: dict[str, _WatchedTimer] = {}

    def __call__(self, name: str) -> Any:
        timer = self._timer_by_name.get(name)
        if timer is None:
            watcher = self._watchers.get(name)
            if watcher is None:
                return self._inner(name)
            timer = self._timer_by_name[name] = _WatchedTimer(
                self._inner(name), watcher, Guard(f"timer {name}", self._meter)
            )
        return timer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __reduce__(self) -> Any:
        # A copy or a pickle of the optimizer contains DeepSpeed's object, not the proxy.
        return copy.copy, (self._inner,)


class _WatchedTimer:
    def __init__(self, inner: Any, watcher: tuple[Callable[[], None], Callable[[], None]], guard: Guard) -> None:
        self._inner = inner
        self._on_start, self._on_stop = watcher
        self._guard = guard
        self.start, self.stop = call_from_c(self._start), call_from_c(self._stop)

    def _start(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._inner.start(*args, **kwargs)
            self._guard.run(self._on_start)
            return result
        except BaseException as error:
            hide_frames(error)
            raise

    def _stop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._guard.run(self._on_stop)
            return self._inner.stop(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)
