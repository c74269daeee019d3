"""The live screen, which is the replay's screen too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from zerotop.ui.base import panels
from zerotop.ui.base.base_screen import Watching
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.layout import Box, Shape, arrange
from zerotop.ui.dialogs.help_terms import TERMS
from zerotop.ui.widgets.frame_widget import Drawn


class LiveScreen(Watching):
    """Is it healthy, and where is it now."""

    NAME = "live"
    TITLE = "Live"
    HELP = "The live screen: memory, iterations, processors and output of one job."
    TERMS = TERMS

    BINDINGS: ClassVar[list[BindingType]] = [
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
    ]

    main_panel = "iteration"

    def panels(self) -> Iterable[Drawn]:
        yield panels.Memory(self.glyphs, id="memory")
        yield panels.Iteration(self.glyphs, id="iteration")
        yield panels.Cpu(self.glyphs, id="cpu")
        yield panels.Gpus(self.glyphs, id="gpu")
        yield panels.Output(self.glyphs, id="output")

    def place(self, room: Box, frame: Frame) -> dict[str, Box]:
        view = frame.view
        return arrange(room, Shape(gpus=len(view.gpus), ranks=len(view.ranks), hosts=len(view.hosts)))

    def keys(self, frame: Frame) -> Sequence[Key]:
        return (
            Key("↑↓", "output", "screen.output(1)", 2, ("screen.output(1)", "screen.output(-1)")),
            Key("z", "zoom", "screen.zoom", 3),
        )

    def action_output(self, lines: int) -> None:
        self.query_one(panels.Output).scroll_lines(lines)

    def action_output_page(self, direction: int) -> None:
        self.query_one(panels.Output).scroll_pages(direction)
