"""PyTorch's own history of a device's allocations, which the probe switches on for a few steps.

The history may belong to the job: the probe never switches it on or off while the job uses it, and leaves it to the job if
the job switches it on in the meantime.
"""

from __future__ import annotations

from typing import Any

# An entry takes some hundred bytes of host memory, with its stack some thousand.
MOST_ENTRIES = 1_000_000
MOST_STACK_ENTRIES = 100_000

# Actions that say nothing about the sizes of tensors, in the terms of PyTorch's ``skip_actions``.
_UNNEEDED = ["free_requested", "segment_alloc", "segment_free"]
# The functions of ``torch._C`` with which a job switches its history on and off.
_SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")


class MemoryHistory:
    """The history of one process's CUDA allocator."""

    def __init__(self, memory: Any) -> None:
        """``memory`` is ``torch.cuda.memory``."""
        self._memory = memory
        self._binding: Any = getattr(memory, "_C", None)
        self._originals: dict[str, Any] = {}
        self.is_on = False
        """Whether the probe has switched it on."""

    @property
    def can_ask(self) -> bool:
        """Whether this PyTorch says whether the history is on, without a snapshot."""
        return hasattr(self._binding, "_cuda_isHistoryEnabled")

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        ask = getattr(self._binding, "_cuda_isCurrentStreamCapturing", None)
        return bool(ask is not None and ask())

    def is_in_use(self) -> bool:
        """Return whether the job records its history itself. Without :attr:`can_ask` that takes a snapshot."""
        if self.can_ask:
            return bool(self._binding._cuda_isHistoryEnabled())
        return any(self._memory._snapshot()["device_traces"])

    def start(self, *, stacks: bool, most_entries: int, needed_only: bool = False) -> None:
        """Switch the history on. Only while it is not in use. ``needed_only``: leave out all but allocations and frees."""
        options = {"context": "alloc" if stacks else None, "stacks": "python", "max_entries": most_entries}
        try:
            more = {"skip_actions": _UNNEEDED} if needed_only else {}
            self._memory._record_memory_history("all", **options, **more)
        except TypeError:  # torch before 2.10 cannot leave out any
            self._memory._record_memory_history("all", **options)
        self.is_on = True
        self._watch_switches()

    def stop(self, with_snapshot: bool = True) -> Any | None:
        """Switch the history off, and return PyTorch's snapshot; None if the job has taken the history over."""
        self._unwatch_switches()
        if not self.is_on:
            return None
        self.is_on = False
        try:
            return self._memory._snapshot() if with_snapshot else None
        finally:
            self._memory._record_memory_history(None)

    def _watch_switches(self) -> None:
        for name in _SWITCHES:
            original = getattr(self._binding, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(self._binding, name, self._make_switch(original))

    def _make_switch(self, original: Any) -> Any:
        def switch(*arguments: Any, **options: Any) -> Any:
            self._unwatch_switches()
            self.is_on = False
            return original(*arguments, **options)

        switch.__doc__ = original.__doc__
        return switch

    def _unwatch_switches(self) -> None:
        for name, original in self._originals.items():
            setattr(self._binding, name, original)
        self._originals.clear()
