"""The text beside and below the timeline's lanes: values at the cursor, a range's figures, missing data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zerotop.analysis.formatting import format_count
from zerotop.analysis.timeline.range_summary import RangeSummary
from zerotop.analysis.timeline.timeline import FRESH_NS, MOMENT_NS
from zerotop.ui.charts import Scale
from zerotop.ui.drawing.formatting import (
    choose_decimals,
    choose_time_unit,
    format_clock,
    format_fixed,
    format_share,
    format_time_span,
    is_known,
)
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_style, phase_word
from zerotop.ui.drawing.rows import Row, align_ends, choose_items, fit_row, join_rows
from zerotop.ui.drawing.text import fit_text
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.timeline.lane_charts import is_host_on_scale
from zerotop.ui.timeline.lanes import LANES_BY_NAME, OTHER_METRICS
from zerotop.ui.timeline.picture import Picture
from zerotop_probe.recording.metrics import BYTES, BYTES_PER_S, CORES, SECONDS, SHARE
from zerotop_probe.recording.tables import METRICS, PHASES

_VALUE_WIDTH = 5
# Labels of narrow terminals.
_SHORT = {"cores of ranks": "rank cores", "allocated": "alloc", "iteration": "iter"}


def find_cursor_value(picture: Picture, names: Sequence[str]) -> float:
    """Return the value at the cursor of the first known name, not the mean of a long column; NaN if none is known.

    The last logged value lasts up to the next one, and may be NaN.
    """
    logged = [picture.logged[name].value for name in names if name in picture.logged]
    if logged:
        return logged[0]
    window = picture.timeline.window
    place = picture.pointed // window.column_ns - window.first
    back = max(2, FRESH_NS // window.column_ns)
    if picture.values_then:
        place = back = FRESH_NS // MOMENT_NS
    for name in names:
        values = picture.values_then.get(name) if picture.values_then else picture.find_values(name)
        if values is not None and place >= 0:
            row = values.highest if METRICS[name].shows_highest else values.mean
            there = np.flatnonzero(np.isfinite(row[max(0, place - back) : place + 1]))
            if len(there):
                return float(row[max(0, place - back) + there[-1]])
    return math.nan


def draw_legend(name: str, picture: Picture, axis: Scale, height: int, width: int, glyphs: Glyphs) -> list[Row]:
    """Draw a lane's labels and its values at the cursor: ``height`` rows of ``width`` cells."""
    entries = _build_entries(name, picture)
    rows: list[Row] = []
    room = width - _VALUE_WIDTH - 1
    for number, (names, label, style) in enumerate(entries[:height]):
        unit = f" {axis.unit}" if number == 0 and axis.unit not in label else ""
        step = _find_earlier_step(names, picture)
        left_room = room - len(unit) - bool(style)
        if step is not None:
            label = next((text for text in (f"{label}, step {step}", f"{label} at {step}") if len(text) <= left_room), label)
        if len(label) > left_room:
            label = fit_text(_SHORT.get(label, label).replace("PCIe ", ""), left_room, glyphs)
        value = find_cursor_value(picture, names) * (100 if name == "utilization" else axis.factor)
        is_wrong = any(name in picture.logged for name in names) and not math.isfinite(value)
        decimals = choose_decimals(value) if is_known(value) else 0
        figure = "NaN" if is_wrong and math.isnan(value) else format_fixed(value, decimals, _VALUE_WIDTH)
        left: Row = (((find_swatch(style, glyphs), style),) if style else ()) + ((glyphs.to_plain(label + unit), "label"),)
        right: Row = ((glyphs.to_plain(figure), "alert" if is_wrong else "value"), (" ", "text"))
        rows.append(align_ends(left, right, width, glyphs))
    rows += [fit_row((), width, glyphs)] * (height - len(rows))
    return rows


def find_swatch(style: str, glyphs: Glyphs) -> str:
    """Return a sample of a style: without colours, the character that stands for it."""
    return "p" if style == "peak" and not glyphs.smooth else glyphs.find_sample(style)


def _build_entries(name: str, picture: Picture) -> list[tuple[tuple[str, ...], str, str]]:
    """Return (names, label, swatch style) of each value; the first label is followed by the unit."""
    several = len(picture.ranks) + picture.other_ranks > 1
    own = f"rank {picture.subject.rank}"
    if name == "utilization":
        gpu = picture.subject.gpu
        return [(("utilization",), f"GPU {gpu[1]}" if gpu else "GPU", "")]
    if name == "cores":
        if several and picture.find_values("all_cores") is not None:
            return [(("all_cores",), "cores of ranks", "load-others"), (("cores",), own, "load")]
        return [(("cores", "host_cores"), "CPU cores", "load")]
    if name == "host memory":
        entries = [(("rss",), f"RAM {own}" if several else "RSS", "memory-allocated")]
        entries += [(("all_rss",), "all ranks", "memory-reserved")] if several else []
        return [*entries, (("host_memory",), "host", "memory-other" if is_host_on_scale(picture) else "")]
    lane = LANES_BY_NAME[name].metrics
    known = [metric for metric in lane if picture.find_values(metric.name) is not None or metric.name in picture.logged]
    known.sort(key=lambda metric: metric.name == "peak")  # the line over the layers
    styles = {metric.label: metric.style if len(lane) > 1 else "" for metric in known}
    by_label = [(tuple(one.name for one in known if one.label == label), label) for label in styles]
    return [(names, label, styles[label]) for names, label in by_label]


