"""The base class of all screens of the monitor, and the picture that a screen shows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import ScreenResume
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen

from zerotop.analysis.failures.end import End
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base import panels
from zerotop.ui.base.bars.footer_keys import bind
from zerotop.ui.base.bars.header import count_notice_rows
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import CommonPanel, FrameWidget, RedrawRequested, RowWidget
from zerotop.ui.base.interfaces import LongWork
from zerotop.ui.base.post_mortem import count_post_mortem_rows
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.layout import Box, ScreenOutline, layout_outline
from zerotop.ui.drawing.rows import Row
from zerotop.ui.widgets.direct_writer import DirectWriter
from zerotop.ui.widgets.panel_container import Panels
from zerotop.ui.widgets.textual_private import count_style_updates


@dataclass(frozen=True, slots=True)
class ScreenState:
    """The other inputs of a picture besides the frame: the terminal's size in cells, and the id of the enlarged panel."""

    width: int
    height: int
    zoomed: str


@dataclass(frozen=True, slots=True)
class ScreenPicture:
    """A frame as one screen shows it. It never changes."""

    screen_name: str
    frame: Frame
    state: ScreenState
    boxes: dict[str, Box]  # places of all panels, by id
    rows: dict[str, list[Row]]  # of the screen's own panels
    key_labels: Mapping[str, str]  # footer labels by binding id
    next_work: Callable[[], object] | None  # what makes the next picture a better one


