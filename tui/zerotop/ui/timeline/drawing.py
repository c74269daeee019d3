"""The timeline: lanes under one another that share one axis of time, and one cursor through all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Floats
from zerotop.analysis.timeline.phase_ribbon import as_codes
from zerotop.ui.charts import AXIS_WIDTH, Canvas, axis_row, ribbon, stack, time_axis
from zerotop.ui.charts.step_axis import LABEL_WIDTH, labels
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, both_ends, filled, merged
from zerotop.ui.drawing.text import cells, fit, literal, wrap
from zerotop.ui.timeline.labels import last_row, legend, moment_text
from zerotop.ui.timeline.lane_charts import draw_charts
from zerotop.ui.timeline.lanes import BY_NAME, MARKS, RIBBONS, STEPS, SUMMARY, TIME, Place
from zerotop.ui.timeline.picture import Picture
from zerotop_probe.recording.tables import PHASES

LEAST_WIDTH = 30
# A column in which the phase that takes most of it has less than this is a mixture, and
_PURE = 0.75
# where so many columns are, a tall ribbon shows the phases' shares.
_MIXED = 0.5
_NOTHING = (
    "Nothing is recorded yet. Lanes of memory and processors appear with the first samples, a second after the job begins; "
    "a ribbon of phases for each rank when it makes its DeepSpeed engine."
)
_TOO_NARROW = "Too narrow for a timeline."
_STYLES = [phase_style(phase) for phase in PHASES]


def legend_width(width: int) -> int:
    """Cells for words at the left of the charts."""
    return 17 if width < 110 else 20


def chart_begin(width: int) -> int:
    """The column in which the charts begin."""
    return legend_width(width) + AXIS_WIDTH


def chart_cells(width: int) -> int:
    """How wide the charts are."""
    return max(0, width - chart_begin(width))


def draw_timeline(picture: Picture, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """The whole picture: ``height`` rows of ``width`` cells, of which ``chart_cells`` are the picture's."""
    drawn = [place for place in picture.places if place.name not in _TEXTS]
    canvas = Canvas(picture.cells, max((place.top + place.height for place in drawn), default=0), glyphs)
    words = _charts(picture, drawn, canvas, width)
    rows = [(*left, *row) for left, row in zip(words, canvas.rows(), strict=True)]
    rows += [_TEXTS[place.name](picture, width, glyphs) for place in picture.places if place.name in _TEXTS]
    rows += [filled((), width, glyphs)] * (height - len(rows))
    return rows[:height]


def _charts(picture: Picture, places: Sequence[Place], canvas: Canvas, width: int) -> list[Row]:
    """Draws all that is there for every cell of time, all on one canvas; returns what is at the left of its rows."""
    nothing: Row = ((" " * chart_begin(width), "text"),)
    words = [nothing] * canvas.height
    lanes = [place for place in places if place.name in BY_NAME]
    for place in places:
        if picture.range is not None and place.name != MARKS:
            begin, end = (picture.cell(moment) for moment in picture.range)
            canvas.ground(begin, end + 1, "cursor-ground", top=place.top, bottom=place.top + place.height)
        if place.name == RIBBONS:
            words[place.top : place.top + place.height] = _ribbons(picture, place, canvas, width)
        if place.name == MARKS:
            words[place.top] = _marks(picture, canvas.part(place.top, 1), width)
    for place, axis in zip(lanes, draw_charts(canvas, picture, lanes), strict=True):
        left = legend(place.name, picture, axis, place.height, legend_width(width), canvas.glyphs)
        sides = labels(axis, place.height, canvas.glyphs)
        words[place.top : place.top + place.height] = [(*row, *side) for row, side in zip(left, sides, strict=True)]
    # Over the cursor are the marks' words.
    above = sum(place.height for place in places if place.name == MARKS)
    _cursor(canvas.part(above, canvas.height - above), picture.cell(picture.cursor))
    return words


def _cursor(canvas: Canvas, x: int) -> None:
    """A thin line through everything."""
    if 0 <= x < canvas.width:
        canvas.back[:, x] = canvas.shown((slice(None), x))
        canvas.characters[:, x] = ord(canvas.glyphs.line)
        canvas.fore[:, x] = canvas.number("cursor")


