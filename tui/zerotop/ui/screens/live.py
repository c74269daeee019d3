"""The live screen, which is the replay's screen too."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen

from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.header import notice_rows
from zerotop.ui.frame import Frame
from zerotop.ui.layout import Shape, arrange
from zerotop.ui.widgets import panels
from zerotop.ui.widgets.body import Panels
from zerotop.ui.widgets.drawn import Drawn


class LiveScreen(Screen[None]):
    """Lays panels out for the terminal's size and hands every frame down to them."""

    ALLOW_SELECT = False
    AUTO_FOCUS = ""  # nothing stands out until tab is pressed
    HELP = "The live screen: memory, iterations, processors and output of one job."

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "z",
            "zoom",
            "Zoom",
            id="live.zoom",
            tooltip="Give the focused panel (tab moves) the whole screen, and back",
        ),
        Binding(
            "up",
            "output(1)",
            "Older output",
            id="live.output.up",
            tooltip="One line back in the job's output",
            show=False,
        ),
        Binding(
            "down",
            "output(-1)",
            "Newer output",
            id="live.output.down",
            tooltip="One line on in the output",
            show=False,
        ),
        Binding(
            "pageup",
            "output_page(1)",
            "Output page back",
            id="live.output.pageup",
            tooltip="A page back in the output",
            show=False,
        ),
        Binding(
            "pagedown",
            "output_page(-1)",
            "Output page on",
            id="live.output.pagedown",
            tooltip="A page on in the output",
            show=False,
        ),
        Binding("escape", "unzoom", "All panels", id="live.unzoom", tooltip="All panels again", show=False),
    ]

    frame: reactive[Frame | None] = reactive[Frame | None](None, always_update=True, repaint=False, init=False)
    zoomed: reactive[str] = reactive("", repaint=False)

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__(id="live")
        self.glyphs = glyphs
        self._body = Panels()

    def compose(self) -> ComposeResult:
        with self._body:
            for name, kind in _PANELS.items():
                yield kind(self.glyphs, id=name).data_bind(LiveScreen.frame)

    def on_mount(self) -> None:
        self._arrange()

    def watch_frame(self) -> None:
        self._arrange()

    def watch_zoomed(self) -> None:
        self._arrange()

    def on_resize(self) -> None:
        self._arrange()

    def _arrange(self) -> None:
        # Frames may come before the panels do, and after they went.
        if self.frame is None or not self._body.children:
            return
        view, (width, height) = self.frame.view, self.app.size
        shape = Shape(
            width=width,
            height=height,
            gpus=len(view.gpus),
            ranks=len(view.ranks),
            hosts=len(view.hosts),
            notices=notice_rows(self.frame.notices(height), width, height, self.glyphs),
            failed=self.frame.failed,
            past=not self.frame.moment.following or not self.frame.moment.live,
            zoomed=self.zoomed,
        )
        boxes = arrange(shape)
        if boxes != self._body.boxes:
            self._body.boxes = boxes

    def action_zoom(self) -> None:
        """The focused panel, or without focus the iterations, takes the screen."""
        focused = self.focused.id if self.focused is not None else None
        self.zoomed = "" if self.zoomed else focused or "iteration"

    def action_unzoom(self) -> None:
        self.zoomed = ""

    def action_output(self, lines: int) -> None:
        self.query_one(panels.Output).scroll_lines(lines)

    def action_output_page(self, direction: int) -> None:
        self.query_one(panels.Output).scroll_pages(direction)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self.zoomed) if action == "unzoom" else True


_PANELS: dict[str, Callable[..., Drawn]] = {
    "header": panels.Header,
    "notices": panels.Notices,
    "memory": panels.Memory,
    "iteration": panels.Iteration,
    "cpu": panels.Cpu,
    "gpu": panels.Gpus,
    "output": panels.Output,
    "transport": panels.Transport,
    "status": panels.Status,
    "keys": panels.Keys,
}
