"""The screens of the monitor, in the order of their numbers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from zerotop.ui.drawing.footer import Tab

if TYPE_CHECKING:
    from zerotop.ui.screens.watching import Watching

_NAMES = ("live", "timeline", "iteration", "memory", "ranks", "threads", "output")
TABS = tuple(Tab(name, name.capitalize()) for name in _NAMES)


def screen_of(name: str) -> type[Watching]:
    """The class of the screen of that name: ``RanksScreen`` of the module ``ranks``, imported when it is first looked at."""
    kind: type[Watching] = getattr(importlib.import_module(f"zerotop.ui.screens.{name}"), f"{name.capitalize()}Screen")
    return kind
