"""The workers of data loaders, and the dataset that each reads: where one was if it crashes, which leaves no traceback."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from zerotop_probe.inside.guard import CostMeter, now, wrap_method
from zerotop_probe.inside.stacks.paths import name_own_file
from zerotop_probe.recording import events

# Each epoch may start new workers.
_MOST_STARTS = 200
# Datasets of PyTorch that read another one.
_WRAPPERS = "torch.utils.data"
_METHODS = ("__getitems__", "__getitem__", "__iter__")


class LoaderStarts:
    """Notes the workers that one process starts, and records them as soon as it is recorded."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._starts_left = _MOST_STARTS

    def install_hooks(self, module: Any, meter: CostMeter) -> None:
        """Follow the iterators that start workers; ``module`` is ``torch.utils.data.dataloader``."""
        iterator = getattr(module, "_MultiProcessingDataLoaderIter", None)
        if iterator is not None:
            wrap_method(iterator, "__init__", lambda time_ns, one, args, kwargs: one, self._note_start, meter)

    def _note_start(self, iterator: Any, time_ns: int, flags: int, result: Any) -> None:
        if not flags and self._starts_left:
            self._starts_left -= 1
            pids = [pid for worker in vars(iterator)["_workers"] if isinstance(pid := worker.pid, int)]
            self._waiting.append({"workers": pids, **describe_dataset(vars(iterator)["_dataset"])})

    def record(self, write_event: Callable[..., None]) -> None:
        """Record those that were started since the last time."""
        while self._waiting:
            write_event(now(), events.LoaderStarted, **self._waiting.pop(0))


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """Return the class of a dataset within PyTorch's own, and the own function that reads it, without running its code."""
    while type(dataset).__module__.startswith(_WRAPPERS) and "dataset" in vars(dataset):
        dataset = vars(dataset)["dataset"]
    kind = type(dataset)
    facts: dict[str, Any] = {"dataset": kind.__qualname__}
    for base, method in ((base, method) for base in kind.__mro__ for method in _METHODS):
        found = vars(base).get(method)
        if isinstance(found, FunctionType) and (file := name_own_file(found.__code__.co_filename)) is not None:
            code = found.__code__
            return {**facts, "file": file, "line": code.co_firstlineno, "function": found.__qualname__}
    return facts
