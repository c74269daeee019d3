"""The folded iteration: what it says in words, its phases as a ribbon, and a lane for each signal under one another."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.waveform.alignment import Stretch
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.phase_bounds import name
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Watched, ribbon, time_axis
from zerotop.ui.drawing.formatting import seconds
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, Span, both_ends, filled, row_width, to_height
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import cells, fit, literal, wrap
from zerotop.ui.iteration.labels import folded, left_out, sentence, whose
from zerotop.ui.iteration.lanes import BORDER, GUTTER, LANES, PINNED, Lane, border, codes, draw_lane, lanes
from zerotop.ui.live.memory import panel_title

_LANE = 4  # rows of a lane below which the next one is not shown
_TWO_RIBBONS = 12  # rows of the picture from which on the phases within phases have a row
# How far the next iteration is shown, as a share of one: what lies at an end goes on there.
_NEXT = 0.25


@dataclass(frozen=True)
class Shown:
    """What to draw: the fold, another one behind it, and which lane comes first."""

    fold: WaveformFold
    pinned: WaveformFold | None = None
    pinned_name: str = ""  # whose it is, where it is another session's
    first_lane: str = LANES[0].id


def draw_waveform(
    shown: Shown, width: int, height: int, glyphs: Glyphs, scales: Watched, *, focused: bool = False
) -> list[Row]:
    """The panel: ``height`` rows of ``width`` cells."""
    fold = shown.fold
    text, style = sentence(fold, glyphs)
    rows = [_title(fold, width, glyphs, focused)]
    if height >= 3:
        aside = _aside(shown, width)
        words: Row = ((glyphs.plain(text), style),)
        fits = row_width(words) + row_width(aside) + 2 <= width
        rows.append(both_ends(words, aside, width, glyphs) if fits else filled(words, width, glyphs))
    room = height - len(rows) - 1
    if room >= 1:
        rows += _picture(shown, width, room, glyphs, scales)
    return to_height(rows, width, height, glyphs)


def _aside(shown: Shown, width: int) -> Row:
    """What was left out, or what is pinned, where its own ribbon has no room to say so."""
    if shown.pinned is not None and not _said_in_ribbon(shown, width):
        return ((pinned_words(shown), PINNED),)
    return ((left_out(shown.fold), "muted"),)


def pinned_words(shown: Shown) -> str:
    """What lies behind: ``pinned: 884 ms, median of 8, skipped steps 1-8``; empty where nothing does."""
    if shown.pinned is None:
        return ""
    return f"{shown.pinned_name or 'pinned'}: {seconds(shown.pinned.iteration_s)}, {folded(shown.pinned)}"


def _said_in_ribbon(shown: Shown, width: int) -> bool:
    columns = width - _gutter(width)
    pinned_s = shown.pinned.iteration_s if shown.pinned is not None else 0.0
    return len(pinned_words(shown)) + 1 <= columns - border(pinned_s, _end_s(shown), columns)


def _gutter(width: int) -> int:
    return (GUTTER if width >= 40 else 0) + AXIS_WIDTH


def _end_s(shown: Shown) -> float:
    """Where the picture ends: in the next iteration, or with what is pinned."""
    pinned_s = shown.pinned.iteration_s if shown.pinned is not None else 0.0
    return max(shown.fold.iteration_s * (1 + _NEXT), pinned_s)


def _title(fold: WaveformFold, width: int, glyphs: Glyphs, focused: bool) -> Row:
    parts: list[Span] = [*panel_title("Iteration", focused), (f" {seconds(fold.iteration_s)}", "title-value")]
    for text in (folded(fold), whose(fold)):
        if row_width(parts) + len(text) + 4 <= width:
            parts.append((f" {glyphs.bullet} {glyphs.plain(text)}", "muted"))
    return rule(tuple(parts), width, glyphs)


def _picture(shown: Shown, width: int, room: int, glyphs: Glyphs, scales: Watched) -> list[Row]:
    """Ribbons, lanes and the axis of time: ``room`` rows and one."""
    fold, pinned = shown.fold, shown.pinned
    gutter, end_s = _gutter(width), _end_s(shown)
    ribbons = [_ribbon("phases", fold, 0, end_s, width, gutter, glyphs)]
    if room >= _TWO_RIBBONS and any(stretch.depth for stretch in fold.stretches):
        ribbons.append(_ribbon("within", fold, 1, end_s, width, gutter, glyphs))
    if pinned is not None and room >= 7:
        whose = literal(shown.pinned_name, glyphs) or "pinned"
        ribbons.append(_ribbon(whose, pinned, 0, end_s, width, gutter, glyphs, once=pinned_words(shown)))
    ribbons = ribbons[:room]
    chosen = _rotated(lanes(fold), shown.first_lane)
    left = room - len(ribbons)
    rows: list[Row] = list(ribbons)
    for lane, height in zip(chosen, heights(left, len(chosen)), strict=False):
        rows += draw_lane(lane, fold, pinned, end_s, width, height, glyphs, scales)
    axis = time_axis(0.0, end_s, width - gutter, glyphs)
    lead: Row = ((" " * (gutter - 1), "axis"), (glyphs.corner, "rule"))
    rows.append(filled((*lead, *axis), width, glyphs))
    return rows


def heights(room: int, count: int) -> list[int]:
    """Rows of each lane, for as many as fit: all of the same height, except that the first get what remains."""
    if room < 2 or not count:
        return []
    shown = max(1, min(count, room // _LANE))
    each, more = divmod(room, shown)
    return [each + (place < more) for place in range(shown)]


def lanes_hidden(fold: WaveformFold, width: int, height: int, *, pinned: bool) -> bool:
    """Whether there are lanes that a panel of this size has no room for."""
    ribbons = 1 + (height - 3 >= _TWO_RIBBONS) + pinned
    return len(heights(height - 3 - ribbons, len(lanes(fold)))) < len(lanes(fold))


def _rotated(found: list[Lane], first: str) -> list[Lane]:
    begin = next((place for place, lane in enumerate(found) if lane.id == first), 0)
    return found[begin:] + found[:begin]


def _ribbon(
    word: str,
    fold: WaveformFold,
    depth: int,
    end_s: float,
    width: int,
    gutter: int,
    glyphs: Glyphs,
    *,
    once: str = "",
) -> Row:
    """The phases of one depth, with their names where they fit; beyond the iteration the next one's, or what it is."""
    canvas = Canvas(width - gutter, 1, glyphs)
    mine = [stretch for stretch in fold.stretches if stretch.depth == depth]
    which = codes(mine, depth, fold.iteration_s, end_s, canvas.dots)
    edge = border(fold.iteration_s, end_s, canvas.width)
    if once:
        which[2 * edge :] = -1
    styles = [phase_style(name(stretch.phase)) for stretch in mine]
    ribbon(canvas, which, styles, row=0, rows=1)
    for stretch in mine:
        _write(canvas, stretch, end_s, glyphs)
    if once:
        if len(once) + 1 <= canvas.width - edge:
            canvas.text(edge + 1, 0, literal(glyphs.plain(once), glyphs), PINNED)
    elif not depth:
        _write_next(canvas, edge, glyphs)
    lead = filled(((fit(glyphs.plain(word), max(0, gutter - 1), glyphs), "muted"),), gutter, glyphs)
    return filled((*lead, *canvas.rows()[0]), width, glyphs)


