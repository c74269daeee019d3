"""The memory screen: bars, the ledger with expected sizes, peaks by phase, and the microscope."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from textual import events
from textual.binding import BindingType

from zerotop.analysis.failures.end import End
from zerotop.analysis.live_view import Gpu, LiveView
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.views.memory_view import MemoryView
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import rank_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.pointed_panel import PointedPanel
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.layout import GAP, Box
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.memory.allocation_lines import count_look_rows, draw_look
from zerotop.ui.memory.clipboard import format_curve, format_ledger, format_peaks
from zerotop.ui.memory.help import TERMS
from zerotop.ui.memory.layout import HINT_ROWS, layout_below_alone, layout_memory, name_below
from zerotop.ui.memory.ledger_bars import describe_bar, draw_gpu_bars, draw_host_bars, find_rank
from zerotop.ui.memory.ledger_curve import describe_curve, draw_curve
from zerotop.ui.memory.ledger_estimates import draw_estimates
from zerotop.ui.memory.ledger_peaks import draw_health, draw_peaks
from zerotop.ui.memory.ledger_table import draw_gpu_ledger, draw_host_ledger
from zerotop.ui.memory.memory_history import describe_history, draw_history
from zerotop.ui.memory.model import MemoryModel, can_request_trace, describe_hint
from zerotop.ui.memory.what_if_dialog import WhatIfDialog

_HISTORY_WIDTH = 64  # cells of a chart under the ledger from which on there are two


class MemoryPanel(PointedPanel, can_focus=True):
    """A panel of the memory screen. The mouse shows the values of charts."""

    def __init__(self, model: MemoryModel, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.model = model

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        view = self.model.view_at(frame)
        return self.draw_view(view, frame, width, height, self.model.shows_host(view))

    @abstractmethod
    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        """Draw a view of the host's memory or a GPU's."""

    def describe_cell(self, frame: Frame, x: int, y: int) -> str:
        view = self.model.view_at(frame)
        return self.describe_view(view, frame, self.size.width, x, self.model.shows_host(view))

    def describe_view(self, view: MemoryView, frame: Frame, width: int, x: int, host: bool) -> str:
        """Return the values at a column of a chart; empty in a table."""
        return ""

    @property
    def memory_view(self) -> MemoryView | None:
        """The view at the current frame."""
        return self.model.view_at(self.frame) if self.frame is not None else None


class MemoryBars(MemoryPanel):
    """A bar for each GPU or rank; a click chooses a rank."""

    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        draw = draw_host_bars if host else draw_gpu_bars
        return draw(view, width, height, self.glyphs, focused=self.has_focus)

    def describe_view(self, view: MemoryView, frame: Frame, width: int, x: int, host: bool) -> str:
        return describe_bar(x, view, width, host=host)

    def on_click(self, event: events.Click) -> None:
        view = self.model.last_view
        rank = find_rank(event.x, view, self.size.width, host=self.model.shows_host(view)) if view is not None else None
        if rank is not None:
            self.post_message(MonitorScreen.RankChosen(rank))


class MemoryLedger(MemoryPanel):
    """The chosen GPU's or rank's memory, row by row, with the expected sizes."""

    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        draw = draw_host_ledger if host else draw_gpu_ledger
        return draw(view, width, height, self.glyphs, focused=self.has_focus)

    def copy_text(self) -> str:
        """Return every row, in bytes."""
        view = self.memory_view
        return "" if view is None else format_ledger(view.host_lines if self.model.shows_host(view) else view.lines)


class PhasePeaks(MemoryPanel):
    """The peak of each phase; for host memory its recent history."""

    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        if not host:
            return draw_peaks(view, width, height, self.glyphs, focused=self.has_focus)
        return _draw_ranks_history(frame.view, width, height, self.glyphs, focused=self.has_focus)

    def describe_view(self, view: MemoryView, frame: Frame, width: int, x: int, host: bool) -> str:
        return describe_history(frame.view, None, width, x) if host else ""

    def copy_text(self) -> str:
        """Return every phase, in bytes; for host memory the drawn text."""
        view = self.memory_view
        if view is None or self.model.shows_host(view):
            return self.plain_text()
        return format_peaks(view.peaks.phases) if view.peaks is not None else ""


class MemoryHistoryPanel(MemoryPanel):
    """The recent memory of the GPU, and beside it the host's if both fit."""

    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        if view.gpu is None:
            return [fit_row((), width, self.glyphs)] * height
        gpu, left = _find_gpu(view, frame), _measure_left(width)
        focused, name = self.has_focus, f"GPU {view.gpu.index}"
        rows = _draw_history(f"Memory of {name}", name, gpu, frame.view, (left, height), self.glyphs, focused=focused)
        if left == width:
            return rows
        right = _draw_ranks_history(frame.view, width - left - GAP, height, self.glyphs, focused=focused)
        gap = (" " * GAP, "text")
        return [(*row, gap, *other) for row, other in zip(rows, right, strict=True)]

    def describe_view(self, view: MemoryView, frame: Frame, width: int, x: int, host: bool) -> str:
        left = _measure_left(width)
        if x < left:
            gpu = _find_gpu(view, frame)
            return describe_history(frame.view, gpu, left, x) if gpu is not None else ""
        return describe_history(frame.view, None, width - left - GAP, x - left - GAP)


