"""DDP's ``no_sync()`` that begins after the forward, in which DDP decides whether the next backward reduces gradients."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from zerotop_probe.inside.changes.bypassed_ddp import REDUCES

# Groups of micro-steps in a row that show it: all backwards of a group but the last one are within no_sync().
_GROUPS = 3


class NoSyncWatch:
    """Follows the forwards and backwards of the steps whose phases are recorded."""

    def __init__(self) -> None:
        self._ddp: weakref.ref[Any] | None = None  # that was called since the last backward
        self._reduces = False  # what its forwards since then decided
        self._late = 0  # micro-steps within a late no_sync() in this group so far
        self._groups = 0  # alike, in a row
        self.micro_steps = 0
        """In each of these groups."""

    @property
    def is_lasting(self) -> bool:
        """Whether the last groups of micro-steps had it."""
        return self._groups >= _GROUPS

    def note_forward(self, ddp: Any) -> None:
        """Note a forward of a DDP in training."""
        facts = vars(ddp)
        # The reducer in Python decides in the backward.
        reduces = facts[REDUCES] and not facts.get("_use_python_reducer") and sys.modules["torch"].is_grad_enabled()
        if self._ddp is None:
            self._ddp, self._reduces = weakref.ref(ddp), reduces
        else:
            self._reduces = self._reduces and reduces and self._ddp() is ddp

    def begin_backward(self) -> None:
        """Compare what the forward decided with what DDP is told now."""
        if self._ddp is None:
            return
        ddp, self._ddp = self._ddp(), None
        if ddp is None or not self._reduces:  # as where no_sync() is around the forward, too
            self._late = self._groups = 0
        elif not vars(ddp)[REDUCES]:
            self._late += 1
        else:
            micro_steps, self._late = self._late + 1, 0
            self._groups = (self._groups if micro_steps == self.micro_steps else 0) + (micro_steps > 1)
            self.micro_steps = micro_steps
