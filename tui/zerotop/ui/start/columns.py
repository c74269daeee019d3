"""The columns of the list of recordings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.reports.recording_index import Recording
from zerotop.analysis.reports.recording_summary import DETACHED, Overview, longest
from zerotop.ui.base.start_interfaces import Item, RunningJob
from zerotop.ui.charts.strips import strip
from zerotop.ui.drawing.formatting import MISSING, about, clock, count, per_second, significant, size
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.table import Column
from zerotop.ui.drawing.text import fit, literal
from zerotop.ui.drawing.units import Pace, chosen, giga

UNKNOWN = Overview("")
_SPARKLINE, _CLIPPED = "load", "muted"
# What names of models' classes end in, and what says nothing more than that it is a model.
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification", "ForMaskedLM")


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the list."""

    item: Item
    chosen: bool
    marked: bool
    now_ns: int

    @property
    def about(self) -> Overview:
        """What is known of a recording."""
        return (self.item.about if isinstance(self.item, Recording) else None) or UNKNOWN


# What somebody wanted.
_CALM = {"stopped": "warn", DETACHED: "text"}


def state(item: Item, glyphs: Glyphs) -> tuple[str, str]:
    """(word, style): ``● live``, ``exit 0``, what ended it, or that it cannot be read."""
    if isinstance(item, RunningJob):
        return "unrecorded", "warn"
    known = item.about
    if item.live:
        return f"{glyphs.dot} live", "good"
    if known is None:
        return f"reading {glyphs.ellipsis}", "muted"
    if known.problem:
        return "damaged", "alert"
    if known.exit_code == 0:
        return "exit 0", "text"
    if known.why:
        return known.why, _CALM.get(known.why, "alert")
    return ("end unseen", "warn") if known.exit_code is None else (f"exit {known.exit_code}", "alert")


class _Cells:
    """What is in each column."""

    def __init__(self, glyphs: Glyphs) -> None:
        self.glyphs = glyphs

    def _plain(self, text: str, style: str = "text") -> Row:
        return ((self.glyphs.plain(text), style),)

    def _right(self, text: str, width: int, style: str = "text") -> Row:
        return self._plain(text.rjust(width), "muted" if text == MISSING else style)

    def mark(self, line: Line, width: int) -> Row:
        cursor = self.glyphs.prompt if line.chosen else " "
        return ((cursor, "value"), ((self.glyphs.swatch if line.marked else " ") + " ", "accent"))

    def name(self, line: Line, width: int) -> Row:
        text = line.item.script if isinstance(line.item, RunningJob) else line.item.name
        return ((fit(literal(text, self.glyphs), width, self.glyphs, words=False), "value"),)

    def state(self, line: Line, width: int) -> Row:
        word, style = state(line.item, self.glyphs)
        return ((word[:width], style),)

    def model(self, line: Line, width: int) -> Row:
        text = literal(short_model(line.about.model, line.about.parameters), self.glyphs)
        return ((fit(text, width, self.glyphs), "text"),)

    def zero(self, line: Line, width: int) -> Row:
        stage = line.item.zero_stage if isinstance(line.item, RunningJob) else line.about.zero_stage
        offload = short_offload(line.about, self.glyphs)
        return () if stage is None else ((f"{stage} {offload}".strip(), "text"),)

    def ranks(self, line: Line, width: int) -> Row:
        number = line.item.ranks if isinstance(line.item, RunningJob) else line.about.ranks
        return self._right(str(number or ""), width)

    def age(self, line: Line, width: int) -> Row:
        if isinstance(line.item, RunningJob):
            return ()
        return self._right(about(max(0.0, (line.now_ns - line.item.begin_ns) / 1e9)), width)

    def time(self, line: Line, width: int) -> Row:
        seconds = line.item.age_s if isinstance(line.item, RunningJob) else line.about.seconds
        return self._right(clock(seconds) if math.isfinite(seconds) else "", width)

    def steps(self, line: Line, width: int) -> Row:
        done, total = line.about.steps, line.about.total_steps
        text = str(done or "") if total is None or total == done else f"{done}/{total if total < 10_000 else count(total)}"
        return self._right(text, width)

    def iteration(self, line: Line, width: int) -> Row:
        seconds = line.about.iteration_s
        if math.isnan(seconds) or seconds <= 0:
            return ()
        text = per_second(seconds) if chosen().pace is Pace.RATE else _seconds(seconds)
        return self._right(text, width, "value")

    def peak(self, line: Line, width: int) -> Row:
        highest = line.about.peak_bytes
        if highest is None:
            return ()
        where = "host" if line.about.peak_on_host else "GPU "
        return ((f"{significant(highest / giga().bytes)} ".rjust(width - 4), "text"), (where, "muted"))

    def stored(self, line: Line, width: int) -> Row:
        return self._right(size(line.item.stamp.bytes) if isinstance(line.item, Recording) else "", width)

    def command(self, line: Line, width: int) -> Row:
        text = literal(script_and_options(line.about.command), self.glyphs)
        return ((fit(text, width, self.glyphs), "muted"),)

    def iterations(self, line: Line, width: int) -> Row:
        return spark(line.about.iterations, width, self.glyphs)