class TraceCurve(MemoryPanel):
    """The allocation trace; without one, the lines that allocate the most."""

    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        hint = describe_hint(frame, view)
        look = view.look if view.trace is None else None
        needed = min(count_look_rows(look), height // 2) if look is not None else HINT_ROWS
        below = [] if view.trace is not None else draw_estimates(view, width, height - needed, self.glyphs)
        above = needed if below else height
        if look is not None:
            peak = view.peaks.owning_peak if view.peaks is not None else None
            rows = draw_look(look, peak, hint, (width, above), self.glyphs, focused=self.has_focus)
        else:
            rows = draw_curve(view.trace, hint, width, above, self.glyphs, focused=self.has_focus)
        return fit_height([*rows, *below], width, height, self.glyphs)

    def describe_view(self, view: MemoryView, frame: Frame, width: int, x: int, host: bool) -> str:
        return describe_curve(view.trace, width, x) if view.trace is not None else ""

    def copy_text(self) -> str:
        """Return all allocations and frees."""
        view = self.memory_view
        return format_curve(view.trace) if view is not None and view.trace is not None else ""


class AllocatorHealthPanel(MemoryPanel, can_focus=False):
    """The state of PyTorch's allocator."""

    def draw_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        return [draw_health(view, width, self.glyphs)]


def _find_gpu(view: MemoryView, frame: Frame) -> Gpu | None:
    """Return the chosen GPU as last sampled."""
    key = (view.gpu.host, view.gpu.index) if view.gpu is not None else None
    return next((gpu for gpu in frame.view.gpus if (gpu.host, gpu.index) == key), None)


def _measure_left(width: int) -> int:
    """Return the cells of the GPU's chart: half of a wide panel, beside the host's, else all."""
    return (width - GAP) // 2 if width >= 2 * _HISTORY_WIDTH + GAP else width


def _draw_ranks_history(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool) -> list[Row]:
    return _draw_history("Resident memory of all ranks", "all ranks", None, view, (width, height), glyphs, focused=focused)


def _draw_history(
    title: str, name: str, gpu: Gpu | None, view: LiveView, size: tuple[int, int], glyphs: Glyphs, *, focused: bool
) -> list[Row]:
    """Draw the recent memory of a GPU, or (None) of all ranks on the host, under a title."""
    width, height = size
    head = draw_rule(((f"{title}, {giga_unit().name}", "title-focused" if focused else "title"),), width, glyphs)
    return [head, *draw_history(view, name, gpu, width, max(2, height - 1), glyphs)][:height]


class MemoryScreen(MonitorScreen):
    """Shows the purpose of each part of the memory."""

    NAME = "memory"
    TITLE = "Memory"
    HELP = "What uses the memory of each GPU and host, what was expected, and which phase sets the peak."
    TERMS = TERMS

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("x", "app.look", "memory.look", "Microscope", "Record every allocation of the next step", 7),
        bind("b", "below", "memory.below", "Peaks", "Show the panels for which there is no room, or the ledger again", 7),
        bind("H", "host", "memory.host", "Host", "Switch between GPU and host memory", 6),
        bind("w", "what_if", "memory.what_if", "What if", "The memory and time of this training at other settings", 6),
        *rank_bindings("memory.rank.before", "memory.rank.next", importance=5),
    ]

    main_panel = "ledger"

    def find_post_mortem(self, frame: Frame) -> End | None:
        return frame.failure if frame.failure is not None and frame.failure.memory is not None else None

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(glyphs, source)
        self.model = MemoryModel(source)
        self._lacks_room = False  # panels are left out
        self._shows_below = False  # in place of the ledger, if so

    def build_panels(self) -> Iterable[FrameWidget]:
        yield MemoryBars(self.model, self.glyphs, id="bars")
        yield MemoryLedger(self.model, self.glyphs, id="ledger")
        yield MemoryHistoryPanel(self.model, self.glyphs, id="past")
        yield PhasePeaks(self.model, self.glyphs, id="peaks")
        yield TraceCurve(self.model, self.glyphs, id="curve")
        yield AllocatorHealthPanel(self.model, self.glyphs, id="health")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        view = self.model.view_at(frame)
        boxes = layout_memory(room, view, host=self.model.shows_host(view))
        self._lacks_room = "ledger" in boxes and not boxes.keys() & {"peaks", "curve", "past"}
        return layout_below_alone(room, view, host=self.model.shows_host(view)) if self._is_below_shown else boxes

    @property
    def _is_below_shown(self) -> bool:
        return self._lacks_room and self._shows_below

    def label_keys(self, frame: Frame) -> dict[str, str]:
        view = self.model.view_at(frame)
        is_host = self.model.shows_host(view)
        labels = {} if can_request_trace(frame, view) else {"memory.look": ""}
        labels["memory.below"] = "" if not self._lacks_room else "ledger" if self._shows_below else name_below(view, is_host)
        return labels | {"memory.host": "" if not view.gpus else "GPU" if is_host else "host"}

    def action_below(self) -> None:
        """Show the panels that are left out instead of the ledger, or the ledger again."""
        if not self._lacks_room:
            self.notify("All panels are shown: there is room for them.", timeout=3)
        self.request_redraw(self._switch_below)

    def _switch_below(self) -> None:
        self._shows_below = not self._shows_below

    def action_host(self) -> None:
        """Switch between the GPU's memory and the host's."""
        self.request_redraw(self.model.toggle_host)

    def action_what_if(self) -> None:
        """Ask what the training on screen would need at other settings."""
        self.request_redraw(self.model.read_baseline, self._open_what_if)

    def _open_what_if(self, base: Baseline | str) -> None:
        if isinstance(base, str):
            self.notify(base, title="What if", severity="warning", markup=False)
        else:
            self.app.push_screen(WhatIfDialog(base, self.glyphs))
