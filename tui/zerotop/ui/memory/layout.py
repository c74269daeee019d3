"""The layout of the panels of the memory screen."""

from __future__ import annotations

from zerotop.analysis.views.memory_view import MemoryView
from zerotop.ui.drawing.layout import GAP, Box
from zerotop.ui.memory.ledger_bars import measure_bars
from zerotop.ui.memory.ledger_table import count_ledger_rows

HINT_ROWS = 4  # rows that how to get a look takes
_TABLE_WIDTH = 66  # cells that the ledger needs
_SIDE_BY_SIDE_WIDTH = 78  # from this width, bars stand beside the ledger
_MIN_ROWS_BELOW = 6  # rows that peaks and the microscope need
_TWO_BELOW_WIDTH = 96
_MIN_HISTORY_ROWS = 8  # rows that a chart under the ledger needs


def layout_memory(room: Box, view: MemoryView, *, host: bool) -> dict[str, Box]:
    """Place bars and the ledger above, peaks and the microscope below if they fit, the allocator's line last."""
    boxes: dict[str, Box] = {}
    height = room.height
    if not host and view.health is not None and height >= 12:
        height -= 1
        boxes["health"] = Box(room.x, room.y + height, room.width, 1)
    wanted = max(7, count_ledger_rows(view, host=host))
    upper = height if height - wanted < _MIN_ROWS_BELOW else max(wanted, height - _count_rows_below(view, height, host=host))
    if room.width >= _SIDE_BY_SIDE_WIDTH:
        bars = measure_bars(view, room.width - _TABLE_WIDTH - GAP, host=host)
        boxes["bars"] = Box(room.x, room.y, bars, upper)
        ledger = upper if host or upper - wanted < _MIN_HISTORY_ROWS else wanted
        boxes["ledger"] = Box(room.x + bars + GAP, room.y, room.width - bars - GAP, ledger)
        if ledger < upper:
            boxes["past"] = Box(room.x + bars + GAP, room.y + ledger, room.width - bars - GAP, upper - ledger)
    else:
        boxes["ledger"] = Box(room.x, room.y, room.width, upper)
    below = Box(room.x, room.y + upper, room.width, height - upper)
    return boxes | (_layout_below(below, view, host=host) if below.height else {})


def layout_below_alone(room: Box, view: MemoryView, *, host: bool) -> dict[str, Box]:
    """Place the panels below the ledger in its place: side by side, or one below the other."""
    if host or _is_only_watched(view) or room.width >= _TWO_BELOW_WIDTH:
        return _layout_below(room, view, host=host)
    phases = 1 + (len(view.peaks.phases) if view.peaks is not None else 1)
    upper = min(phases, room.height - _MIN_ROWS_BELOW)
    if upper < 3:
        return _layout_below(room, view, host=host)
    lower = Box(room.x, room.y + upper, room.width, room.height - upper)
    return {"peaks": Box(room.x, room.y, room.width, upper), "curve": lower}


def name_below(view: MemoryView, host: bool) -> str:
    """Return the names of the panels for which there is no room."""
    return "history" if host or _is_only_watched(view) else "peaks"


def _count_rows_below(view: MemoryView, height: int, *, host: bool) -> int:
    """Return the rows below the ledger: half of all for a chart, else as many as the tables need."""
    if not host and _is_only_watched(view):
        return height
    if host or view.trace is not None or not view.gpus:
        return max(12, height - height // 2)
    phases = len(view.peaks.phases) if view.peaks is not None else 1
    return max(12, 1 + phases, HINT_ROWS + 2 + len(view.estimates))


def _is_only_watched(view: MemoryView) -> bool:
    """Whether there is no data from inside the ranks, so that only the GPU's memory over time can be shown."""
    return view.gpu is not None and view.peaks is None and view.trace is None and not view.estimates


def _layout_below(room: Box, view: MemoryView, *, host: bool) -> dict[str, Box]:
    if host:
        return {"peaks": room}
    if _is_only_watched(view):
        return {"past": room}
    if room.width < _TWO_BELOW_WIDTH:
        return {"curve" if view.trace is not None else "peaks": room}
    left = min(68, (room.width - GAP) * 2 // 5)
    right = Box(room.x + left + GAP, room.y, room.width - left - GAP, room.height)
    return {"peaks": Box(room.x, room.y, left, room.height), "curve": right}
