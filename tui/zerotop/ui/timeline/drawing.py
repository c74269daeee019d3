"""The timeline: lanes below one another with one time axis, and one cursor through all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Floats
from zerotop.analysis.timeline.phase_ribbon import choose_phase_codes
from zerotop.ui.charts import AXIS_WIDTH, Canvas, draw_axis, draw_axis_labels, draw_time_axis, plot_ribbon, plot_stack
from zerotop.ui.charts.canvas import FULL, SPACE
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, align_ends, fit_row, merge_spans
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize, wrap_text
from zerotop.ui.timeline.labels import draw_last_row, draw_legend, format_moment
from zerotop.ui.timeline.lane_charts import draw_charts
from zerotop.ui.timeline.lanes import FAULTS, LANES_BY_NAME, MARKS, RIBBONS, STEPS, SUMMARY, TIME, LaneBox
from zerotop.ui.timeline.picture import Mark, Picture
from zerotop_probe.recording.tables import PHASE_CODE, PHASES

MIN_WIDTH = 30
# A column whose longest phase takes less than this share is mixed, and
_PURE_SHARE = 0.75
# if this share of the columns is mixed, a tall ribbon shows the phases' shares.
_MIXED_SHARE = 0.5
_EMPTY_TEXT = (
    "Nothing recorded up to this time. Memory and CPU lanes begin with the first samples, one second after the job starts; "
    "each rank's phases begin once it trains."
)
_TOO_NARROW = "Too narrow for a timeline."
_PHASE_STYLES = [phase_style(phase) for phase in PHASES]


def legend_width(width: int) -> int:
    """Return the cells for labels left of the charts."""
    return 17 if width < 76 else 21


def chart_begin(width: int) -> int:
    """Return the column in which the charts begin."""
    return legend_width(width) + AXIS_WIDTH


def chart_cells(width: int) -> int:
    """Return the width of the charts in cells."""
    return max(0, width - chart_begin(width))


def draw_timeline(picture: Picture, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the timeline: ``height`` rows of ``width`` cells. The picture was built for ``chart_cells(width)``."""
    drawn = [place for place in picture.boxes if place.name not in _TEXT_ROWS]
    canvas = Canvas(picture.cell_count, max((place.top + place.height for place in drawn), default=0), glyphs)
    words = _draw_lanes(picture, drawn, canvas, width)
    rows = [(*left, *row) for left, row in zip(words, canvas.to_rows(), strict=True)]
    rows += [_TEXT_ROWS[place.name](picture, width, glyphs) for place in picture.boxes if place.name in _TEXT_ROWS]
    rows += [fit_row((), width, glyphs)] * (height - len(rows))
    return rows[:height]


def _draw_lanes(picture: Picture, places: Sequence[LaneBox], canvas: Canvas, width: int) -> list[Row]:
    """Draw the charts on one canvas; return the labels left of its rows."""
    nothing: Row = ((" " * chart_begin(width), "text"),)
    words = [nothing] * canvas.height
    lanes = [place for place in places if place.name in LANES_BY_NAME]
    for place in places:
        if picture.selected_range is not None and place.name not in (MARKS, FAULTS):
            begin, end = (picture.find_cell(moment) for moment in picture.selected_range)
            canvas.fill_ground(begin, end + 1, "cursor-ground", top=place.top, bottom=place.top + place.height)
        if place.name == RIBBONS:
            words[place.top : place.top + place.height] = _draw_ribbons(picture, place, canvas, width)
        if place.name == MARKS:
            words[place.top] = _draw_marks(picture, canvas.slice_rows(place.top, 1), width)
        if place.name == FAULTS:
            words[place.top] = _draw_faults(picture, canvas.slice_rows(place.top, 1), width)
    for place, axis in zip(lanes, draw_charts(canvas, picture, lanes), strict=True):
        left = draw_legend(place.name, picture, axis, place.height, legend_width(width), canvas.glyphs)
        sides = draw_axis_labels(axis, place.height, canvas.glyphs)
        words[place.top : place.top + place.height] = [(*row, *side) for row, side in zip(left, sides, strict=True)]
    # Marks are drawn over the cursor.
    above = sum(place.height for place in places if place.name in (MARKS, FAULTS))
    cursor = picture.find_cell(picture.cursor)
    _paint_cursor(canvas.slice_rows(above, canvas.height - above), cursor)
    for place in places:
        if place.name == RIBBONS:
            canvas.slice_rows(place.top, place.height).plot_cursor(cursor)
    return words