def columns(glyphs: Glyphs) -> list[Column[Line]]:
    """All there are; which of them are shown depends on the width."""
    cells = _Cells(glyphs)

    def heading(text: str) -> Row:
        return ((text, "heading"),)

    return [
        Column((), 2, 9, cells.mark),
        Column(heading("session"), 26, 9, cells.name, left=True),
        Column(heading("state"), 11, 9, cells.state, left=True),
        Column(heading("model"), 13, 4, cells.model, left=True),
        Column(heading("ZeRO"), 11, 4, cells.zero, left=True),
        Column(heading("ranks"), 5, 2, cells.ranks),
        Column(heading("age"), 6, 6, cells.age),
        Column(heading("time"), 8, 3, cells.time),
        Column(heading("steps"), 9, 3, cells.steps),
        Column(heading(chosen().pace.value), 6, 8, cells.iteration),
        Column(heading(f"peak {giga().name}"), 10, 5, cells.peak),
        Column(heading("on disk"), 8, 1, cells.stored),
        Column(heading("iterations"), 10, 7, cells.iterations, grows=True, left=True),
        Column(heading("command"), 24, 0, cells.command, grows=True, left=True),
    ]


def few_columns(glyphs: Glyphs) -> list[Column[Line]]:
    """Those by which one recording is chosen among others: its name, what was trained and how, when, and how fast."""
    cells = _Cells(glyphs)
    return [
        Column((("session", "heading"),), 26, 9, cells.name, grows=True, left=True),
        Column((("model", "heading"),), 13, 5, cells.model, left=True),
        Column((("ZeRO", "heading"),), 11, 7, cells.zero, left=True),
        Column((("age", "heading"),), 6, 6, cells.age),
        Column(((chosen().pace.value, "heading"),), 6, 8, cells.iteration),
        Column(((f"peak {giga().name}", "heading"),), 10, 4, cells.peak),
    ]


def script_and_options(command: Sequence[str]) -> str:
    """A command from its script on, without folders; all of it where there is none."""
    place = next((place for place, word in enumerate(command) if word.endswith(".py")), 0)
    words = list(command[place:])
    return shlex.join([words[0].rpartition("/")[2], *words[1:]]) if words else ""


def short_model(model: str, parameters: int | None) -> str:
    """``Qwen2 494M``."""
    ending = next((ending for ending in _ENDINGS if model.endswith(ending) and model != ending), "")
    return f"{model.removesuffix(ending)} {count(parameters) if parameters else ''}".strip()


def short_offload(known: Overview, glyphs: Glyphs) -> str:
    """What is offloaded where: ``opt→CPU``, ``all→NVMe``; empty when nothing is."""
    places = {"cpu": "CPU", "nvme": "NVMe"}
    optimizer, parameters = places.get(known.offload_optimizer, ""), places.get(known.offload_parameters, "")
    if optimizer and optimizer == parameters:
        return f"all{glyphs.arrow}{optimizer}"
    parts = [f"{what}{glyphs.arrow}{where}" for what, where in (("par", parameters), ("opt", optimizer)) if where]
    return " ".join(parts)


def _seconds(seconds: float) -> str:
    """Three digits: ``0.132``, ``2.75``, ``12.3``, ``123``."""
    return f"{seconds:.3f}" if seconds < 0.9995 else significant(seconds)


def spark(values: Sequence[float], width: int, glyphs: Glyphs) -> Row:
    """Iteration times on a scale from zero, the newest at the right; where there is too little room, the longest.

    The first one, which warms up, does not make the scale: where it is longer than all others it has another colour.
    """
    shown = longest(np.array(values), width).tolist()
    top = max(shown[1:] or shown, default=0.0)
    styles = [_SPARKLINE if value <= top else _CLIPPED for value in shown]
    (row,) = strip(shown, styles, top, width, 1, glyphs)
    return row
