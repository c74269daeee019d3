"""The iteration screen: one iteration folded from many, and where its time goes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.fold_cache import read_last_fold
from zerotop.recording.headers import RecordingError
from zerotop.recording.packed.packing import SUFFIX
from zerotop.ui.base.bars.footer_keys import bind, in_footer
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.bindings import rank_bindings
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.layout import GAP, Box
from zerotop.ui.iteration.drawing import ShownWaveform, count_wave_rows, has_hidden_lanes
from zerotop.ui.iteration.model import FoldModel
from zerotop.ui.iteration.overlay_dialog import OverlayDialog
from zerotop.ui.iteration.panels import PhaseTable, SampleTable, WaveformPanel
from zerotop.ui.iteration.samples import count_sample_rows
from zerotop.ui.iteration.table import FULL_WIDTH, build_lines
from zerotop.ui.live.panels import Iteration

_SIDE_BY_SIDE_WIDTH = 82  # cells of the chart from which the table stands beside it
_MIN_CHART_ROWS = 7  # title, sentence, phases, and a curve of four rows
_MIN_STEP_ROWS, _MAX_STEP_ROWS = 8, 20
_COUNT = in_footer(7, "iterations", label_index=1)


class IterationScreen(MonitorScreen):
    """Shows why an iteration takes its time, and what idles during it."""

    NAME = "iteration"
    TITLE = "Iteration"
    HELP = "One iteration, folded from many: GPU, CPU, power, PCIe and memory in each of its phases."
    TERMS = (
        (
            "folded",
            "Many iterations aligned phase by phase. Times are means, which add up; of a signal, the median and a band of\n"
            "10 to 90 %. By default, those of the present pace; a line says where the header has another pace.",
        ),
        (
            "GPU %",
            "NVML reports the share of the last 200 ms in which a kernel ran. Samples fall anywhere in the iteration,\n"
            "so that shorter phases can be resolved: the curve is the signal behind those means.",
        ),
        (
            "CPU/64",
            "Cores in use in the folded iterations, by the ranks named below, out of those available to the job. Sampled\n"
            "ten times a second, and resolved like the GPU's. The Threads screen shows those of the last second.",
        ),
        (
            "means, at least",
            "Means: of sensors that average over more than an iteration, only the mean is known.\n"
            "At least: PCIe counters wrap at 4 GiB, and more may flow between two samples.",
        ),
        (
            "CPU launches",
            "Where the CPU sets the pace: how long it launches the GPU's work, and below, how long kernels run meanwhile.",
        ),
        (
            "CUDA ms, idle",
            "CUDA ms: by CUDA events, gaps between kernels included, so not where the CPU sets the pace. Idle: seconds in\n"
            "which no kernel ran. Copies are not kernels: a GPU that only copies gradients to the host is idle.",
        ),
        (
            "excluded",
            "Iterations with an evaluation, a checkpoint, a skipped update (fp16 overflow) or other phases, and outliers,\n"
            "are not folded with the others. Outliers take 1.5 times as long: a sentence says if that is much of the time.",
        ),
        (
            "pinned",
            "c keeps the current fold and draws it behind later ones, to compare before and after a change.\n"
            "c again removes it; v pins another recording's. Both begin at the same moment and keep their own length.",
        ),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("c", "pin", "iteration.pin", "Pin", "Pin this fold behind later ones, or unpin it", 8),
        bind("v", "beside", "iteration.beside", "Another run", "Show another recording's iteration behind this one", 5),
        bind("plus,equals_sign", "widen(1)", "iteration.more", "More", "Average more iterations", _COUNT),
        bind("minus", "widen(-1)", "iteration.fewer", "Fewer", "Average only the latest iterations", _COUNT),
        bind("L", "level", "iteration.level", "Level", "Average since pace last changed", 6),
        bind("m", "lane", "iteration.lane", "Next signal", "Start with another signal, where not all fit", 8),
        bind("e", "every_rank", "iteration.ranks", "One or all ranks", "Fold all ranks together, or the chosen one", 6),
        *rank_bindings("iteration.rank.before", "iteration.rank.next", action="rank"),
    ]

    def __init__(self, glyphs: Glyphs, source: RecordingSource) -> None:
        super().__init__(glyphs, source)
        self.folding = self.long_work = FoldModel(source)

    def pin_fold(self, fold: WaveformFold | None, name: str = "") -> None:
        """Draw a fold, of any recording, behind the current one; None removes it."""
        self.request_redraw(partial(self.folding.pin_fold, fold, name))

    def build_panels(self) -> Iterable[FrameWidget]:
        yield WaveformPanel(self.glyphs, self.folding, id="waves")
        yield PhaseTable(self.glyphs, self.folding, id="phases")
        yield SampleTable(self.glyphs, self.folding, id="samples")
        yield Iteration(self.glyphs, id="steps")

    def layout_panels(self, room: Box, frame: Frame) -> dict[str, Box]:
        shown = self.folding.find_shown(frame)
        if shown is None:
            return {"waves": room}
        count = 1 + len(build_lines(shown.fold, None))
        table = FULL_WIDTH + (16 if shown.pinned is not None else 0)
        if room.width - table - GAP >= _SIDE_BY_SIDE_WIDTH:
            chart = Box(room.x, room.y, room.width - table - GAP, room.height)
            tables = _layout_tables(shown.fold, Box(chart.x + chart.width + GAP, room.y, table, room.height), count)
            has_steps = "steps" in tables
            waves = {"waves": chart} if has_steps else _layout_waves(shown, chart)
            return {**waves, **tables}
        rows = min(count, max(5, room.height // 3))
        if room.height - rows < _MIN_CHART_ROWS:
            return {"waves": room}
        upper = Box(room.x, room.y, room.width, room.height - rows)
        waves = _layout_waves(shown, upper)
        return {**waves, "phases": Box(room.x, room.y + upper.height, room.width, rows)}

    def label_keys(self, frame: Frame) -> dict[str, str]:
        shown = self.folding.find_shown(frame)
        if shown is None:
            return dict.fromkeys((binding.id or "" for binding in self.BINDINGS if isinstance(binding, Binding)), "")
        box = self.own_boxes.get("waves")
        labels = {
            "iteration.pin": "unpin" if self.folding.pinned else "pin",
            "iteration.ranks": "" if shown.fold.world == 1 else "one rank" if self.folding.folds_every_rank else "all ranks",
        }
        if self.folding.wanted_count is None:
            labels["iteration.level"] = ""
        if box is None or not has_hidden_lanes(shown, box.height):
            labels["iteration.lane"] = ""
        return labels

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
        """Let the user choose a recording whose iteration is drawn behind this one."""
        self.app.push_screen(OverlayDialog(self.folding.source.recording.path, self.glyphs), self._overlay_chosen)

    def _overlay_chosen(self, path: Path | None) -> None:
        if path is not None:
            self.overlay_recording(path)

    @work(exclusive=True, group="beside")
    async def overlay_recording(self, path: Path) -> None:
        """Pin the last iterations of another recording. Reads them on a thread: this may take seconds."""
        try:
            fold = await asyncio.to_thread(read_last_fold, path)
        except (RecordingError, OSError) as error:
            self.notify(str(error), severity="error", timeout=8)
            return
        if fold is None:
            self.notify(f"{path.name} has no finished iteration.", timeout=8)
        else:
            self.pin_fold(fold, path.name.removesuffix(SUFFIX))

    def action_lane(self) -> None:
        self.request_redraw(self.folding.choose_next_lane)

    def action_every_rank(self) -> None:
        self.request_redraw(partial(self.folding.choose_ranks, every_rank=not self.folding.folds_every_rank))

    async def action_rank(self, number: int) -> None:
        """Show the chosen rank on the first press, other ranks on further ones."""
        if self.folding.every_rank is not False:
            self.request_redraw(partial(self.folding.choose_ranks, every_rank=False))
        else:
            self.request_redraw(self.folding.scales.clear)
            await self.run_action(f"app.choose_rank({number})")


def _layout_waves(shown: ShownWaveform, room: Box) -> dict[str, Box]:
    """Place the chart, and below it the steps where signals without a curve leave room."""
    needed = count_wave_rows(shown)
    if room.height - needed < _MIN_STEP_ROWS:
        return {"waves": room}
    steps = Box(room.x, room.y + needed, room.width, room.height - needed)
    return {"waves": Box(room.x, room.y, room.width, needed), "steps": steps}


def _layout_tables(fold: WaveformFold, room: Box, count: int) -> dict[str, Box]:
    """Place the table of phases, and below it, if there is room, the table of samples and the chart of steps."""
    samples = count_sample_rows(fold)
    below = room.height - count - 1
    if below < samples:
        return {"phases": room}
    boxes = {"phases": Box(room.x, room.y, room.width, count)}
    steps = min(_MAX_STEP_ROWS, below - samples - 1)
    if steps >= _MIN_STEP_ROWS:
        below -= steps + 1
        boxes["steps"] = Box(room.x, room.y + count + 1 + below + 1, room.width, steps)
    return boxes | {"samples": Box(room.x, room.y + count + 1, room.width, below)}
