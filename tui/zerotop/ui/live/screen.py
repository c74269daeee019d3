"""The live screen, which also shows replays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType

from zerotop.analysis.failures.end import End
from zerotop.ui.base.bars.footer_keys import in_footer
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import scroll_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.panels import Notices
from zerotop.ui.drawing.layout import Box, PanelCounts, layout_live, replace_with_summary
from zerotop.ui.live import panels
from zerotop.ui.live.help import TERMS
from zerotop.ui.live.summary import MOST_ROWS, count_summary_rows


class LiveScreen(MonitorScreen):
    """Shows whether the job is healthy, and its current activity."""

    NAME = "live"
    TITLE = "Live"
    HELP = "The live screen: memory, iterations, CPU, GPUs and output of one job."
    TERMS = TERMS

    BINDINGS: ClassVar[list[BindingType]] = scroll_bindings(
        "live.output", "output", "output_page", up=1, group=in_footer(2, "output")
    )

    main_panel = "iteration"

    def find_post_mortem(self, frame: Frame) -> End | None:
        return frame.failure

    def build_panels(self) -> Iterable[FrameWidget]:
        yield panels.Memory(self.glyphs, id="memory")
        yield panels.Iteration(self.glyphs, id="iteration")
        yield panels.Ranks(self.glyphs, id="cpu")
        yield panels.Gpus(self.glyphs, id="gpu")
        yield panels.Summary(self.glyphs, id="summary")
        yield panels.Output(self.glyphs, id="output")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        view = frame.view
        boxes = layout_live(room, PanelCounts(gpus=len(view.gpus), ranks=len(view.ranks), hosts=len(view.hosts)))
        if frame.summary is None:
            return boxes
        rows = count_summary_rows(frame.summary, view, room.width, self.glyphs)
        return replace_with_summary(boxes, room.width, min(MOST_ROWS, rows))

    def find_shown_fix(self) -> str:
        return self.query_one(Notices).find_shown_fix()

    def action_output(self, lines: int) -> None:
        self.query_one(panels.Output).scroll_lines(lines)

    def action_output_page(self, direction: int) -> None:
        self.query_one(panels.Output).scroll_pages(direction)
