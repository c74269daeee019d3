"""Where memory is: bars, the ledger with what was expected, who owns the peak, and the microscope."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from zerotop.analysis.live_view import Gpu, LiveView
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.ui.base.base_screen import Watching
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import GAP, Box
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled, to_height
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.units import giga
from zerotop.ui.memory.clipboard import curve_text, ledger_text, peaks_text
from zerotop.ui.memory.help import TERMS
from zerotop.ui.memory.ledger_bars import bars_width, draw_gpu_bars, draw_host_bars, rank_at
from zerotop.ui.memory.ledger_curve import draw_curve
from zerotop.ui.memory.ledger_estimates import draw_estimates
from zerotop.ui.memory.ledger_peaks import draw_health, draw_peaks
from zerotop.ui.memory.ledger_table import draw_gpu_ledger, draw_host_ledger, table_rows
from zerotop.ui.memory.memory_history import draw_past
from zerotop.ui.memory.model import MemoryModel, can_look, hint
from zerotop.ui.widgets.frame_widget import Drawn

_TABLE = 66  # cells that a ledger's figures need
_BESIDE_FROM = 78  # from this width on bars stand beside the table
_LEAST_BELOW = 6  # rows that peaks and the microscope need
_TWO_BELOW_FROM = 96
_LEAST_PAST, _PAST = 8, 64  # rows that a chart under the ledger needs; cells of one from which on there are two
_HINT = 4  # rows that how to get a look takes


class MemoryPanel(Drawn, can_focus=True):
    """A part of the memory screen."""

    def __init__(self, model: MemoryModel, glyphs: Glyphs, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.model = model

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        view = self.model.view(frame)
        return self.of_view(view, frame, width, height, self.model.of_host(view))

    @abstractmethod
    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        """The picture of a view, of the host's memory or of a GPU's."""

    @property
    def view(self) -> MemoryView | None:
        """What is shown."""
        return self.model.view(self.frame) if self.frame is not None else None


class Bars(MemoryPanel):
    """Every GPU or rank as a bar."""

    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        draw = draw_host_bars if host else draw_gpu_bars
        return draw(view, width, height, self.glyphs, focused=self.has_focus)

    class Chosen(Message):
        """The mouse chose a rank."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def on_click(self, event: events.Click) -> None:
        view = self.view
        rank = rank_at(event.x, view, self.size.width, host=self.model.of_host(view)) if view is not None else None
        if rank is not None:
            self.post_message(self.Chosen(rank))


class Ledger(MemoryPanel):
    """The chosen one's rows, and what they should be."""

    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        draw = draw_host_ledger if host else draw_gpu_ledger
        return draw(view, width, height, self.glyphs, focused=self.has_focus)

    def copyable(self) -> str:
        """Every row, in bytes."""
        view = self.view
        return "" if view is None else ledger_text(view.host_lines if self.model.of_host(view) else view.lines)


class PhasePeaks(MemoryPanel):
    """Which phase needs how much; of the host how it went."""

    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        if not host:
            return draw_peaks(view, width, height, self.glyphs, focused=self.has_focus)
        return _past_of_ranks(frame.view, width, height, self.glyphs, focused=self.has_focus)

    def copyable(self) -> str:
        """Every phase, in bytes; of the host what is drawn."""
        view = self.view
        if view is None or self.model.of_host(view):
            return self.drawn_text()
        return peaks_text(view.peaks.phases) if view.peaks is not None else ""


class Past(MemoryPanel):
    """How the GPU's memory went, and beside it the host's where there is room for both."""

    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        if view.gpu is None:
            return [filled((), width, self.glyphs)] * height
        key = (view.gpu.host, view.gpu.index)
        gpu = next((one for one in frame.view.gpus if (one.host, one.index) == key), None)
        left = (width - GAP) // 2 if width >= 2 * _PAST + GAP else width
        focused, name = self.has_focus, f"GPU {view.gpu.index}"
        rows = _past(f"Memory of {name}", name, gpu, frame.view, left, height, self.glyphs, focused=focused)
        if left == width:
            return rows
        beside = _past_of_ranks(frame.view, width - left - GAP, height, self.glyphs, focused=focused)
        gap = (" " * GAP, "text")
        return [(*one, gap, *two) for one, two in zip(rows, beside, strict=True)]


class Curve(MemoryPanel):
    """What the microscope saw."""

    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        said = hint(frame, view)
        below = [] if view.look is not None else draw_estimates(view, width, height - _HINT, self.glyphs)
        above = _HINT if below else height
        rows = [*draw_curve(view.look, said, width, above, self.glyphs, focused=self.has_focus), *below]
        return to_height(rows, width, height, self.glyphs)

    def copyable(self) -> str:
        """All that was allocated and freed."""
        view = self.view
        return curve_text(view.look) if view is not None and view.look is not None else ""


class Health(MemoryPanel, can_focus=False):
    """How PyTorch's allocator fares."""

    def of_view(self, view: MemoryView, frame: Frame, width: int, height: int, host: bool) -> list[Row]:
        return [draw_health(view, width, self.glyphs)]


def _past_of_ranks(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool) -> list[Row]:
    return _past("Resident memory of all ranks", "all ranks", None, view, width, height, glyphs, focused=focused)