def draw_nothing(width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """What is there instead while nothing was recorded, or no room for charts."""
    text = _TOO_NARROW if width < LEAST_WIDTH else _NOTHING
    lines = wrap(text, max(1, min(72, width - 4)), max(0, height), glyphs)
    above = max(0, (height - len(lines)) // 3)
    rows = [filled((), width, glyphs)] * above
    rows += [
        filled(((" " * max(0, (width - 72) // 2), "text"), (glyphs.plain(line), "muted")), width, glyphs) for line in lines
    ]
    return [*rows, *[filled((), width, glyphs)] * (height - len(rows))][:height]


def _ribbons(picture: Picture, place: Place, canvas: Canvas, width: int) -> list[Row]:
    seconds = [picture.timeline.phases[rank] for rank in picture.ranks]
    codes, tall = as_codes(np.stack(seconds)), place.tall
    mixed = tall > 1 and _mixed(seconds[0])
    if mixed:
        shares = [(style, _share(seconds[0], style)) for style in dict.fromkeys(_STYLES)]
        stack(canvas.part(place.top, tall), [(style, share) for style, share in shares if share.any()], top=1.0)
    rows = np.repeat(codes, [0 if mixed else tall, *[1] * (len(codes) - 1)], axis=0)
    ribbon(canvas, rows, _STYLES, row=place.top + place.height - len(rows), rows=len(rows))
    nothing: Row = ((" " * chart_begin(width), "text"),)
    words = [_whose(picture, *whose, width, canvas.glyphs) for whose in zip(picture.ranks, codes, strict=True)]
    return [words[0], *[nothing] * (tall - 1), *words[1:]]


def _mixed(seconds: Floats) -> bool:
    total = seconds.sum(axis=0)
    known = total > 0
    return bool(known.any()) and float(np.mean(seconds.max(axis=0)[known] < _PURE * total[known])) > _MIXED


def _share(seconds: Floats, style: str) -> Floats:
    """What phases of one colour take of each cell, of the time that is known."""
    chosen = seconds[[place for place, other in enumerate(_STYLES) if other == style]].sum(axis=0).reshape(-1, 2).sum(axis=1)
    total = seconds.sum(axis=0).reshape(-1, 2).sum(axis=1)
    return np.asarray(np.divide(chosen, total, out=np.zeros(len(total)), where=total > 0))


def _whose(picture: Picture, rank: int, codes: NDArray[np.int16], width: int, glyphs: Glyphs) -> Row:
    """``rank 0  backward``: whose ribbon, and its phase at the cursor."""
    window = picture.timeline.window
    column = picture.cursor // window.column_ns - window.first
    code = int(codes[column]) if 0 <= column < len(codes) else -1
    phase: Row = ((phase_word(PHASES[code], glyphs), _STYLES[code]),) if code >= 0 else ()
    style = "value" if rank == picture.subject.rank else "label"
    more = f" +{picture.other_ranks}" if picture.other_ranks and rank == picture.ranks[-1] else ""
    return merged((*both_ends(((f"rank {rank}{more}", style),), phase, chart_begin(width) - 1, glyphs), (" ", "text")))


def _marks(picture: Picture, canvas: Canvas, width: int) -> Row:
    glyphs = canvas.glyphs
    here = sorted((mark for mark in picture.marks if 0 <= picture.cell(mark.at) < picture.cells), key=lambda mark: mark.at)
    begins = [picture.cell(mark.at) for mark in here]
    for mark, begin, end in zip(here, begins, [*begins, picture.cells][1:], strict=True):
        canvas.mark(begin, 0, glyphs.mark, mark.style)
        room = end - begin - 3
        if room >= 8:
            canvas.text(
                begin + 2, 0, fit(literal(mark.text, glyphs), room, glyphs), mark.style if mark.style != "accent" else "text"
            )
    count = len(here)
    words = f"{count} found here" if count else "nothing found" if width >= 110 else ""
    return filled(((words, "label"),), chart_begin(width), glyphs)


def _steps(picture: Picture, width: int, glyphs: Glyphs) -> Row:
    marks = [(picture.cell(begin), str(number)) for begin, number in picture.steps]
    here = "step" if picture.step is None else f"step {picture.step}"
    return _axis(here, axis_row(marks, picture.cells, glyphs), picture, width, glyphs, " ")


def _time(picture: Picture, width: int, glyphs: Glyphs) -> Row:
    begin_s, end_s = picture.begin / 1e9, (picture.begin + picture.cells * picture.cell_ns) / 1e9
    row = time_axis(begin_s, end_s, picture.cells, glyphs, zero_s=0.0)
    return _axis(moment_text(picture.cursor, picture.cell_ns), row, picture, width, glyphs, glyphs.corner)


def _axis(words: str, row: Row, picture: Picture, width: int, glyphs: Glyphs, corner: str) -> Row:
    left = filled(((words, "value"),), legend_width(width) + LABEL_WIDTH, glyphs)
    return filled((*left, (corner, "rule"), *with_cursor(row, picture.cell(picture.cursor), glyphs)), width, glyphs)


def with_cursor(row: Row, x: int, glyphs: Glyphs) -> Row:
    """A row of an axis with the cursor in a cell of it, unless a number is there: without a digit it would be another."""
    spans: list[tuple[str, str]] = []
    at = 0
    for text, style in row:
        end = at + cells(text)
        if at <= x < end and text[x - at] in (glyphs.rule, " "):
            spans += [(text[: x - at], style), (glyphs.line, "cursor"), (text[x - at + 1 :], style)]
        else:
            spans.append((text, style))
        at = end
    return merged(spans)


_TEXTS: dict[str, Callable[[Picture, int, Glyphs], Row]] = {STEPS: _steps, TIME: _time, SUMMARY: last_row}