def _write(canvas: Canvas, stretch: Stretch, end_s: float, glyphs: Glyphs) -> None:
    begin, end = (round(place / end_s * canvas.width) for place in (stretch.begin_s, stretch.end_s))
    word = phase_word(name(stretch.phase), glyphs)
    if cells(word) + 2 <= end - begin:
        canvas.text(begin + 1, 0, word, _on_phase(glyphs))


def _on_phase(glyphs: Glyphs) -> str:
    """The style of a name on a phase's colour, or where there are no such colours."""
    return "ground" if glyphs.smooth else "value"


def _write_next(canvas: Canvas, edge: int, glyphs: Glyphs) -> None:
    canvas.mark(edge, 0, glyphs.line, BORDER)
    word = "next iteration"
    if len(word) + 3 <= canvas.width - edge:
        canvas.text(edge + 2, 0, word, _on_phase(glyphs))


def draw_nothing(lines: tuple[tuple[str, str], ...], width: int, height: int, glyphs: Glyphs, *, focused: bool) -> list[Row]:
    """The panel where nothing can be folded: what is missing and how to get it, as (text, style)."""
    rows = [rule(panel_title("Iteration", focused), width, glyphs)]
    for text, style in lines:
        said = wrap(glyphs.plain(text), max(1, width - 4), max(0, height - len(rows)), glyphs)
        rows += [filled(((f"  {line}", style),), width, glyphs) for line in said]
    return to_height(rows, width, height, glyphs)
