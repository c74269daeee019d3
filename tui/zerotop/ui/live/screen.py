"""The live screen, also for replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from zerotop.ui.base import panels
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.layout import Box, PanelCounts, layout_live
from zerotop.ui.dialogs.help_terms import TERMS
from zerotop.ui.live.cpu_gpu import draw_cpu, draw_gpu
from zerotop.ui.live.memory import draw_memory
from zerotop.ui.widgets.frame_widget import FrameWidget


class LiveScreen(MonitorScreen):
    """Memory, iterations, CPU, GPU and output of one job."""

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

    def build_panels(self) -> Iterable[FrameWidget]:
        yield panels.ViewPanel(self.glyphs, draw_memory, id="memory")
        yield panels.Iteration(self.glyphs, id="iteration")
        yield panels.ViewPanel(self.glyphs, draw_cpu, id="cpu")
        yield panels.ViewPanel(self.glyphs, draw_gpu, id="gpu")
        yield panels.Output(self.glyphs, id="output")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        view = frame.view
        return layout_live(room, PanelCounts(gpus=len(view.gpus), ranks=len(view.ranks), hosts=len(view.hosts)))

    def footer_keys(self, frame: Frame) -> Sequence[Key]:
        return (
            Key("↑↓", "output", "screen.output(1)", 2, ("screen.output(1)", "screen.output(-1)")),
            Key("z", "zoom", "screen.zoom", 3),
        )

    def action_output(self, lines: int) -> None:
        self.query_one(panels.Output).scroll_lines(lines)

    def action_output_page(self, direction: int) -> None:
        self.query_one(panels.Output).scroll_pages(direction)
