"""Counts the compilations of torch.compile during training, from TorchDynamo's own counters, if it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerotop_probe.inside.guard import now

# TorchDynamo's name for the time of each compilation, backend included; up to PyTorch 2.5 the second.
_WHOLE_COMPILATION = ("_compile.compile_inner", "_compile.<locals>.compile_inner")


class CompiledGraphs(NamedTuple):
    """The graphs that were compiled since the previous look."""

    begin_ns: int  # of that look, CLOCK_MONOTONIC
    graphs: int
    seconds: float | None  # None where this version of PyTorch does not count them


class CompilationCounter:
    """Looks at the counters when asked, which takes some microseconds. Never imports TorchDynamo."""

    def __init__(self) -> None:
        self._looked_ns = now()
        self._graphs, self._seconds = 0, 0.0

    def take_graphs(self, time_ns: int) -> CompiledGraphs | None:
        """Return the compilations since the last look; None if there were none."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        begin_ns, self._looked_ns = self._looked_ns, time_ns
        stats: Mapping[str, int] = getattr(dynamo, "counters", {}).get("stats", {})
        times: Mapping[str, Sequence[float]] = getattr(dynamo, "compilation_time_metrics", {})
        graphs, seconds = stats.get("unique_graphs", 0), sum(sum(times.get(name, ())) for name in _WHOLE_COMPILATION)
        if graphs < self._graphs:  # the job has cleared the counters
            self._graphs, self._seconds = 0, 0.0
        new, spent = graphs - self._graphs, seconds - self._seconds
        self._graphs, self._seconds = graphs, seconds
        if new <= 0:
            return None
        return CompiledGraphs(begin_ns, new, spent if spent > 0 else None)
