"""Counts the compilations of torch.compile during training, from TorchDynamo's own counters, if it is loaded.

TorchDynamo keeps why it compiled again, too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zerotop_probe.inside.guard import now
from zerotop_probe.recording.interruptions import suppress_own

# TorchDynamo's name for the time of each compilation, backend included; up to PyTorch 2.5 the second.
_MOST_GUARDS, _LONGEST_GUARD = 4, 120
# ``0/1: self.every == 1    # if i % self.every:  # run/train.py:40 in forward (HINT: ...)``, and the stack beneath it.
_GUARD = re.compile(r"(?:\d+/\d+: )?(.*?)\s*(?:#.*)?$")
_TEXT = re.compile(r"(==|!=) (['\"]).*\2")
_STACK_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_SETTING = re.compile(r"torch\._dynamo\.config\.(\w+)")
_WHOLE_COMPILATION = ("_compile.compile_inner", "_compile.<locals>.compile_inner")


class CompiledGraphs(NamedTuple):
    """The graphs that were compiled since the previous look."""

    begin_ns: int  # of that look, CLOCK_MONOTONIC
    graphs: int
    seconds: float | None  # None where this version of PyTorch does not count them
    failed: list[dict[str, Any]]  # facts of ``FailedGuard``, the first one first


class CompilationCounter:
    """Looks at the counters when asked, which takes some microseconds. Never imports TorchDynamo."""

    def __init__(self) -> None:
        self.name_file: Callable[[str], str | None] = lambda path: None
        """Returns the name of a file of the job's own code, by its path; None for other files."""
        self._looked_ns = now()
        self._graphs, self._seconds = 0, 0.0
        self._last: Any = None  # TorchDynamo's record of a compilation

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
        failed: list[dict[str, Any]] = []
        with suppress_own(Exception):  # its records differ by version
            failed = self._take_guards(dynamo)
        return CompiledGraphs(begin_ns, new, spent if spent > 0 else None, failed)

    def _take_guards(self, dynamo: Any) -> list[dict[str, Any]]:
        known = list(getattr(dynamo, "_compilation_metrics", ()))  # 64 at most
        first = next((number + 1 for number, one in enumerate(known) if one is self._last), 0)
        fresh, self._last = known[first:], known[-1] if known else None
        again = [one for one in fresh if getattr(one, "recompile_reason", None)]
        return [self._describe_guard(one) for one in again[-_MOST_GUARDS:]]

    def _describe_guard(self, metrics: Any) -> dict[str, Any]:
        head, _, stack = str(metrics.recompile_reason).partition("\n")
        guard, setting = _GUARD.match(head), _SETTING.search(head)
        facts: dict[str, Any] = {"guard": _TEXT.sub(r"\1 ...", guard[1])[:_LONGEST_GUARD] if guard is not None else ""}
        facts |= {"setting": setting[1]} if setting is not None else {}
        begun = (metrics.co_filename, metrics.co_firstlineno, metrics.co_name)
        places = (
            (self.name_file(path), line, function) for path, line, function in (*_STACK_LINE.findall(stack)[::-1], begun)
        )
        name, line, function = next((place for place in places if place[0]), (None, 0, ""))
        return facts | ({"file": name, "line": int(line), "function": function} if name else {})