def _paint_cursor(canvas: Canvas, x: int) -> None:
    """Draw a thin vertical line; behind the top of an area, whose shape stays."""
    if not 0 <= x < canvas.width:
        return
    characters = canvas.characters[:, x]
    full = characters == FULL
    # Letters fill their cells: without colours the line would be hidden.
    free = full | np.isin(characters, (SPACE, ord(canvas.glyphs.grid))) | (not canvas.glyphs.smooth)
    canvas.back[:, x] = np.where(full, canvas.fore[:, x], canvas.back[:, x])
    canvas.characters[:, x] = np.where(free, ord(canvas.glyphs.line), characters)
    canvas.fore[:, x] = np.where(free, canvas.number_style("cursor"), canvas.fore[:, x])


def draw_empty(width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Draw the message shown while nothing is recorded, or if charts do not fit."""
    text = _TOO_NARROW if width < MIN_WIDTH else _EMPTY_TEXT
    lines = wrap_text(text, max(1, min(72, width - 4)), max(0, height), glyphs)
    above = max(0, (height - len(lines)) // 3)
    rows = [fit_row((), width, glyphs)] * above
    rows += [
        fit_row(((" " * max(0, (width - 72) // 2), "text"), (glyphs.to_plain(line), "muted")), width, glyphs)
        for line in lines
    ]
    return [*rows, *[fit_row((), width, glyphs)] * (height - len(rows))][:height]


def _draw_ribbons(picture: Picture, place: LaneBox, canvas: Canvas, width: int) -> list[Row]:
    seconds = [picture.timeline.phases[rank] for rank in picture.ranks]
    codes, tall = choose_phase_codes(np.stack(seconds)), place.first_rows
    mixed = tall > 1 and _is_mixed(seconds[0])
    if mixed:
        shares = [(style, _compute_share(seconds[0], style)) for style in dict.fromkeys(_PHASE_STYLES)]
        plot_stack(canvas.slice_rows(place.top, tall), [(style, share) for style, share in shares if share.any()], top=1.0)
    rows = np.repeat(codes, [0 if mixed else tall, *[1] * (len(codes) - 1)], axis=0)
    plot_ribbon(canvas, rows, _PHASE_STYLES, row=place.top + place.height - len(rows), rows=len(rows))
    nothing: Row = ((" " * chart_begin(width), "text"),)
    words = [
        _draw_ribbon_label(picture, *rank_codes, width, canvas.glyphs)
        for rank_codes in zip(picture.ranks, codes, strict=True)
    ]
    return [words[0], *[nothing] * (tall - 1), *words[1:]]


def _is_mixed(seconds: Floats) -> bool:
    total = seconds.sum(axis=0)
    has_time = total > 0
    return (
        bool(has_time.any()) and float(np.mean(seconds.max(axis=0)[has_time] < _PURE_SHARE * total[has_time])) > _MIXED_SHARE
    )


def _compute_share(seconds: Floats, style: str) -> Floats:
    """Return the share of phases of one colour in the known time of each cell."""
    chosen = (
        seconds[[place for place, other in enumerate(_PHASE_STYLES) if other == style]]
        .sum(axis=0)
        .reshape(-1, 2)
        .sum(axis=1)
    )
    total = seconds.sum(axis=0).reshape(-1, 2).sum(axis=1)
    return np.asarray(np.divide(chosen, total, out=np.zeros(len(total)), where=total > 0))


def _draw_ribbon_label(picture: Picture, rank: int, codes: NDArray[np.int16], width: int, glyphs: Glyphs) -> Row:
    """Return a ribbon's rank and its phase at the pointed moment: ``rank 0  backward``.

    At the cursor it is the phase of that very moment, as on other screens; under the mouse the longest one of the column.
    """
    window = picture.timeline.window
    column = picture.pointed // window.column_ns - window.first
    code = int(codes[column]) if 0 <= column < len(codes) else -1
    code = PHASE_CODE.get(picture.phases_now.get(rank, ""), code)
    phase: Row = ()
    if code >= 0:
        phase = (
            (f"{glyphs.find_sample(_PHASE_STYLES[code])} ", _PHASE_STYLES[code]),
            (phase_word(PHASES[code], glyphs), "text"),
        )
    style = "value" if rank == picture.subject.rank else "label"
    more = f" +{picture.other_ranks}" if picture.other_ranks and rank == picture.ranks[-1] else ""
    return merge_spans((*align_ends(((f"rank {rank}{more}", style),), phase, chart_begin(width) - 1, glyphs), (" ", "text")))


def _draw_marks(picture: Picture, canvas: Canvas, width: int) -> Row:
    glyphs = canvas.glyphs
    marks = sorted(
        (mark for mark in picture.marks if 0 <= picture.find_cell(mark.at_ns) < picture.cell_count),
        key=lambda mark: mark.at_ns,
    )
    begins = [picture.find_cell(mark.at_ns) for mark in marks]
    hidden = picture.hidden_headline
    if hidden is not None:
        _write_hidden_headline(hidden, picture, min([canvas.width, *begins]), canvas)
    for mark, begin, end in zip(marks, begins, [*begins, picture.cell_count][1:], strict=True):
        canvas.write_mark(begin, 0, glyphs.mark, mark.style)
        room = end - begin - 3
        if room >= 8:
            canvas.write_text(
                begin + 2,
                0,
                fit_text(sanitize(mark.text, glyphs), room, glyphs),
                mark.style if mark.style != "accent" else "text",
            )
    count = len(marks)
    words = f"{format_count(count, 'finding')} here" if count else "no findings here" if width >= 110 else ""
    return fit_row(((words, "label"),), chart_begin(width), glyphs)


def _draw_faults(picture: Picture, canvas: Canvas, width: int) -> Row:
    """Draw what NVML reported; of several in a cell the first is named."""
    by_cell: dict[int, str] = {}
    for at_ns, text in picture.faults:
        if 0 <= (cell := picture.find_cell(at_ns)) < picture.cell_count:
            by_cell.setdefault(cell, text)
    cells = sorted(by_cell)
    for cell, end in zip(cells, [*cells, picture.cell_count][1:], strict=True):
        canvas.write_mark(cell, 0, canvas.glyphs.mark, "alert")
        if (room := end - cell - 3) >= 6:
            canvas.write_text(cell + 2, 0, fit_text(sanitize(by_cell[cell], canvas.glyphs), room, canvas.glyphs), "alert")
    return fit_row((("GPU faults", "label"),), chart_begin(width), canvas.glyphs)


def _write_hidden_headline(mark: Mark, picture: Picture, room: int, canvas: Canvas) -> None:
    """Name the header's finding, with an arrow to it: its cause may be too slow to be visible in the window."""
    glyphs, is_before = canvas.glyphs, mark.at_ns < picture.begin
    step = f"step {mark.finding.step}: " if mark.finding.step is not None else ""
    arrow = glyphs.earlier if is_before else glyphs.later
    text = fit_text(sanitize(f"{step}{mark.text}", glyphs), room - 4, glyphs) if room >= 24 else ""
    if text:
        canvas.write_text(0, 0, arrow, mark.style)
        canvas.write_text(2, 0, text, mark.style if mark.style != "accent" else "text")


def _draw_steps(picture: Picture, width: int, glyphs: Glyphs) -> Row:
    marks = [(picture.find_cell(begin), str(number)) for begin, number in picture.steps]
    text = "step" if picture.pointed_step is None else f"step {picture.pointed_step}"
    return _draw_axis(text, draw_axis(marks, picture.cell_count, glyphs), picture, width, glyphs, " ")


def _draw_time(picture: Picture, width: int, glyphs: Glyphs) -> Row:
    begin_s, end_s = picture.begin / 1e9, (picture.begin + picture.cell_count * picture.cell_ns) / 1e9
    row = draw_time_axis(begin_s, end_s, picture.cell_count, glyphs)
    return _draw_axis(format_moment(picture.pointed, picture.cell_ns), row, picture, width, glyphs, glyphs.corner)


def _draw_axis(words: str, row: Row, picture: Picture, width: int, glyphs: Glyphs, corner: str) -> Row:
    left = fit_row(((words, "value"),), legend_width(width) + AXIS_WIDTH - 1, glyphs)
    return fit_row((*left, (corner, "rule"), *overlay_cursor(row, picture.find_cell(picture.cursor), glyphs)), width, glyphs)


def overlay_cursor(row: Row, x: int, glyphs: Glyphs) -> Row:
    """Draw the cursor on a row of an axis, but never over a digit of a number."""
    spans: list[tuple[str, str]] = []
    at = 0
    for text, style in row:
        end = at + cell_width(text)
        if at <= x < end and text[x - at] in (glyphs.rule, " "):
            spans += [(text[: x - at], style), (glyphs.line, "cursor"), (text[x - at + 1 :], style)]
        else:
            spans.append((text, style))
        at = end
    return merge_spans(spans)


_TEXT_ROWS: dict[str, Callable[[Picture, int, Glyphs], Row]] = {STEPS: _draw_steps, TIME: _draw_time, SUMMARY: draw_last_row}
