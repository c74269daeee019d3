"""The folded iteration: a headline, the phases as a ribbon, and a lane for each signal below one another."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.processes.phases import find_phase_name
from zerotop.analysis.waveform.alignment import PhaseStretch
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.idle_time import LaunchTime
from zerotop.recording.samples import Ints
from zerotop.ui.charts import AXIS_WIDTH, Canvas, GrowingScales, choose_scale, draw_time_axis, plot_ribbon
from zerotop.ui.charts.bars import draw_stacked_bar
from zerotop.ui.drawing.formatting import format_duration, format_significant
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, Span, align_ends, fit_height, fit_row, row_width
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import cell_width, fit_text, sanitize, wrap_text
from zerotop.ui.iteration.labels import describe_bottleneck, describe_fold, describe_left_out, describe_ranks
from zerotop.ui.iteration.lanes import (
    BORDER_STYLE,
    GUTTER,
    LANES,
    PINNED_STYLE,
    SignalLane,
    choose_curves,
    choose_lanes,
    draw_lane,
    find_border,
    find_stretches,
    list_means,
)

_LEAST_ASIDE_HEIGHT = 8  # of a panel in which the excluded iterations may have a row of their own
_MIN_LANE_ROWS = 4  # with fewer rows per lane, fewer lanes are shown
_MIN_ROWS_TWO_RIBBONS = 12  # rows from which nested phases have a row of their own
# The share of the next iteration that is shown, so that phases at the end are seen to continue.
_NEXT_SHARE = 0.25
_SLOW_SENSORS = "  (these sensors are slower than an iteration)"
_CURVE_ROWS = 7


@dataclass(frozen=True)
class ShownWaveform:
    """The fold to draw, another one behind it, and the lane that comes first."""

    fold: WaveformFold
    pinned: WaveformFold | None = None
    pinned_name: str = ""  # of the recording, if it is another one
    first_lane: str = LANES[0].id
    pointed_s: float | None = None  # the position under the mouse
    delay: str = ""  # a sentence about the rank that the others wait for
    launches: LaunchTime | None = None  # where the CPU sets the pace
    pace: str = ""  # a sentence about the header's pace, where it is another one


def draw_waveform(
    shown: ShownWaveform, width: int, height: int, glyphs: Glyphs, scales: GrowingScales, *, focused: bool = False
) -> list[Row]:
    """Draw the panel: ``height`` rows of ``width`` cells."""
    fold = shown.fold
    text, style = describe_bottleneck(fold, glyphs, shown.launches)
    if shown.delay:
        both = f"{shown.delay} {text}"
        text, style = both if cell_width(both) <= width else shown.delay, "warn"
    if shown.pointed_s is not None:
        text, style = _describe_point(fold, shown.pointed_s, glyphs), "value"
    rows = [_draw_title(fold, width, glyphs, focused)]
    if shown.pace and height >= 4:
        rows.append(fit_row(((glyphs.to_plain(shown.pace), "warn"),), width, glyphs))
    if height >= 3:
        aside = _draw_aside(shown, width)
        words: Row = ((glyphs.to_plain(text), style),)
        fits = row_width(words) + row_width(aside) + 2 <= width
        rows.append(align_ends(words, aside, width, glyphs) if fits else fit_row(words, width, glyphs))
        if not fits and row_width(aside) and height >= _LEAST_ASIDE_HEIGHT:
            rows.append(align_ends((), aside, width, glyphs))
    room = height - len(rows) - 1
    if room >= 1:
        rows += _draw_picture(shown, width, room, glyphs, scales)
    return fit_height(rows, width, height, glyphs)


def find_position(shown: ShownWaveform, width: int, x: int) -> float | None:
    """Return the seconds since the iteration began at a cell of a panel of this width; None beside the charts."""
    columns = width - _measure_gutter(width)
    cell = x - _measure_gutter(width)
    if not 0 <= cell < columns or not shown.fold.iteration_s > 0:
        return None
    return (cell + 0.5) / columns * _compute_end_s(shown) % shown.fold.iteration_s


def _describe_point(fold: WaveformFold, position_s: float, glyphs: Glyphs) -> str:
    """Return the phase and the signals there: ``at 1.23 s in cpu optim: GPU 0 %, CPU 61.5, power 120 W``."""
    inside = [one for one in fold.stretches if one.begin_s <= position_s < one.end_s]
    phase = find_phase_name(max(inside, key=lambda one: one.depth).phase) if inside else ""
    step_s = fold.iteration_s / 200
    values = []
    for lane in choose_lanes(fold):
        for name, _, label in lane.curves:
            if name in fold.signals:
                value = fold.signals[name].compute_mean(position_s, min(fold.iteration_s, position_s + step_s))
                scale = choose_scale(lane.kind, float(fold.signals[name].high.max(initial=0.0)), 4)
                figure = f"{format_significant(value * scale.factor)} {scale.unit}".rstrip()
                values.append(f"{label or lane.label} {figure}")
    where = f" in {phase_word(phase, glyphs)}" if phase else ""
    return f"at {format_duration(position_s)}{where}: {', '.join(values)}"


def _draw_aside(shown: ShownWaveform, width: int) -> Row:
    """Return the excluded iterations, or the pinned fold if its ribbon has no room for a label."""
    if shown.pinned is not None and not _has_pinned_label(shown, width):
        return ((describe_pinned(shown), PINNED_STYLE),)
    return ((describe_left_out(shown.fold), "muted"),)


def describe_pinned(shown: ShownWaveform) -> str:
    """Describe the pinned fold: ``pinned: 926 ms, mean of 8, skipped steps 1-8``; "" without one."""
    if shown.pinned is None:
        return ""
    return f"{shown.pinned_name or 'pinned'}: {format_duration(shown.pinned.iteration_s)}, {describe_fold(shown.pinned)}"


def _has_pinned_label(shown: ShownWaveform, width: int) -> bool:
    columns = width - _measure_gutter(width)
    pinned_s = shown.pinned.iteration_s if shown.pinned is not None else 0.0
    return len(describe_pinned(shown)) + 1 <= columns - find_border(pinned_s, _compute_end_s(shown), columns)


def _measure_gutter(width: int) -> int:
    return (GUTTER if width >= 40 else 0) + AXIS_WIDTH


def _compute_end_s(shown: ShownWaveform) -> float:
    """Return the end of the picture: within the next iteration, or at the end of the pinned one."""
    pinned_s = shown.pinned.iteration_s if shown.pinned is not None else 0.0
    return max(shown.fold.iteration_s * (1 + _NEXT_SHARE), pinned_s)


def _draw_title(fold: WaveformFold, width: int, glyphs: Glyphs, focused: bool) -> Row:
    parts: list[Span] = [*panel_title("Iteration", focused), (f" {format_duration(fold.iteration_s)}", "title-value")]
    for text in (describe_fold(fold), describe_ranks(fold)):
        if row_width(parts) + len(text) + 4 <= width:
            parts.append((f" {glyphs.bullet} {glyphs.to_plain(text)}", "muted"))
    return draw_rule(tuple(parts), width, glyphs)


def _draw_picture(shown: ShownWaveform, width: int, room: int, glyphs: Glyphs, scales: GrowingScales) -> list[Row]:
    """Draw ribbons, lanes and the time axis: ``room + 1`` rows."""
    fold, pinned = shown.fold, shown.pinned
    gutter, end_s = _measure_gutter(width), _compute_end_s(shown)
    ribbons = [_draw_ribbon("phases", fold, 0, end_s, width, glyphs)]
    if room >= _MIN_ROWS_TWO_RIBBONS and any(stretch.depth for stretch in fold.stretches):
        ribbons.append(_draw_ribbon("of which", fold, 1, end_s, width, glyphs))
    if pinned is not None and room >= 7:
        name = sanitize(shown.pinned_name, glyphs) or "pinned"
        ribbons.append(_draw_ribbon(name, pinned, 0, end_s, width, glyphs, pinned_text=describe_pinned(shown)))
    if parts := list_means(fold):
        while len(parts) > 1 and len(", ".join(parts)) > width - gutter:
            parts.pop()  # a figure without its unit says nothing
        means = ", ".join(parts)
        word = fit_row((("means" if gutter > AXIS_WIDTH else "", "muted"),), gutter, glyphs)
        note = "" if len(means) + len(_SLOW_SENSORS) > width - gutter else _SLOW_SENSORS
        ribbons.append(fit_row((*word, (glyphs.to_plain(means), "value"), (note, "muted")), width, glyphs))
    ribbons += _draw_launches(shown.launches, end_s, gutter, width, glyphs)
    ribbons = ribbons[:room]
    chosen = _rotate_lanes(choose_curves(fold), shown.first_lane)
    left = room - len(ribbons)
    rows: list[Row] = list(ribbons)
    for lane, height in zip(chosen, layout_heights(left, len(chosen)), strict=False):
        rows += draw_lane(lane, fold, pinned, end_s, (width, height), glyphs, scales)
    axis = draw_time_axis(0.0, end_s, width - gutter, glyphs)
    lead: Row = ((" " * (gutter - 1), "axis"), (glyphs.corner, "rule"))
    rows.append(fit_row((*lead, *axis), width, glyphs))
    return rows


def _draw_launches(launches: LaunchTime | None, end_s: float, gutter: int, width: int, glyphs: Glyphs) -> list[Row]:
    """Draw how long the CPU launches and the GPU computes, as bars, where the CPU sets the pace."""
    if launches is None:
        return []
    rows = []
    for word, style, seconds in (
        ("CPU launches", "load", launches.launch_s),
        ("GPU computes", "series-2", launches.device_s),
    ):
        lead = fit_row(((fit_text(word, max(0, gutter - 1), glyphs), "muted"),), gutter, glyphs)
        bar = draw_stacked_bar([(style, seconds)], end_s, width - gutter, glyphs, rest="text")
        end = round(seconds / end_s * (width - gutter))
        figure: Row = ((f" {format_duration(seconds)}", "value"),)
        rows.append(fit_row((*lead, *fit_row(bar, end, glyphs), *figure), width, glyphs))
    return rows


def layout_heights(room: int, count: int) -> list[int]:
    """Return the rows of each lane that fits. All are equally high, but the first ones get the remaining rows."""
    if room < 2 or not count:
        return []
    shown = max(1, min(count, room // _MIN_LANE_ROWS))
    each, more = divmod(room, shown)
    return [each + (place < more) for place in range(shown)]


def has_hidden_lanes(shown: ShownWaveform, height: int) -> bool:
    """Whether some lanes do not fit in a panel of this size."""
    height -= bool(shown.pace)
    ribbons = 1 + (height - 3 >= _MIN_ROWS_TWO_RIBBONS) + (shown.pinned is not None)
    curves = len(choose_curves(shown.fold))
    return len(layout_heights(height - 3 - ribbons, curves)) < curves


def count_wave_rows(shown: ShownWaveform) -> int:
    """Return the rows of the panel in which all signals that have a curve are readable."""
    fold, launches = shown.fold, 2 * (shown.launches is not None)
    told = bool(shown.pace) + (shown.pinned is not None)
    return 3 + 2 + bool(list_means(fold)) + launches + told + _CURVE_ROWS * len(choose_curves(fold))


def _rotate_lanes(lanes: list[SignalLane], first: str) -> list[SignalLane]:
    begin = next((index for index, lane in enumerate(lanes) if lane.id == first), 0)
    return lanes[begin:] + lanes[:begin]


def _draw_ribbon(
    word: str,
    fold: WaveformFold,
    depth: int,
    end_s: float,
    width: int,
    glyphs: Glyphs,
    *,
    pinned_text: str = "",
) -> Row:
    """Draw the phases of one depth, with their names if they fit, then those of the next iteration or the pinned text."""
    gutter = _measure_gutter(width)
    canvas = Canvas(width - gutter, 1, glyphs)
    stretches = [stretch for stretch in fold.stretches if stretch.depth == depth]
    indices = find_stretches(stretches, depth, fold.iteration_s, end_s, canvas.dot_columns)
    edge = find_border(fold.iteration_s, end_s, canvas.width)
    if pinned_text:
        indices[2 * edge :] = -1
    styles = [phase_style(find_phase_name(stretch.phase)) for stretch in stretches]
    plot_ribbon(canvas, indices, styles, row=0, rows=1)
    for stretch in stretches:
        _write_name(canvas, stretch, end_s, glyphs)
    if pinned_text:
        if len(pinned_text) + 1 <= canvas.width - edge:
            canvas.write_text(edge + 1, 0, sanitize(glyphs.to_plain(pinned_text), glyphs), PINNED_STYLE)
    elif not depth:
        _write_next_name(canvas, edge, indices, glyphs)
    lead = fit_row(((fit_text(glyphs.to_plain(word), max(0, gutter - 1), glyphs), "muted"),), gutter, glyphs)
    return fit_row((*lead, *canvas.to_rows()[0]), width, glyphs)


def _write_name(canvas: Canvas, stretch: PhaseStretch, end_s: float, glyphs: Glyphs) -> None:
    begin, end = (round(place / end_s * canvas.width) for place in (stretch.begin_s, stretch.end_s))
    word = phase_word(find_phase_name(stretch.phase), glyphs)
    if cell_width(word) + 2 <= end - begin:
        canvas.write_text(begin + 1, 0, word, _choose_name_style(glyphs))


def _choose_name_style(glyphs: Glyphs) -> str:
    """Return the style of a name on a phase's colour, or without such colours."""
    return "word" if glyphs.smooth else "value"


def _write_next_name(canvas: Canvas, edge: int, indices: Ints, glyphs: Glyphs) -> None:
    """Name the next iteration, in words that do not cross the begin or end of a phase."""
    canvas.write_mark(edge, 0, glyphs.line, BORDER_STYLE)
    for word in ("next iteration", "next"):
        if len(word) + 3 > canvas.width - edge:
            continue
        below = indices[2 * (edge + 2) : 2 * (edge + 2 + len(word))]
        if (below == below[0]).all():
            canvas.write_text(edge + 2, 0, word, _choose_name_style(glyphs))
            return


def draw_empty(lines: tuple[tuple[str, str], ...], width: int, height: int, glyphs: Glyphs, *, focused: bool) -> list[Row]:
    """Draw the panel if nothing can be folded: lines of (text, style) say why."""
    rows = [draw_rule(panel_title("Iteration", focused), width, glyphs)]
    for text, style in lines:
        wrapped = wrap_text(glyphs.to_plain(text), max(1, width - 4), max(0, height - len(rows)), glyphs)
        rows += [fit_row(((f"  {line}", style),), width, glyphs) for line in wrapped]
    return fit_height(rows, width, height, glyphs)
