"""What all screens of the monitor have in common."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import ScreenResume
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.screen import Screen

from zerotop.ui.base import panels
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.header import notice_rows
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import Box, outline
from zerotop.ui.base.post_mortem import post_mortem_rows
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.widgets.direct_writer import Pen
from zerotop.ui.widgets.frame_widget import Drawn, Painted
from zerotop.ui.widgets.panel_container import Panels

_SLICE_S, _PAUSE_S = 0.006, 0.001  # of long work: a key waits for what is begun


class LongWork(Protocol):
    """What a screen shows that may take longer to find than keys may wait."""

    @property
    def busy(self) -> bool:
        """Whether it is not all there yet."""

    def go_on(self, most_s: float) -> None:
        """Works for about so long."""


class Watching(Screen[None]):
    """A screen of the monitor: header, sentences, this screen's own panels, transport, tabs and keys.

    It lays them out for the terminal's size and hands every frame down to them.
    """

    NAME: ClassVar[str]
    """What ``app.switch`` calls it."""
    TITLE: ClassVar[str]
    """Its word among the tabs."""
    TERMS: ClassVar[Sequence[tuple[str, str]]] = ()
    """(term, what it means in two lines) for its help."""

    class Sought(Message):
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
        Binding(
            "z",
            "zoom",
            "Zoom",
            id="screen.zoom",
            tooltip="Give the focused panel (tab moves) the whole screen, and back",
        ),
        Binding("escape", "unzoom", "All panels", id="screen.unzoom", tooltip="All panels again", show=False),
    ]

    frame: reactive[Frame | None] = reactive[Frame | None](None, always_update=True, repaint=False, init=False)
    zoomed: reactive[str] = reactive("", repaint=False)

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(id=self.NAME)
        self.glyphs = glyphs
        self.source = source
        self._drawn: list[Drawn] = []
        self._body = Panels()
        self.long_work: LongWork | None = None
        self._working = False
        self._ground: tuple[object, ...] = ()  # for which its styles were looked up
        # A terminal of ASCII gets its text filtered, which is the compositor's.
        self._pen = Pen(self, (Painted, Panels)) if glyphs.name != "ascii" else None

    @abstractmethod
    def panels(self) -> Iterable[Drawn]:
        """Its own panels, each with an id."""

    @abstractmethod
    def place(self, room: Box, frame: Frame) -> dict[str, Box]:
        """Where they go in the room there is, by id; those without a place are not shown."""

    def keys(self, frame: Frame) -> Sequence[Key]:
        """Its own entries of the bottom row."""
        return ()

    def compose(self) -> ComposeResult:
        with self._body:
            self._drawn = list(self._panels())
            yield from self._drawn

    def _panels(self) -> Iterable[Drawn]:
        yield panels.Header(self.glyphs, id="header")
        yield panels.Notices(self.glyphs, id="notices")
        yield from self.panels()
        yield panels.Transport(self.glyphs, id="transport")
        yield panels.Tabs(self.glyphs, id="tabs", active=self.NAME)
        yield panels.Keys(self.glyphs, id="keys", own=self.keys)

    def on_mount(self) -> None:
        self.watch_frame()

    def _on_screen_resume(self, event: ScreenResume) -> None:
        # Textual looks all styles up again and leaves painting to a timer, which takes longer than a key may wait.
        event.prevent_default()
        ground = self.app.theme, self.app._css_update_count
        event.refresh_styles = event.refresh_styles and ground != self._ground
        self._ground = ground
        super()._on_screen_resume(event)
        if self._body.boxes:
            if self._layout_required:
                self._lay_out()
            self._on_timer_update()

    def _lay_out(self) -> None:
        """Where it is shown for the first time: with what all screens have, before its own panels are drawn."""
        with self.app.batch_update():
            self._refresh_layout()
        self._layout_required = False
        for panel in self._drawn:
            if isinstance(panel, (panels.Header, panels.Notices, panels.Transport, panels.Tabs, panels.Keys)):
                panel.renew()

    def _screen_resized(self, size: Size) -> None:
        # It is told so whenever it is shown, too.
        if size != self.outer_size or self._layout_required:
            super()._screen_resized(size)

    def watch_frame(self) -> None:
        self._arrange()
        boxes = self._body.boxes
        for panel in self._drawn:
            panel.frame = self.frame
            if panel.id in boxes:
                panel.renew()
        if self._pen is not None:
            self._pen.lift()
        self._work_on()

    def _work_on(self) -> None:
        if not self._working and self.long_work is not None and self.long_work.busy:
            self._working = True
            # In the pause nothing waits for this screen: only then it is laid out and painted, and keys have their turn.
            asyncio.get_running_loop().call_later(_PAUSE_S, self.call_later, self._work_a_slice)

    def _work_a_slice(self) -> None:
        self._working = False
        if self.long_work is not None and self.long_work.busy:
            self.long_work.go_on(_SLICE_S)
            if not self.long_work.busy:
                self.again()
        self._work_on()

    def again(self) -> None:
        """Draws the same frame in another way."""
        if self.frame is not None:
            self.frame = self.frame

    def watch_zoomed(self) -> None:
        self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def _arrange(self) -> None:
        # Frames may come before the panels do, and after they went.
        if self.frame is None or not self._body.children:
            return
        width, height = self.app.size
        common = outline(
            width,
            height,
            self._sentences(self.frame, width, height),
            past=not self.frame.moment.following or not self.frame.moment.live,
            failed=self.frame.failed or self.frame.failure is not None,
        )
        boxes = common.boxes | self._own_places(common.room, self.frame)
        if boxes != self._body.boxes:
            self._body.boxes = boxes
            for panel in self._drawn:
                box = boxes.get(panel.id or "")
                panel.lies(Region(box.x, box.y, box.width, box.height) if box else Region(), self._pen)

    def _sentences(self, frame: Frame, width: int, height: int) -> int:
        """Rows that what there is to say under the header wants."""
        if frame.failure is not None:
            return post_mortem_rows(frame.failure, frame.view.cursor_ns, width, height, self.glyphs)
        return notice_rows(frame.notices(height), width, height, self.glyphs)

    def _own_places(self, room: Box, frame: Frame) -> dict[str, Box]:
        if room.width <= 0 or room.height <= 0:
            return {}
        places = {name: box for name, box in self.place(room, frame).items() if box.width > 0 and box.height > 0}
        # A panel that has nothing to show at this moment would leave the screen empty.
        if self.zoomed and (self.zoomed in places or self.zoomed == self.main_panel):
            return {self.zoomed: room}
        return places

    def answer(self, frame: Frame) -> None:
        """Somebody pressed a key, and what it asks for is not there yet: ``frame`` has what is told meanwhile."""
        if self.frame is None:
            self.frame = frame
            return
        for panel in self._body.children:
            if isinstance(panel, (panels.Header, panels.Transport)):
                panel.frame = frame
                panel.redraw()

    def action_zoom(self) -> None:
        """The focused panel, or without focus the one the screen is most about, takes the room."""
        focused = self.focused.id if self.focused is not None else None
        self.zoomed = "" if self.zoomed else focused or self.main_panel

    @property
    def main_panel(self) -> str:
        """The panel that is enlarged when none is focused."""
        return next(panel.id or "" for panel in self.panels())

    def action_unzoom(self) -> None:
        self.zoomed = ""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self.zoomed) if action == "unzoom" else True
