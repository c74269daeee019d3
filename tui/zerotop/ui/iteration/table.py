"""The phases of a folded iteration as a table: duration, share, device time, idle time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.idle_time import compute_idle_s, compute_signal_mean, find_idle_time
from zerotop.analysis.waveform.phase_bounds import PhaseRow
from zerotop.ui.charts.bars import draw_stacked_bar
from zerotop.ui.drawing.formatting import format_fixed
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, fit_height
from zerotop.ui.drawing.table import Column, draw_rule, panel_title, place_columns

FULL_WIDTH = 66  # cells that all columns need
_FIGURE_WIDTH = 7
_LONG_S = 60.0


@dataclass(frozen=True)
class PhaseLine:
    """A row of the table. Times in seconds; NaN: not known, None: does not apply."""

    phase: str
    depth: int
    mean_s: float
    p90_s: float | None
    share: float | None
    device_s: float | None
    idle_s: float
    cores: float
    pinned_s: float
    repeats: int = 1


def build_lines(fold: WaveformFold, pinned: WaveformFold | None) -> list[PhaseLine]:
    """Return a line for each phase, and last the whole iteration."""
    before = {(row.phase, row.depth): row.mean_s for row in pinned.phases} if pinned is not None else {}
    phases = [_build_line(fold, row, before.get((row.phase, row.depth), math.nan)) for row in fold.phases]
    cores = compute_signal_mean(fold, "cores", [(0.0, fold.iteration_s)])
    before_s = pinned.iteration_s if pinned is not None else math.nan
    whole = PhaseLine("iteration", 0, fold.iteration_s, None, None, None, find_idle_time(fold).total_s, cores, before_s)
    return [*phases, whole]


def _build_line(fold: WaveformFold, row: PhaseRow, pinned_s: float) -> PhaseLine:
    resolved = "cores" in fold.signals and fold.signals["cores"].resolved
    cores = compute_signal_mean(fold, "cores", row.intervals) if resolved else math.nan
    numbers = (row.mean_s, row.p90_s, row.share, row.device_s, compute_idle_s(fold, row), cores, pinned_s)
    return PhaseLine(row.phase, row.depth, *numbers, row.span_count)


def draw_phases(
    fold: WaveformFold,
    pinned: WaveformFold | None,
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    focused: bool = False,
    waits_for_launches: bool = False,
) -> list[Row]:
    """Draw the panel: ``height`` rows of ``width`` cells. The shortest phases are left out if there is no room."""
    # Milliseconds show the shortest phases even beside a step of seconds.
    unit, factor = ("s", 1.0) if fold.iteration_s >= _LONG_S else ("ms", 1e3)
    shown = choose_lines(build_lines(fold, pinned), height - 1)
    columns = _build_columns(fold, pinned is not None, unit, factor, glyphs)
    if waits_for_launches:  # between a phase's CUDA events, too
        columns = [column for column in columns if column.heading != f"CUDA {unit}"]
    placed = place_columns(columns, width)
    rows = [draw_rule(panel_title(f"Phases {unit}", focused), width, glyphs, placed)]
    rows += [placed.draw_row(line, width, glyphs) for line in shown]
    return fit_height(rows, width, height, glyphs)


def choose_lines(lines: list[PhaseLine], room: int) -> list[PhaseLine]:
    """Return as many lines as fit. Nested phases are dropped first, each time the shortest.

    Of the others that do not fit, one line tells the number and the sum, so that the table adds up.
    """
    kept = [line for line in lines if not line.depth]
    outer = len(kept) - 1
    if outer >= room >= 3:
        longest = sorted(kept[:-1], key=lambda line: -line.mean_s)[: room - 2]
        others = [line for line in kept[:-1] if line not in longest]
        return [*(line for line in kept if line in longest), _merge_lines(others), kept[-1]]
    kept = list(lines)
    while len(kept) > max(0, room):
        inner = [line for line in kept if line.depth] or kept[:-1] or kept
        kept.remove(min(inner, key=lambda line: line.mean_s))
    return kept


def _merge_lines(lines: list[PhaseLine]) -> PhaseLine:
    means, shares, idle, pinned = (
        sum(getattr(line, name) or 0.0 for line in lines) for name in ("mean_s", "share", "idle_s", "pinned_s")
    )
    return PhaseLine(f"{len(lines)} others", 0, means, None, shares, None, idle, math.nan, pinned)


def _build_columns(fold: WaveformFold, pinned: bool, unit: str, factor: float, glyphs: Glyphs) -> list[Column[PhaseLine]]:
    decimals = 2 if unit != "ms" else 1 if fold.iteration_s < 0.1 else 0

    def draw_figure(seconds: float | None, style: str = "text") -> Row:
        if seconds is None:
            return ((" " * _FIGURE_WIDTH, style),)
        text = format_fixed(seconds * factor, decimals, _FIGURE_WIDTH)
        return ((glyphs.to_plain(text), style if not math.isnan(seconds) else "muted"),)

    def draw_change(line: PhaseLine) -> Row:
        more = line.mean_s - line.pinned_s
        if math.isnan(more):
            return draw_figure(math.nan)
        least = 0.5 * 10.0**-decimals
        sign = "+" if more * factor >= least else glyphs.minus if more * factor <= -least else " "
        return ((f"{sign}{abs(more) * factor:.{decimals}f}".rjust(_FIGURE_WIDTH), "value" if sign != " " else "muted"),)

    columns = [
        Column[PhaseLine]("phase", 14, 9, lambda line, width: _draw_name(line, glyphs), left=True),
        Column[PhaseLine]("mean", _FIGURE_WIDTH, 9, lambda line, width: draw_figure(line.mean_s, "value")),
        Column[PhaseLine]("p90", _FIGURE_WIDTH, 5, lambda line, width: draw_figure(line.p90_s)),
    ]
    if pinned:
        columns.append(Column("pinned", _FIGURE_WIDTH, 7, lambda line, width: draw_figure(line.pinned_s, "series-2")))
        columns.append(Column("change", _FIGURE_WIDTH, 8, lambda line, width: draw_change(line)))
    columns.append(Column("share", 12, 3, lambda line, width: _draw_share(line, width, glyphs), grows=True))
    if any(not math.isnan(row.device_s) for row in fold.phases):
        columns.append(Column(f"CUDA {unit}", _FIGURE_WIDTH, 4, lambda line, width: draw_figure(line.device_s)))
    if "utilization" in fold.signals:
        columns.append(Column("idle", _FIGURE_WIDTH, 8, lambda line, width: draw_figure(line.idle_s)))
    if "cores" in fold.signals:
        columns.append(Column("cores", 6, 6, lambda line, width: _draw_cores(line, glyphs)))
    return columns


def _draw_cores(line: PhaseLine, glyphs: Glyphs) -> Row:
    return ((glyphs.to_plain(format_fixed(line.cores, 1, 6)), "text" if not math.isnan(line.cores) else "muted"),)


def _draw_share(line: PhaseLine, width: int, glyphs: Glyphs) -> Row:
    if line.share is None:
        return ((" " * width, "text"),)
    bar = draw_stacked_bar([(phase_style(line.phase), line.share)], 1.0, width - 6, glyphs)
    return (*bar, (f"{line.share:6.1%}".rjust(6), "muted" if line.depth else "text"))


def _draw_name(line: PhaseLine, glyphs: Glyphs) -> Row:
    if line.phase == "iteration" or " " in line.phase:
        return ((line.phase, "value" if line.phase == "iteration" else "label"),)
    style = phase_style(line.phase)
    word = phase_word(line.phase, glyphs) + (f" {glyphs.times}{line.repeats}" if line.repeats > 1 and not line.depth else "")
    return ((" " * line.depth, "text"), (f"{glyphs.find_sample(style)} ", style), (word, "muted" if line.depth else "text"))