def _find_earlier_step(names: Sequence[str], picture: Picture) -> int | None:
    """Return the step of a logged value, unless it is the one shown or, where that is in progress, the one before it."""
    steps = [picture.logged[name].step for name in names if name in picture.logged]
    shown = picture.pointed_step
    return steps[0] if steps and steps[0] is not None and shown is not None and steps[0] < shown - 1 else None


def format_moment(moment: int, cell_ns: int) -> str:
    """Format a time since the recording began, as exact as a cell is: ``1:02.35``."""
    decimals = max(0, min(6, math.ceil(9 - math.log10(cell_ns)))) if cell_ns < 1_000_000_000 else 0
    whole, rest = divmod(moment, 1_000_000_000)
    return format_clock(whole) + (f".{rest:09d}"[: decimals + 1] if decimals else "")


def draw_last_row(picture: Picture, width: int, glyphs: Glyphs) -> Row:
    """Draw the range's figures; without a range, the phases' colours and the missing data."""
    if picture.summary is not None:
        return fit_row(join_rows(choose_items(_draw_figures(picture.summary, glyphs), width, 2), 2), width, glyphs)
    colours = _draw_colours(picture, glyphs)
    missing: list[tuple[int, Row]] = [(1, ((glyphs.to_plain(sentence), "muted"),)) for sentence in picture.missing_notes]
    return fit_row(join_rows(choose_items([*colours, *missing], width, 2), 2), width, glyphs)


def _draw_colours(picture: Picture, glyphs: Glyphs) -> list[tuple[int, Row]]:
    """Return (importance, colour and name) of the phases in the window."""
    seconds = sum((table.sum(axis=1) for table in picture.timeline.phases.values()), np.zeros(len(PHASES)))
    seconds_by_style: dict[str, float] = {}
    for code in np.flatnonzero(seconds > 0).tolist():
        style = phase_style(PHASES[code])
        seconds_by_style[style] = seconds_by_style.get(style, 0.0) + float(seconds[code])
    order = sorted(seconds_by_style, key=lambda style: -seconds_by_style[style])
    return [
        (20 - order.index(style), ((find_swatch(style, glyphs), style), (f" {_name_style(style)}", "muted")))
        for style in seconds_by_style
    ]


def _name_style(style: str) -> str:
    """Return the word for a phase's colour."""
    name = style.removeprefix("phase-")
    return "outside" if name == "other" else name


def _draw_figures(summary: RangeSummary, glyphs: Glyphs) -> list[tuple[int, Row]]:
    """Return (importance, figure) for the range."""
    length = summary.end_ns - summary.begin_ns
    steps = format_count(summary.steps, "step")
    figures: list[tuple[int, Row]] = [
        (99, (("[ ", "accent"), (glyphs.to_plain(format_time_span(length / 1e9)), "value"), (" ]", "accent")))
    ]
    figures.append((90, ((steps, "text"),)))
    all_s = sum(summary.phase_s.values())
    order = sorted(summary.phase_s, key=lambda name: -summary.phase_s[name])
    for place, name in enumerate(order[: len(_PHASE_IMPORTANCE)]):
        part = (find_swatch(phase_style(name), glyphs), phase_style(name)), (f" {phase_word(name, glyphs)} ", "muted")
        seconds = summary.phase_s[name]
        amount = f"{glyphs.to_plain(format_time_span(seconds))} {format_share(seconds / all_s)}"
        figures.append((_PHASE_IMPORTANCE[place], (*part, (amount, "value"))))
    for name, importance in _IMPORTANCE.items():
        if name in summary.mean:
            label = _NAMES.get(name) or METRICS[name].label
            unit, factor = _choose_unit(METRICS[name].unit, summary.highest[name])
            mean, most = summary.mean[name] * factor, summary.highest[name] * factor
            texts = [f"{value:.{choose_decimals(most)}f}" for value in (mean, most)]
            words: Row = ((f"{glyphs.to_plain(label)} ", "muted"), (texts[0], "value"), (" max ", "muted"))
            figures.append((importance, (*words, (texts[1] + unit, "value"))))
    return figures


_PHASE_IMPORTANCE = (87, 83, 70, 50, 35, 20)  # of the longest phase, the second longest, and so on
# The importance of each figure, and its name where that is not the metric's label.
_IMPORTANCE = {
    "utilization": 88,
    "all_cores": 86,
    "allocated": 84,
    "process": 56,
    "iteration": 54,
    "sent": 45,
    "received": 43,
    "power": 40,
    "rss": 60,
    "host_memory": 30,
}
_IMPORTANCE |= {metric.name: 20 for metric in OTHER_METRICS if metric.name not in _IMPORTANCE}
_NAMES = {"utilization": "GPU", "all_cores": "cores", "received": "H2D", "rss": "RSS", "host_memory": "host"}


def _choose_unit(unit: str, most: float) -> tuple[str, float]:
    """Return the unit for values up to ``most``, and the factor to it."""
    if unit == BYTES:
        return f" {giga_unit().name}", 1 / giga_unit().bytes
    if unit == SECONDS:
        name, factor = choose_time_unit(most)
        return f" {name}", factor
    return {SHARE: (" %", 100.0), BYTES_PER_S: (" GB/s", 1e-9), CORES: ("", 1.0)}.get(unit, (f" {unit}", 1.0))
