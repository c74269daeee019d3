"""The text beside and below the timeline's lanes: values at the cursor, a range's figures, missing data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zerotop.analysis.formatting import format_count
from zerotop.analysis.timeline.range_summary import RangeSummary
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
from zerotop.ui.timeline.picture import Picture
from zerotop_probe.recording.tables import PHASES

_VALUE_WIDTH = 5
# Labels of narrow terminals.
_SHORT = {"cores of ranks": "rank cores", "allocated": "alloc", "iteration": "iter"}
# How long the last sample stays valid.
_FRESH_NS = 3_000_000_000
# (names, label, swatch style) of each value; the first label is followed by the unit.
_LEGENDS: dict[str, tuple[tuple[tuple[str, ...], str, str], ...]] = {
    "memory": (
        (("allocated",), "allocated", "memory-allocated"),
        (("reserved",), "reserved", "memory-reserved"),
        (("process", "device"), "process", "memory-other"),
        (("peak",), "peak", "peak"),
    ),
    "pcie": ((("sent",), "PCIe D2H", "series-2"), (("received",), "PCIe H2D", "series-1")),
    "iteration": ((("iteration",), "iteration", ""),),
    "power": ((("power",), "power", ""),),
}
# Values whose maximum is shown rather than their mean.
_HIGHEST_VALUES = ("allocated", "reserved", "process", "device", "peak", "rss", "all_rss", "host_memory")


def find_cursor_value(picture: Picture, names: Sequence[str]) -> float:
    """Return the value at the cursor of the first known name; NaN if none is known."""
    window = picture.timeline.window
    place = picture.pointed // window.column_ns - window.first
    back = max(2, _FRESH_NS // window.column_ns)
    for name in names:
        values = picture.find_values(name)
        if values is not None and place >= 0:
            row = values.highest if name in _HIGHEST_VALUES else values.mean
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
        if len(label + unit) + bool(style) > room:
            label = fit_text(_SHORT.get(label, label).replace("PCIe ", ""), room - len(unit) - bool(style), glyphs)
        value = find_cursor_value(picture, names) * (100 if name == "utilization" else axis.factor)
        text = glyphs.to_plain(format_fixed(value, choose_decimals(value) if is_known(value) else 0, _VALUE_WIDTH))
        left: Row = (((find_swatch(style, glyphs), style),) if style else ()) + ((glyphs.to_plain(label) + unit, "label"),)
        rows.append(align_ends(left, ((text, "value"), (" ", "text")), width, glyphs))
    rows += [fit_row((), width, glyphs)] * (height - len(rows))
    return rows


def find_swatch(style: str, glyphs: Glyphs) -> str:
    """Return a sample of a style: without colours, the character that stands for it."""
    return "p" if style == "peak" and not glyphs.smooth else glyphs.find_sample(style)


def _build_entries(name: str, picture: Picture) -> list[tuple[tuple[str, ...], str, str]]:
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
    return [entry for entry in _LEGENDS[name] if any(picture.find_values(value) is not None for value in entry[0])]


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
    for importance, name, label, factor, unit in _choose_figures(summary.highest.get("iteration", 0.0)):
        if name in summary.mean:
            mean, most = summary.mean[name] * factor, summary.highest[name] * factor
            texts = [f"{value:.{choose_decimals(most)}f}" for value in (mean, most)]
            words: Row = ((f"{glyphs.to_plain(label)} ", "muted"), (texts[0], "value"), (" max ", "muted"))
            figures.append((importance, (*words, (texts[1] + unit, "value"))))
    return figures


_PHASE_IMPORTANCE = (87, 83, 70, 50, 35, 20)  # of the longest phase, the second longest, and so on


def _choose_figures(longest_s: float) -> tuple[tuple[int, str, str, float, str], ...]:
    """Return (importance, name, label, factor from SI, unit). ``longest_s`` is the longest iteration."""
    memory = 1 / giga_unit().bytes, f" {giga_unit().name}"
    time_unit, time_factor = choose_time_unit(longest_s)
    return (
        (88, "utilization", "GPU", 100, " %"),
        (86, "all_cores", "cores", 1, ""),
        (84, "allocated", "allocated", *memory),
        (56, "process", "process", *memory),
        (54, "iteration", "iteration", time_factor, f" {time_unit}"),
        (45, "sent", "PCIe D2H", 1e-9, " GB/s"),
        (43, "received", "H2D", 1e-9, " GB/s"),
        (40, "power", "power", 1, " W"),
        (60, "rss", "RSS", *memory),
        (30, "host_memory", "host", *memory),
    )
