"""Count the replays of CUDA graphs: hooks cannot see what a graph does, so a replayed step is no step of the recording."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import CostMeter, Guard, is_wrapped, now, on_removal
from zerotop_probe.inside.stacks.own_lines import OwnLines
from zerotop_probe.recording import events

_MODULE = "torch.cuda.graphs"
# A record with every power of two, and from here on with each multiple.
_EVERY = 1024


class ReplayCounter:
    """Counts the replays that the job's own code asks for, and those of torch.compile's graphs."""

    def __init__(self, meter: CostMeter) -> None:
        self._guard = Guard("graph replays", meter)
        self._own_lines = OwnLines()
        self._write_event: Callable[..., None] | None = None
        self._names_lines = False
        self.count = self._begin_ns = 0

    def begin_recording(self, write_event: Callable[..., None], *, names_lines: bool) -> None:
        """Count for another recording from now on."""
        self._write_event, self._names_lines, self.count = write_event, names_lines, 0

    def install_hooks(self) -> None:
        """Wrap ``CUDAGraph.replay``. Without effect before PyTorch is loaded, or in one that implements it in C++ alone."""
        owner = getattr(sys.modules.get(_MODULE), "CUDAGraph", None)
        original = vars(owner).get("replay") if owner is not None else None
        if owner is None or original is None or is_wrapped(original):
            return

        @functools.wraps(original)
        def replay(graph: Any) -> Any:
            result = original(graph)
            self.count = count = self.count + 1
            if count % _EVERY == 0 or count & (count - 1) == 0:
                self._guard.run(self._record, count)
            return result

        setattr(replay, "__zerotop__", True)  # noqa: B010 as mypy knows no such attribute
        owner.replay = replay
        on_removal(functools.partial(setattr, owner, "replay", original))

    def _record(self, count: int) -> None:
        time_ns = now()
        self._begin_ns = time_ns if count == 1 else self._begin_ns
        if self._write_event is not None:
            place = self._own_lines.find_place(sys._getframe()) if self._names_lines else None
            facts = place._asdict() if place is not None else {}
            self._write_event(time_ns, events.GraphReplays, begin_ns=self._begin_ns, replays=count, **facts)
