"""What all screens of the monitor have in common."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import ScreenResume
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen

from zerotop.ui.base import panels
from zerotop.ui.base.footer_keys import bind
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.header import count_notice_rows
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import Box, layout_outline
from zerotop.ui.base.post_mortem import count_post_mortem_rows
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.widgets.direct_writer import DirectWriter
from zerotop.ui.widgets.frame_widget import FrameWidget, RowWidget
from zerotop.ui.widgets.panel_container import Panels

_WORK_SLICE_S, _WORK_PAUSE_S = 0.006, 0.001  # of long work: a key waits for what is begun


class LongWork(Protocol):
    """What a screen shows that may take longer to find than keys may wait."""

    @property
    def is_busy(self) -> bool:
        """Whether it is not all there yet."""

    def continue_work(self, most_s: float) -> None:
        """Works for about so long."""


class MonitorScreen(Screen[None]):
    """A screen of the monitor: header, sentences, this screen's own panels, transport, tabs and keys.

    It lays them out for the terminal's size and hands every frame down to them.
    """

    NAME: ClassVar[str]
    """What ``app.switch`` calls it."""
    TITLE: ClassVar[str]
    """Its word among the tabs."""
    TERMS: ClassVar[Sequence[tuple[str, str]]] = ()
    """(term, what it means in two lines) for its help."""

    class SeekRequested(Message):
        """Somebody wants to be at this moment (unix ns)."""

        def __init__(self, time_ns: int) -> None:
            super().__init__()
            self.time_ns = time_ns

    class RankChosen(Message):
        """Every screen is to be about this rank from now on."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    ALLOW_SELECT = False
    AUTO_FOCUS = ""  # nothing stands out until tab is pressed

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("z", "zoom", "screen.zoom", "Zoom", "Maximize the focused panel (tab moves the focus), or restore it", 3),
        bind("escape", "unzoom", "screen.unzoom", "All panels", "Restore all panels"),
    ]

    frame: reactive[Frame | None] = reactive[Frame | None](None, always_update=True, repaint=False, init=False)
    zoomed: reactive[str] = reactive("", repaint=False)

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(id=self.NAME)
        self.glyphs = glyphs
        self.source = source
        self._frame_widgets: list[FrameWidget] = []
        self._body = Panels()
        self.long_work: LongWork | None = None
        self._is_working = False
        self._styled_for: tuple[object, ...] = ()  # for which its styles were looked up
        # A terminal of ASCII gets its text filtered, which is the compositor's.
        self._writer = DirectWriter(self, (RowWidget, Panels)) if glyphs.name != "ascii" else None

    @abstractmethod
    def build_panels(self) -> Iterable[FrameWidget]:
        """Its own panels, each with an id."""

    @abstractmethod
    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        """Where they go in the room there is, by id; those without a place are not shown."""

    def label_keys(self, frame: Frame) -> Mapping[str, str]:
        """Return the footer labels that depend on the moment, by binding id; "" leaves a key out."""
        return {}

    def compose(self) -> ComposeResult:
        with self._body:
            self._frame_widgets = list(self._build_all_panels())
            yield from self._frame_widgets

    def _build_all_panels(self) -> Iterable[FrameWidget]:
        yield panels.Header(self.glyphs, id="header")
        yield panels.Notices(self.glyphs, id="notices")
        yield from self.build_panels()
        yield panels.Transport(self.glyphs, id="transport")
        yield panels.Tabs(self.glyphs, id="tabs", active=self.NAME)
        yield panels.Keys(self.glyphs, id="keys", own_labels=self.label_keys)

    def on_mount(self) -> None:
        self.watch_frame()

    def _on_screen_resume(self, event: ScreenResume) -> None:
        # Textual looks all styles up again and leaves painting to a timer, which takes longer than a key may wait.
        event.prevent_default()
        ground = self.app.theme, self.app._css_update_count
        event.refresh_styles = event.refresh_styles and ground != self._styled_for
        self._styled_for = ground
        super()._on_screen_resume(event)
        if self._body.boxes:
            if self._layout_required:
                self._layout_common_panels()
            self._on_timer_update()

    def _layout_common_panels(self) -> None:
        """Where it is shown for the first time: with what all screens have, before its own panels are drawn."""
        with self.app.batch_update():
            self._refresh_layout()
        self._layout_required = False
        for panel in self._frame_widgets:
            if isinstance(panel, (panels.Header, panels.Notices, panels.Transport, panels.Tabs, panels.Keys)):
                panel.update_rows()

    def _screen_resized(self, size: Size) -> None:
        # It is told so whenever it is shown, too.
        if size != self.outer_size or self._layout_required:
            super()._screen_resized(size)

    def watch_frame(self) -> None:
        self._update_boxes()
        boxes = self._body.boxes
        for panel in self._frame_widgets:
            panel.frame = self.frame
            if panel.id in boxes:
                panel.update_rows()
        if self._writer is not None:
            self._writer.flush_text()
        self._schedule_work()

    def _schedule_work(self) -> None:
        if not self._is_working and self.long_work is not None and self.long_work.is_busy:
            self._is_working = True
            # In the pause nothing waits for this screen: only then it is laid out and painted, and keys have their turn.
            asyncio.get_running_loop().call_later(_WORK_PAUSE_S, self.call_later, self._work_one_slice)

    def _work_one_slice(self) -> None:
        self._is_working = False
        if self.long_work is not None and self.long_work.is_busy:
            self.long_work.continue_work(_WORK_SLICE_S)
            if not self.long_work.is_busy:
                self.redraw_frame()
        self._schedule_work()

    def redraw_frame(self) -> None:
        """Draws the same frame in another way."""
        if self.frame is not None:
            self.frame = self.frame

    def watch_zoomed(self) -> None:
        self._update_boxes()

    def on_resize(self) -> None:
        self._update_boxes()

    def _update_boxes(self) -> None:
        # Frames may come before the panels do, and after they went.
        if self.frame is None or not self._body.children:
            return
        width, height = self.app.size
        common = layout_outline(
            width,
            height,
            self._count_notice_rows(self.frame, width, height),
            past=not self.frame.moment.is_following or not self.frame.moment.is_live,
            failed=self.frame.has_error or self.frame.failure is not None,
        )
        boxes = common.boxes | self._layout_own_panels(common.room, self.frame)
        if boxes != self._body.boxes:
            self._body.boxes = boxes
            for panel in self._frame_widgets:
                box = boxes.get(panel.id or "")
                panel.set_region(Region(box.x, box.y, box.width, box.height) if box else Region(), self._writer)

    def _count_notice_rows(self, frame: Frame, width: int, height: int) -> int:
        """Rows that what there is to say under the header wants."""
        if frame.failure is not None:
            return count_post_mortem_rows(frame.failure, frame.view.cursor_ns, width, height, self.glyphs)
        return count_notice_rows(frame.list_notices(height), width, height, self.glyphs)

    def _layout_own_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        if room.width <= 0 or room.height <= 0:
            return {}
        places = {name: box for name, box in self.layout_panels(room, frame).items() if box.width > 0 and box.height > 0}
        # A panel that has nothing to show at this moment would leave the screen empty.
        if self.zoomed and (self.zoomed in places or self.zoomed == self.main_panel):
            return {self.zoomed: room}
        return places

    def show_time(self, frame: Frame) -> None:
        """Somebody pressed a key, and what it asks for is not there yet: ``frame`` has what is told meanwhile."""
        if self.frame is None:
            self.frame = frame
            return
        for panel in self._body.children:
            if isinstance(panel, (panels.Header, panels.Transport)):
                panel.frame = frame
                panel.repaint()

    def action_zoom(self) -> None:
        """The focused panel, or without focus the one the screen is most about, takes the room."""
        focused = self.focused.id if self.focused is not None else None
        self.zoomed = "" if self.zoomed else focused or self.main_panel

    @property
    def main_panel(self) -> str:
        """The panel that is enlarged when none is focused."""
        return next(panel.id or "" for panel in self.build_panels())

    def action_unzoom(self) -> None:
        self.zoomed = ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self.zoomed) if action == "unzoom" else True
