"""The phases of a folded iteration as a table: how long, how much of it, on the device, and idle."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.idle_time import idle, idle_s, mean
from zerotop.analysis.waveform.phase_bounds import PhaseRow
from zerotop.ui.charts.bars import stacked_bar
from zerotop.ui.drawing.formatting import fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, to_height
from zerotop.ui.drawing.table import Column, place, rule
from zerotop.ui.live.memory import panel_title

FULL_WIDTH = 66  # cells in which all columns have room
_FIGURE = 7
_LONG_S = 60.0


@dataclass(frozen=True)
class Line:
    """A row of the table. Times in seconds; NaN is not known, None nothing to say."""

    phase: str
    depth: int
    median_s: float
    p90_s: float | None
    share: float | None
    device_s: float | None
    idle_s: float
    cores: float
    pinned_s: float
    times: int = 1


def lines(fold: WaveformFold, pinned: WaveformFold | None) -> list[Line]:
    """The phases, and last the whole iteration."""
    before = {(row.phase, row.depth): row.median_s for row in pinned.phases} if pinned is not None else {}
    found = [_line(fold, row, before.get((row.phase, row.depth), math.nan)) for row in fold.phases]
    cores = mean(fold, "cores", [(0.0, fold.iteration_s)])
    before_s = pinned.iteration_s if pinned is not None else math.nan
    whole = Line("iteration", 0, fold.iteration_s, None, None, None, idle(fold).total_s, cores, before_s)
    return [*found, whole]


def _line(fold: WaveformFold, row: PhaseRow, pinned_s: float) -> Line:
    resolved = "cores" in fold.signals and fold.signals["cores"].resolved
    cores = mean(fold, "cores", row.places) if resolved else math.nan
    numbers = (row.median_s, row.p90_s, row.share, row.device_s, idle_s(fold, row), cores, pinned_s)
    return Line(row.phase, row.depth, *numbers, row.times)


def draw_phases(
    fold: WaveformFold, pinned: WaveformFold | None, width: int, height: int, glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """The panel: ``height`` rows of ``width`` cells, the phases that take least left out where there is no room."""
    # The shortest phases are told in whole milliseconds beside a step of seconds.
    unit, factor = ("s", 1.0) if fold.iteration_s >= _LONG_S else ("ms", 1e3)
    shown = fitting(lines(fold, pinned), height - 1)
    columns = place(_columns(fold, pinned is not None, unit, factor, glyphs), width)
    rows = [rule(panel_title(f"Phases {unit}", focused), width, glyphs, columns)]
    rows += [columns.row(line, width, glyphs) for line in shown]
    return to_height(rows, width, height, glyphs)


def fitting(found: list[Line], room: int) -> list[Line]:
    """As many as there is room for: first those within others go, the shortest first, then the shortest of all."""
    kept = list(found)
    while len(kept) > max(0, room):
        inner = [line for line in kept if line.depth] or kept[:-1] or kept
        kept.remove(min(inner, key=lambda line: line.median_s))
    return kept


def _columns(fold: WaveformFold, pinned: bool, unit: str, factor: float, glyphs: Glyphs) -> list[Column[Line]]:
    decimals = 2 if unit != "ms" else 1 if fold.iteration_s < 0.1 else 0

    def figure(seconds: float | None, style: str = "text") -> Row:
        if seconds is None:
            return ((" " * _FIGURE, style),)
        text = fixed(seconds * factor, decimals, _FIGURE)
        return ((glyphs.plain(text), style if not math.isnan(seconds) else "muted"),)

    def change(line: Line) -> Row:
        more = line.median_s - line.pinned_s
        if math.isnan(more):
            return figure(math.nan)
        least = 0.5 * 10.0**-decimals
        sign = "+" if more * factor >= least else glyphs.minus if more * factor <= -least else " "
        return ((f"{sign}{abs(more) * factor:.{decimals}f}".rjust(_FIGURE), "value" if sign != " " else "muted"),)

    def cores(line: Line) -> Row:
        return ((glyphs.plain(fixed(line.cores, 1, 6)), "text" if not math.isnan(line.cores) else "muted"),)

    def share(line: Line, width: int) -> Row:
        if line.share is None:
            return ((" " * width, "text"),)
        bar = stacked_bar([(phase_style(line.phase), line.share)], 1.0, width - 6, glyphs)
        return (*bar, (f"{line.share:6.1%}".rjust(6), "muted" if line.depth else "text"))

    heading = ("heading",)
    found = [
        Column[Line]((("phase", *heading),), 14, 9, lambda line, width: _name(line, glyphs), left=True),
        Column[Line]((("median", *heading),), _FIGURE, 9, lambda line, width: figure(line.median_s, "value")),
        Column[Line]((("p90", *heading),), _FIGURE, 5, lambda line, width: figure(line.p90_s)),
    ]
    if pinned:
        found.append(Column((("pinned", *heading),), _FIGURE, 7, lambda line, width: figure(line.pinned_s, "series-2")))
        found.append(Column((("change", *heading),), _FIGURE, 8, lambda line, width: change(line)))
    found.append(Column((("share", *heading),), 12, 3, share, grows=True))
    if any(not math.isnan(row.device_s) for row in fold.phases):
        found.append(Column((("device", *heading),), _FIGURE, 4, lambda line, width: figure(line.device_s)))
    if "utilization" in fold.signals:
        found.append(Column((("idle", *heading),), _FIGURE, 8, lambda line, width: figure(line.idle_s)))
    if "cores" in fold.signals:
        found.append(Column((("cores", *heading),), 6, 6, lambda line, width: cores(line)))
    return found


def _name(line: Line, glyphs: Glyphs) -> Row:
    if line.phase == "iteration":
        return (("iteration", "value"),)
    style = phase_style(line.phase)
    word = phase_word(line.phase, glyphs) + (f" {glyphs.times}{line.times}" if line.times > 1 and not line.depth else "")
    return ((" " * line.depth, "text"), (f"{glyphs.sample(style)} ", style), (word, "muted" if line.depth else "text"))