def _past(
    title: str, name: str, gpu: Gpu | None, view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool
) -> list[Row]:
    """The last while of a GPU or (None) of all ranks' host memory, under a title."""
    head = rule(((f"{title}, {giga().name}", "title-focused" if focused else "title"),), width, glyphs)
    return [head, *draw_past(view, name, gpu, width, max(2, height - 1), glyphs)][:height]


class MemoryScreen(Watching):
    """Where did it go."""

    NAME = "memory"
    TITLE = "Memory"
    HELP = "Where the memory of each GPU and of each rank's host is, what was expected, and who owns the peak."
    TERMS = TERMS

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "app.look", "Microscope", id="memory.look", tooltip="Record every allocation of the next step"),
        Binding("h", "host", "GPU or host", id="memory.host", tooltip="Show host memory, or the GPU's again"),
        Binding("up", "app.choose_rank(-1)", "Rank before", id="memory.rank.before", tooltip="The rank before", show=False),
        Binding("down", "app.choose_rank(1)", "Next rank", id="memory.rank.next", tooltip="The next rank", show=False),
    ]

    main_panel = "ledger"

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(glyphs, source)
        self.model = MemoryModel(source)

    def panels(self) -> Iterable[Drawn]:
        yield Bars(self.model, self.glyphs, id="bars")
        yield Ledger(self.model, self.glyphs, id="ledger")
        yield Past(self.model, self.glyphs, id="past")
        yield PhasePeaks(self.model, self.glyphs, id="peaks")
        yield Curve(self.model, self.glyphs, id="curve")
        yield Health(self.model, self.glyphs, id="health")

    def place(self, room: Box, frame: Frame) -> dict[str, Box]:
        view = self.model.view(frame)
        return places(room, view, host=self.model.of_host(view))

    def keys(self, frame: Frame) -> Sequence[Key]:
        view = self.model.view(frame)
        host = self.model.of_host(view)
        found = [Key("x", "microscope", "app.look", 7)] if can_look(frame, view) else []
        if view.gpus:
            found.append(Key("h", "GPU" if host else "host", "screen.host", 6))
        return (
            *found,
            Key("↑↓", "rank", "app.choose_rank(1)", 5, ("app.choose_rank(-1)", "app.choose_rank(1)")),
            Key("z", "zoom", "screen.zoom", 3),
        )

    def on_bars_chosen(self, event: Bars.Chosen) -> None:
        """A bar was clicked."""
        self.post_message(self.RankChosen(event.rank))

    def action_host(self) -> None:
        """From a GPU's memory to the host's, and back."""
        if self.frame is not None:
            self.model.switch(self.model.view(self.frame))
            self.again()


def places(room: Box, view: MemoryView, *, host: bool) -> dict[str, Box]:
    """Bars and the table above, peaks and the microscope below where there is room, the allocator's line last."""
    boxes: dict[str, Box] = {}
    height = room.height
    if not host and view.health is not None and height >= 12:
        height -= 1
        boxes["health"] = Box(room.x, room.y + height, room.width, 1)
    wanted = max(7, table_rows(view, host=host))
    upper = height if height - wanted < _LEAST_BELOW else max(wanted, height - _below_rows(view, height, host=host))
    if room.width >= _BESIDE_FROM:
        bars = bars_width(view, room.width - _TABLE - GAP, host=host)
        boxes["bars"] = Box(room.x, room.y, bars, upper)
        ledger = upper if host or upper - wanted < _LEAST_PAST else wanted
        boxes["ledger"] = Box(room.x + bars + GAP, room.y, room.width - bars - GAP, ledger)
        if ledger < upper:
            boxes["past"] = Box(room.x + bars + GAP, room.y + ledger, room.width - bars - GAP, upper - ledger)
    else:
        boxes["ledger"] = Box(room.x, room.y, room.width, upper)
    below = Box(room.x, room.y + upper, room.width, height - upper)
    return boxes | (_below(below, view, host=host) if below.height else {})


def _below_rows(view: MemoryView, height: int, *, host: bool) -> int:
    """Rows for what is below: half of all for a chart that fills them, else what its tables need."""
    if not host and _only_watched(view):
        return height
    if host or view.look is not None or not view.gpus:
        return max(12, height - height // 2)
    phases = len(view.peaks.phases) if view.peaks is not None else 1
    return max(12, 1 + phases, _HINT + 2 + len(view.estimates))


def _only_watched(view: MemoryView) -> bool:
    """Nothing is known from inside: what there is to show is how the GPU's memory went."""
    return view.gpu is not None and view.peaks is None and view.look is None and not view.estimates


def _below(room: Box, view: MemoryView, *, host: bool) -> dict[str, Box]:
    if host:
        return {"peaks": room}
    if _only_watched(view):
        return {"past": room}
    if room.width < _TWO_BELOW_FROM:
        return {"curve" if view.look is not None else "peaks": room}
    left = min(68, (room.width - GAP) * 2 // 5)
    right = Box(room.x + left + GAP, room.y, room.width - left - GAP, room.height)
    return {"peaks": Box(room.x, room.y, left, room.height), "curve": right}
