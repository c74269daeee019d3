"""The screens of the monitor, in the order of their numbers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from zerotop.ui.base.bars.footer import Tab

if TYPE_CHECKING:
    from zerotop.ui.base.base_screen import MonitorScreen

_NAMES = ("live", "timeline", "iteration", "memory", "ranks", "threads", "output")
TABS = tuple(Tab(name, name.capitalize()) for name in _NAMES)


def load_screen_class(name: str) -> type[MonitorScreen]:
    """Import and return the screen class of that name: ``RanksScreen`` of ``zerotop.ui.ranks.screen``."""
    kind: type[MonitorScreen] = getattr(importlib.import_module(f"zerotop.ui.{name}.screen"), f"{name.capitalize()}Screen")
    return kind
