"""The columns of the list of recordings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.formatting import format_percent
from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.analysis.reports.recording_summary import DETACHED, Overview, resample_longest
from zerotop.ui.base.start_interfaces import LibraryItem, RunningJob
from zerotop.ui.charts.strips import draw_strip
from zerotop.ui.drawing.formatting import (
    MISSING,
    format_clock,
    format_number,
    format_rate,
    format_rough_time,
    format_significant,
    format_size,
    is_known,
)
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.table import Column
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import PaceUnit, convert_sizes, get_units, giga_unit
from zerotop.ui.start.model import NO_OVERVIEW

_SPARKLINE_STYLE, _CLIPPED_STYLE = "load", "muted"
# Suffixes of model classes that say nothing about the model.
_MODEL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification", "ForMaskedLM")


@dataclass(frozen=True, slots=True)
class ListLine:
    """One row of the list."""

    item: LibraryItem
    is_chosen: bool
    is_marked: bool
    now_ns: int

    @property
    def overview(self) -> Overview:
        """The recording's overview."""
        return (self.item.overview if isinstance(self.item, ListedRecording) else None) or NO_OVERVIEW


# Endings that the user wanted.
_CALM_STYLES = {"stopped": "warn", DETACHED: "text"}


def describe_state(item: LibraryItem, glyphs: Glyphs) -> tuple[str, str]:
    """Return (word, style): ``● live``, ``exit 0``, the reason it ended, or ``damaged``."""
    if isinstance(item, RunningJob):
        return "unrecorded", "warn"
    overview = item.overview
    if item.is_live:
        return f"{glyphs.dot} live", "good"
    if overview is None:
        return f"reading {glyphs.ellipsis}", "muted"
    if overview.problem:
        return "damaged", "alert"
    if overview.exit_code == 0:
        return "exit 0", "text"
    if overview.why:
        return overview.why, _CALM_STYLES.get(overview.why, "alert")
    return ("end unseen", "warn") if overview.exit_code is None else (f"exit {overview.exit_code}", "alert")


class _Cells:
    """Draws the cells of each column."""

    def __init__(self, glyphs: Glyphs) -> None:
        self.glyphs = glyphs

    def _draw_plain(self, text: str, style: str = "text") -> Row:
        return ((self.glyphs.to_plain(text), style),)

    def _draw_right(self, text: str, width: int, style: str = "text") -> Row:
        return self._draw_plain(text.rjust(width), "muted" if text == MISSING else style)

    def draw_mark(self, line: ListLine, width: int) -> Row:
        cursor = self.glyphs.prompt if line.is_chosen else " "
        return ((cursor, "value"), ((self.glyphs.swatch if line.is_marked else " ") + " ", "accent"))

    def draw_name(self, line: ListLine, width: int) -> Row:
        text = line.item.script if isinstance(line.item, RunningJob) else line.item.name
        return ((fit_text(sanitize(text, self.glyphs), width, self.glyphs, at_words=False), "value"),)

    def draw_state(self, line: ListLine, width: int) -> Row:
        word, style = describe_state(line.item, self.glyphs)
        return ((word[:width], style),)

    def draw_model(self, line: ListLine, width: int) -> Row:
        text = sanitize(format_model(line.overview.model, line.overview.parameters), self.glyphs)
        return ((fit_text(text, width, self.glyphs), "text"),)

    def draw_zero(self, line: ListLine, width: int) -> Row:
        stage = line.item.zero_stage if isinstance(line.item, RunningJob) else line.overview.zero_stage
        if stage is None:
            return ((line.overview.parallelism, "text"),)
        return ((f"{stage} {format_offload(line.overview, self.glyphs)}".strip(), "text"),)

    def draw_ranks(self, line: ListLine, width: int) -> Row:
        number = line.item.ranks if isinstance(line.item, RunningJob) else line.overview.ranks
        return self._draw_right(str(number or ""), width)

    def draw_age(self, line: ListLine, width: int) -> Row:
        if isinstance(line.item, RunningJob):
            return ()
        return self._draw_right(format_rough_time(max(0.0, (line.now_ns - line.item.begin_ns) / 1e9)), width)

    def draw_time(self, line: ListLine, width: int) -> Row:
        seconds = line.item.age_s if isinstance(line.item, RunningJob) else line.overview.seconds
        return self._draw_right(format_clock(seconds) if math.isfinite(seconds) else "", width)

    def draw_steps(self, line: ListLine, width: int) -> Row:
        done, total = line.overview.steps, line.overview.total_steps
        text = (
            str(done or "")
            if total is None or total == done
            else f"{done}/{total if total < 10_000 else format_number(total)}"
        )
        return self._draw_right(text, width)

    def draw_iteration(self, line: ListLine, width: int) -> Row:
        seconds = line.overview.iteration_s
        if math.isnan(seconds) or seconds <= 0:
            return ()
        text = format_rate(seconds) if get_units().pace is PaceUnit.RATE else _format_seconds(seconds)
        return self._draw_right(text, width, "value")

    def draw_peak(self, line: ListLine, width: int) -> Row:
        highest = line.overview.peak_bytes
        if highest is None:
            return ()
        where = "host" if line.overview.peak_on_host else "GPU "
        return ((f"{format_significant(highest / giga_unit().bytes)} ".rjust(width - 4), "text"), (where, "muted"))

    def draw_stored(self, line: ListLine, width: int) -> Row:
        return self._draw_right(format_size(line.item.stamp.bytes) if isinstance(line.item, ListedRecording) else "", width)

    def draw_command(self, line: ListLine, width: int) -> Row:
        text = sanitize(format_command(line.overview.command), self.glyphs)
        return ((fit_text(text, width, self.glyphs), "muted"),)

    def draw_worst(self, line: ListLine, width: int) -> Row:
        return draw_worst(line.overview, width, self.glyphs)

    def draw_iterations(self, line: ListLine, width: int) -> Row:
        return draw_sparkline(line.overview.iterations, width, self.glyphs)


