"""One iteration, folded from many: why it takes that long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.fold_cache import read_last_fold
from zerotop.session.headers import SessionError
from zerotop.session.packing import SUFFIX
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.footer import Key
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.base.layout import GAP, Box
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.iteration.drawing import has_hidden_lanes
from zerotop.ui.iteration.model import FoldModel
from zerotop.ui.iteration.overlay_dialog import OverlayDialog
from zerotop.ui.iteration.panels import PhaseTable, SampleTable, WaveformPanel
from zerotop.ui.iteration.samples import count_sample_rows
from zerotop.ui.iteration.table import FULL_WIDTH, build_lines
from zerotop.ui.widgets.frame_widget import FrameWidget

_SIDE_BY_SIDE_WIDTH = 82  # from this width of the chart on the table is beside it
_MIN_CHART_ROWS = 9  # rows


class IterationScreen(MonitorScreen):
    """Why does an iteration take that long, and what idles meanwhile."""

    NAME = "iteration"
    TITLE = "Iteration"
    HELP = "One iteration, folded from many: what GPUs, cores, power, PCIe and memory do in each phase of it."
    TERMS = (
        (
            "folded",
            "Many iterations laid over one another, phase on phase, as an oscilloscope does: the line is the median,\n"
            "the band holds 10 to 90 % of what was seen. By default all since iterations last took another time.",
        ),
        (
            "GPU %",
            "NVML says the share of the last 200 ms in which a kernel ran. Samples begin everywhere in the iteration,\n"
            "so shorter phases can be told apart: the curve is what those means come from.",
        ),
        (
            "CPU/64",
            "Cores in use, of those the job may use: of all ranks on a host together, or of the chosen one.\n"
            "Sampled ten times a second, and told apart like the GPU's.",
        ),
        (
            "blurred, at least",
            "Blurred: the sensor looks back for longer than an iteration, so only its mean is known.\n"
            "At least: PCIe counters are read so seldom that more than 4 GiB may flow between two looks.",
        ),
        (
            "device, idle",
            "Device: how long the GPU was at the phase, by CUDA events. Idle: seconds of the phase in which no kernel ran.\n"
            "Copies are no kernels: a GPU that waits for gradients to go to the host is idle.",
        ),
        (
            "left out",
            "Iterations with an evaluation, a checkpoint, a skipped update (fp16 overflow), other phases, or far longer\n"
            "than the others are not folded with them.",
        ),
        (
            "pinned",
            "c keeps the fold that is shown, and draws it behind later ones: before and after a change.\n"
            "c again takes it away, v lays another recording's there. It begins at the same moment and lasts as it did.",
        ),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("plus,equals_sign", "widen(1)", "More", id="iteration.more", tooltip="Fold more iterations"),
        Binding("minus", "widen(-1)", "Fewer", id="iteration.fewer", tooltip="Fold fewer iterations: the latest ones"),
        Binding(
            "l", "level", "Whole level", id="iteration.level", tooltip="Fold all since iterations last took another time"
        ),
        Binding("c", "pin", "Pin", id="iteration.pin", tooltip="Keep this fold behind later ones, or take it away"),
        Binding("v", "beside", "Beside another", id="iteration.beside", tooltip="Another recording's iteration behind it"),
        Binding("m", "lane", "Next signal", id="iteration.lane", tooltip="Another signal first, where not all have room"),
        Binding(
            "e", "every_rank", "One or all ranks", id="iteration.ranks", tooltip="Fold all ranks together, or the chosen one"
        ),
        Binding("up", "rank(-1)", "Rank before", id="iteration.rank.before", tooltip="The rank before", show=False),
        Binding("down", "rank(1)", "Next rank", id="iteration.rank.next", tooltip="The next rank", show=False),
    ]

    def __init__(self, glyphs: Glyphs, source: Source) -> None:
        super().__init__(glyphs, source)
        self.folding = self.long_work = FoldModel(source)

    def pin_fold(self, fold: WaveformFold | None, name: str = "") -> None:
        """Lays a fold, of another session too, behind those that are shown; None takes it away."""
        self.request_redraw(partial(self.folding.pin_fold, fold, name))

    def build_panels(self) -> Iterable[FrameWidget]:
        yield WaveformPanel(self.glyphs, self.folding, id="waves")
        yield PhaseTable(self.glyphs, self.folding, id="phases")
        yield SampleTable(self.glyphs, self.folding, id="samples")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        shown = self.folding.find_shown(frame)
        if shown is None:
            return {"waves": room}
        count = 1 + len(build_lines(shown.fold, None))
        table = FULL_WIDTH + (16 if shown.pinned is not None else 0)
        if room.width - table - GAP >= _SIDE_BY_SIDE_WIDTH:
            chart = Box(room.x, room.y, room.width - table - GAP, room.height)
            return {
                "waves": chart,
                **_layout_tables(shown.fold, Box(chart.x + chart.width + GAP, room.y, table, room.height), count),
            }
        rows = min(count, max(5, room.height // 3))
        if room.height - rows < _MIN_CHART_ROWS:
            return {"waves": room}
        upper = Box(room.x, room.y, room.width, room.height - rows)
        return {"waves": upper, "phases": Box(room.x, room.y + upper.height, room.width, rows)}

    def footer_keys(self, frame: Frame) -> Sequence[Key]:
        shown = self.folding.find_shown(frame)
        if shown is None:
            return ()
        box = self.own_boxes.get("waves")
        hidden = box is not None and has_hidden_lanes(shown.fold, box.width, box.height, pinned=shown.pinned is not None)
        several = [Key("e", "one rank" if self.folding.every_rank else "all ranks", "screen.every_rank", 6)]
        return (
            Key("c", "unpin" if self.folding.pinned else "pin", "screen.pin", 8),
            Key("v", "another run", "screen.beside", 5),
            Key("+-", "iterations", "screen.widen(-1)", 7, ("screen.widen(1)", "screen.widen(-1)")),
            *([Key("l", "level", "screen.level", 6)] if self.folding.wanted_count is not None else []),
            *([Key("m", "next signal", "screen.lane", 8)] if hidden else []),
            *(several if shown.fold.world > 1 else []),
        )

    def action_widen(self, direction: int) -> None:
        self.request_redraw(partial(self.folding.change_count, direction), self._notify_obstacle)

    def action_level(self) -> None:
        self.request_redraw(self.folding.fold_level, self._notify_obstacle)

    def _notify_obstacle(self, sentence: str) -> None:
        """Say why a key changed nothing."""
        if sentence:
            self.notify(sentence, timeout=3)

    def action_pin(self) -> None:
        self.request_redraw(self.folding.toggle_pin, self._notify_obstacle)

    def action_beside(self) -> None:
        """Lets the user choose the recording whose iteration to lay behind this one's."""
        self.app.push_screen(OverlayDialog(self.folding.source.session.path, self.glyphs), self._overlay_chosen)

    def _overlay_chosen(self, path: Path | None) -> None:
        if path is not None:
            self.overlay_recording(path)

    @work(exclusive=True, group="beside")
    async def overlay_recording(self, path: Path) -> None:
        """Pins the last iterations of another recording. Reading them may take seconds, and is done meanwhile."""
        try:
            fold = await asyncio.to_thread(read_last_fold, path)
        except (SessionError, OSError) as error:
            self.notify(str(error), severity="error", timeout=8)
            return
        if fold is None:
            self.notify(f"No rank of {path.name} has finished an iteration.", timeout=8)
        else:
            self.pin_fold(fold, path.name.removesuffix(SUFFIX))

    def action_lane(self) -> None:
        self.request_redraw(self.folding.choose_next_lane)

    def action_every_rank(self) -> None:
        self.request_redraw(partial(self.folding.choose_ranks, every_rank=not self.folding.every_rank))

    async def action_rank(self, number: int) -> None:
        """The first press looks at the rank that is chosen, further ones at others."""
        if self.folding.every_rank:
            self.request_redraw(partial(self.folding.choose_ranks, every_rank=False))
        else:
            self.request_redraw(self.folding.scales.clear)
            await self.run_action(f"app.choose_rank({number})")


def _layout_tables(fold: WaveformFold, room: Box, count: int) -> dict[str, Box]:
    """The table of phases, and under it what it rests on, if there is room for that."""
    below = room.height - count - 1
    if below < count_sample_rows(fold):
        return {"phases": room}
    return {
        "phases": Box(room.x, room.y, room.width, count),
        "samples": Box(room.x, room.y + count + 1, room.width, below),
    }