class MonitorScreen(Screen[None]):
    """A screen of the monitor: header, sentences, this screen's own panels, transport, tabs and keys.

    The thread that makes frames calls :meth:`build_picture`, and hence ``layout_panels``, ``label_keys`` and the ``draw`` of
    the own panels: the data that they read and change belongs to that thread. Keys change it by ``request_redraw``. The
    app's thread shows the pictures.
    """

    NAME: ClassVar[str]
    """The name by which ``app.switch`` finds the screen."""
    TITLE: ClassVar[str]
    """The label of its tab."""
    TERMS: ClassVar[Sequence[tuple[str, str]]] = ()
    """(term, what it means in two lines) for its help."""

    class SeekRequested(Message):
        """The user asked for another moment (unix ns)."""

        def __init__(self, time_ns: int) -> None:
            super().__init__()
            self.time_ns = time_ns

    class RankChosen(Message):
        """The user chose a rank, for every screen."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    class StepChosen(Message):
        """The user chose a finished step to go to its end."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class PanelZoomed(Message):
        """A panel was enlarged, or with "" all panels were restored."""

        def __init__(self, screen: str, panel: str) -> None:
            super().__init__()
            self.screen = screen
            self.panel = panel

    ALLOW_SELECT = False
    AUTO_FOCUS = ""  # nothing stands out until tab is pressed

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("z", "zoom", "screen.zoom", "Zoom", "Maximize the focused panel (tab moves the focus), or restore it", 3),
        bind("escape", "unzoom", "screen.unzoom", "All panels", "Restore all panels"),
    ]

    frame: reactive[Frame | None] = reactive[Frame | None](None, always_update=True, repaint=False, init=False)
    zoomed: reactive[str] = reactive("", repaint=False, init=False)

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(id=self.NAME)
        self.glyphs = glyphs
        self.source = source
        self.long_work: LongWork | None = None
        self.own_boxes: dict[str, Box] = {}
        """The boxes of this screen's panels in the picture in progress."""
        self._common_panels: list[CommonPanel] = []
        self._own_panels: list[FrameWidget] = []
        self._key_labels: Mapping[str, str] = {}
        self._body = Panels()
        self._styled_for: tuple[object, ...] = ()  # for which its styles were looked up
        # A terminal of ASCII gets its text filtered, which is the compositor's.
        self._writer = DirectWriter(self, (RowWidget, Panels)) if glyphs.name != "ascii" else None

    @abstractmethod
    def build_panels(self) -> Iterable[FrameWidget]:
        """Make its own panels, each with an id."""

    @abstractmethod
    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        """Return their places in the room there is, by id; those without a place are not shown."""

    def label_keys(self, frame: Frame) -> Mapping[str, str]:
        """Return the footer labels that depend on the moment, by binding id; "" leaves a key out."""
        return {}

    def find_post_mortem(self, frame: Frame) -> End | None:
        """Return the failure that this screen explains; others have one line about it."""
        return None

    def find_shown_fix(self) -> str:
        """Return the fix under the header if it counts more than the numbers of this screen; else ""."""
        return ""

    def compose(self) -> ComposeResult:
        glyphs = self.glyphs
        header, notices = panels.Header(glyphs, id="header"), panels.Notices(glyphs, self.find_post_mortem, id="notices")
        transport, tabs = panels.Transport(glyphs, id="transport"), panels.Tabs(glyphs, id="tabs", active=self.NAME)
        keys = panels.Keys(glyphs, id="keys", own_labels=lambda: self._key_labels)
        with self._body:
            own = list(self.build_panels())
            yield from (header, notices, *own, transport, tabs, keys)
        self._common_panels, self._own_panels = [header, notices, transport, tabs, keys], own

    def on_mount(self) -> None:
        if self.frame is not None:
            self.show_frame(self.frame)
        self.request_redraw()

    # Pictures, in the thread that makes frames

    def build_picture(self, frame: Frame, state: ScreenState) -> ScreenPicture:
        """Return the screen at a frame."""
        outline = self._layout_outline(frame, state)
        self.own_boxes = self._layout_own_panels(outline.room, frame, state.zoomed)
        rows = {
            name: panel.draw_cached(frame, box.width, box.height)
            for panel in self._own_panels
            if (box := self.own_boxes.get(name := panel.id or "")) is not None
        }
        boxes, labels = outline.boxes | self.own_boxes, self.label_keys(frame)
        return ScreenPicture(self.NAME, frame, state, boxes, rows, labels, self.find_next_work())

    def find_next_work(self) -> Callable[[], object] | None:
        """Return work that would improve the picture, to be called in this thread; None if there is none."""
        return self.long_work.finish_work if self.long_work is not None and self.long_work.is_busy else None

    def _layout_outline(self, frame: Frame, state: ScreenState) -> ScreenOutline:
        return layout_outline(
            state.width,
            state.height,
            self._count_notice_rows(frame, state.width, state.height),
            past=not frame.moment.is_following or not frame.moment.is_live,
            failed=frame.has_error or self.find_post_mortem(frame) is not None,
        )

    def _count_notice_rows(self, frame: Frame, width: int, height: int) -> int:
        """The rows that the sentences under the header want."""
        if (failure := self.find_post_mortem(frame)) is not None:
            return count_post_mortem_rows(failure, frame.view.cursor_ns, width, height, self.glyphs, frame.headline)
        return count_notice_rows(frame.list_notices(height), width, height, self.glyphs)

    def _layout_own_panels(self, room: Box, frame: Frame, zoomed: str) -> dict[str, Box]:
        if room.width <= 0 or room.height <= 0:
            return {}
        boxes = {name: box for name, box in self.layout_panels(room, frame).items() if box.width > 0 and box.height > 0}
        # A panel that has nothing to show at this moment would leave the screen empty.
        if zoomed and (zoomed in boxes or zoomed == self.main_panel):
            return {zoomed: room}
        return boxes

    @property
    def main_panel(self) -> str:
        """The panel that is enlarged when none is focused."""
        return next((panel.id or "" for panel in self._own_panels), "")

    # Pictures, in the app's thread

    @property
    def state(self) -> ScreenState:
        """The inputs of the next picture."""
        return ScreenState(*self.app.size, self.zoomed)

    def request_redraw(
        self, change: Callable[[], Any] | None = None, deliver: Callable[[Any], object] | None = None
    ) -> None:
        """Call ``change`` in the frame worker's thread and make a new picture; ``deliver`` gets the result of ``change``."""
        self.post_message(RedrawRequested(change, deliver))

    def show_picture(self, picture: ScreenPicture) -> None:
        """Show a picture, unless it was made for an older state: then a newer one will follow."""
        if picture.state != self.state:
            return
        for panel in self._own_panels:
            panel.deliver_rows(picture.frame, picture.rows.get(panel.id or ""))
        self._key_labels = picture.key_labels
        self._place_panels(picture.boxes)
        self.frame = picture.frame

    def show_time(self, frame: Frame) -> None:
        """Show the moment of a frame whose picture is not ready: header and transport, or all common parts."""
        if self.frame is None:
            self.show_frame(frame)
            return
        for panel in self._common_panels:
            if isinstance(panel, (panels.Header, panels.Transport)):
                panel.frame = frame
                panel.repaint()

    def show_frame(self, frame: Frame) -> None:
        """Show the parts common to all screens."""
        self._place_panels(self._layout_outline(frame, self.state).boxes)
        self.frame = frame

    def _place_panels(self, boxes: dict[str, Box]) -> None:
        # Frames may come before the panels do, and after they went.
        if boxes != self._body.boxes and self._body.children:
            self._body.boxes = boxes
            for panel in (*self._common_panels, *self._own_panels):
                box = boxes.get(panel.id or "")
                panel.set_region(Region(box.x, box.y, box.width, box.height) if box else Region(), self._writer)

    def watch_frame(self) -> None:
        for common in self._common_panels:
            common.frame = self.frame
        for panel in (*self._common_panels, *self._own_panels):
            if panel.id in self._body.boxes:
                panel.update_rows()
        if self._writer is not None:
            self._writer.flush_text()

    def _on_screen_resume(self, event: ScreenResume) -> None:
        # Textual looks all styles up again and leaves painting to a timer, which takes longer than a key may wait.
        event.prevent_default()
        ground = self.app.theme, count_style_updates(self.app)
        event.refresh_styles = event.refresh_styles and ground != self._styled_for
        self._styled_for = ground
        super()._on_screen_resume(event)
        if self._body.boxes:
            if self._layout_required:
                self._layout_common_panels()
            self._on_timer_update()

    def _layout_common_panels(self) -> None:
        """Lay out a screen that is shown for the first time: the panels common to all screens, before its own are drawn."""
        with self.app.batch_update():
            self._refresh_layout()
        self._layout_required = False
        for panel in self._common_panels:
            panel.update_rows()

    def _screen_resized(self, size: Size) -> None:
        # Textual calls this whenever the screen is shown, too.
        if size != self.outer_size or self._layout_required:
            super()._screen_resized(size)

    def watch_zoomed(self) -> None:
        self.post_message(self.PanelZoomed(self.NAME, self.zoomed))
        self.request_redraw()

    def restore_zoom(self, panel: str) -> None:
        """Enlarge the panel that was enlarged in the last run; call it before the screen is mounted."""
        self.set_reactive(MonitorScreen.zoomed, panel)

    def on_resize(self) -> None:
        self.request_redraw()

    def action_zoom(self) -> None:
        """Maximize the focused panel, or without focus the screen's main panel; or restore it."""
        focused = self.focused.id if self.focused is not None else None
        self.zoomed = "" if self.zoomed else focused or self.main_panel

    def action_unzoom(self) -> None:
        self.zoomed = ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self.zoomed) if action == "unzoom" else True