def build_columns(width: int, glyphs: Glyphs) -> list[Column[ListLine]]:
    """Return all columns; the width decides which of them are shown."""
    cells = _Cells(glyphs)

    def draw_heading(text: str) -> Row:
        return ((text, "heading"),)

    return [
        Column("", 2, 9, cells.draw_mark),
        Column(draw_heading("recording"), 26, 9, cells.draw_name, left=True),
        Column(draw_heading("state"), 11, 9, cells.draw_state, left=True),
        Column(draw_heading("model"), 13, 4, cells.draw_model, left=True),
        Column(draw_heading("ZeRO"), 11, 4, cells.draw_zero, left=True),
        Column(draw_heading("ranks"), 5, 2, cells.draw_ranks),
        Column(draw_heading("age"), 6, 6, cells.draw_age),
        Column(draw_heading("time"), 8, 3, cells.draw_time),
        Column(draw_heading("steps"), 9, 3, cells.draw_steps),
        Column(draw_heading(get_units().pace.value), 6, 8, cells.draw_iteration),
        Column(draw_heading(f"peak {giga_unit().name}"), 10, 5, cells.draw_peak),
        Column(draw_heading("on disk"), 8, 1, cells.draw_stored),
        Column(draw_heading("iterations"), 10, 1, cells.draw_iterations, left=True),
        Column(draw_heading("what costs most"), 24 if width < 110 else 40, 7, cells.draw_worst, grows=True, left=True),
        Column(draw_heading("command"), 24, 0, cells.draw_command, left=True),
    ]


def build_few_columns(glyphs: Glyphs) -> list[Column[ListLine]]:
    """Return the columns of the short list in the overlay dialog."""
    cells = _Cells(glyphs)
    return [
        Column("recording", 26, 9, cells.draw_name, grows=True, left=True),
        Column("model", 13, 5, cells.draw_model, left=True),
        Column("ZeRO", 11, 7, cells.draw_zero, left=True),
        Column("age", 6, 6, cells.draw_age),
        Column(get_units().pace.value, 6, 8, cells.draw_iteration),
        Column(f"peak {giga_unit().name}", 10, 4, cells.draw_peak),
    ]


def draw_worst(overview: Overview, width: int, glyphs: Glyphs) -> Row:
    """Draw ``45 % GPUs idle ...``: the finding that costs most, and its share of the training time."""
    if not overview.worst:
        return () if overview.worst is None or overview.problem else (("nothing costly", "good"),)
    share = f"{format_percent(overview.worst_share)} ".rjust(6) if is_known(overview.worst_share) else " " * 6
    text = fit_text(sanitize(convert_sizes(overview.worst), glyphs), max(0, width - len(share)), glyphs)
    return ((share, "value"), (text, "warn"))


def format_command(command: Sequence[str]) -> str:
    """Return a command from its script on, without folders; all of it if there is no script."""
    place = next((place for place, word in enumerate(command) if word.endswith(".py")), 0)
    words = list(command[place:])
    return shlex.join([words[0].rpartition("/")[2], *words[1:]]) if words else ""


def format_model(model: str, parameters: int | None) -> str:
    """``Qwen2 494M``."""
    ending = next((ending for ending in _MODEL_SUFFIXES if model.endswith(ending) and model != ending), "")
    return f"{model.removesuffix(ending)} {format_number(parameters) if parameters else ''}".strip()


def format_offload(overview: Overview, glyphs: Glyphs) -> str:
    """Return the offload: ``opt→CPU``, ``all→NVMe``; "" without any."""
    places = {"cpu": "CPU", "nvme": "NVMe"}
    optimizer, parameters = places.get(overview.offload_optimizer, ""), places.get(overview.offload_parameters, "")
    if optimizer and optimizer == parameters:
        return f"all{glyphs.arrow}{optimizer}"
    parts = [f"{part}{glyphs.arrow}{place}" for part, place in (("par", parameters), ("opt", optimizer)) if place]
    return " ".join(parts)


def _format_seconds(seconds: float) -> str:
    """Format three digits or four decimals: ``0.0004``, ``0.132``, ``2.75``, ``12.3``, ``123``."""
    return f"{seconds:.{3 if seconds > 0.01 else 4}f}" if seconds < 0.9995 else format_significant(seconds)


def draw_sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> Row:
    """Draw iteration times on a scale from zero, the newest at the right. A cell shows its longest iteration.

    The first iteration, a warm-up, does not set the scale: if it is the longest it is cut and has another colour.
    """
    shown = resample_longest(np.array(values), width).tolist()
    top = max(shown[1:] or shown, default=0.0)
    styles = [_SPARKLINE_STYLE if value <= top else _CLIPPED_STYLE for value in shown]
    (row,) = draw_strip(shown, styles, top, width, 1, glyphs)
    return row
