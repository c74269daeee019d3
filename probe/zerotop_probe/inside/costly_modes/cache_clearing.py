"""Note which lines empty the cache of PyTorch's allocator, how often and how long that takes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import CostMeter, is_wrapped, on_removal, wrap_plain_function
from zerotop_probe.inside.stacks.own_lines import OwnLines, OwnPlace
from zerotop_probe.recording import events

# What torch.cuda.empty_cache() and torch.accelerator.empty_cache() call. torch.compile knows these two themselves, and would
# break its graph at a wrapper of them.
_MODULE, _FUNCTIONS = "torch._C", ("_cuda_emptyCache", "_accelerator_emptyCache")
# The most lines that are distinguished; a library may call it from many.
_MOST_LINES = 16


class CacheClearing:
    """Counts the calls by line. A line's event is written with its first, second, fourth, eighth call, and so on."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter
        self._write_event: Callable[..., None] | None = None
        self._names_lines = False
        self._own_lines = OwnLines()
        self._calls: dict[OwnPlace | None, _Calls] = {}

    def begin_recording(self, write_event: Callable[..., None], *, names_lines: bool) -> None:
        """Count for another recording from now on; ``names_lines``: by lines of the job's code."""
        self._write_event, self._names_lines, self._calls = write_event, names_lines, {}

    def install_hooks(self) -> None:
        """Count from now on. Without effect before PyTorch is loaded, or where it was built without GPUs."""
        module = sys.modules.get(_MODULE)
        for name in _FUNCTIONS:
            original = getattr(module, name, None)
            if original is not None and not is_wrapped(original):
                wrapper = wrap_plain_function(original, f"{_MODULE}.{name}", _begin_call, self._end_call, self._meter)
                setattr(module, name, wrapper)
                on_removal(functools.partial(setattr, module, name, original))

    def _end_call(self, begin_ns: int, time_ns: int, flags: int, result: Any) -> None:
        if self._write_event is None:
            return
        place = self._own_lines.find_place(sys._getframe()) if self._names_lines else None
        calls = self._calls.get(place)
        if calls is None:
            if len(self._calls) == _MOST_LINES:
                return
            calls = self._calls[place] = _Calls(begin_ns)
        calls.count += 1
        calls.spent_ns += time_ns - begin_ns
        if calls.count & (calls.count - 1) == 0:
            line = place._asdict() if place is not None else {}
            facts = {"begin_ns": calls.begin_ns, "calls": calls.count, "seconds": calls.spent_ns / 1e9}
            self._write_event(time_ns, events.CacheCleared, **facts, **line)


class _Calls:
    """The calls from one line. Times are nanoseconds."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = begin_ns
        self.count = 0
        self.spent_ns = 0


def _begin_call(time_ns: int, subject: Any, args: Any, kwargs: Any) -> int:
    return time_ns
