"""Ledgers as tall bars: every GPU as a whole, and the chosen one's job now and at its peak, its parts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.memory.host_ledger import HostLedger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.ui.charts import Quantity, choose_scale
from zerotop.ui.charts.bars import Part
from zerotop.ui.charts.stacked_columns import draw_stacked_column
from zerotop.ui.charts.step_axis import LABEL_WIDTH, Scale, draw_axis_labels
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_height, fit_row, merge_spans, row_width
from zerotop.ui.drawing.table import draw_rule
from zerotop.ui.drawing.text import fit_text
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.memory.ledger_style import NOT_JOB_KEYS, PART_STYLES, choose_unit

_AXIS_WIDTH = LABEL_WIDTH + 1
_MAX_BAR_WIDTH, _GAP = 8, 1
_JOB_GAP = 3  # cells between the GPUs and the chosen one's job
_PARTS_WIDTH = 20  # cells that names and figures beside a bar need


@dataclass(frozen=True)
class _Bar:
    parts: tuple[Part, ...]  # from below
    total: int  # bytes
    name: str
    is_chosen: bool = False


def measure_bars(view: MemoryView, room: int, *, host: bool) -> int:
    """How many cells of a room the bars make use of."""
    count = max(1, len(view.hosts if host else view.gpus))
    overview = _AXIS_WIDTH + count * (min(_MAX_BAR_WIDTH, max(4, 24 // count)) + _GAP)
    job = _JOB_GAP + _AXIS_WIDTH + 2 * 7 + 1
    least = overview + (0 if host else job)
    if room >= least + _PARTS_WIDTH + 8:
        return least + _PARTS_WIDTH + 8
    return min(room, least if room >= least else max(_AXIS_WIDTH + 4, room))


def draw_gpu_bars(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Every GPU against its whole memory; at the right, on a scale of its own, the chosen one's job."""
    left = _measure_overview(max(1, len(view.gpus)), width)
    first, end, _ = _choose_visible(*_list_names(view, host=False), left - _AXIS_WIDTH)
    bars = [_build_gpu_bar(gpu, gpu is view.gpu) for gpu in view.gpus[first:end]]
    title = _draw_title("GPUs", view.hidden_gpus + len(view.gpus) - len(bars), focused)
    if not bars or height < 4:
        return fit_height([draw_rule(title, width, glyphs)], width, height, glyphs)
    top = max(bar.total for bar in bars)
    zoom = width - left - _JOB_GAP
    if view.gpu is None or zoom < _AXIS_WIDTH + 7:
        return _draw_panel(title, bars, top, width, height, glyphs)
    job = _build_job_bars(view)
    inside = f"GPU {view.gpu.index}, this job"
    inside = inside if len(inside) < zoom else f"GPU {view.gpu.index}"
    right = _draw_panel(((inside, "title"),), job, max(bar.total for bar in job), zoom, height, glyphs, parts=True)
    overview = _draw_panel(title, bars, top, left, height, glyphs)
    return [merge_spans((*one, (" " * _JOB_GAP, "text"), *two)) for one, two in zip(overview, right, strict=True)]


def draw_host_bars(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """What is resident of every rank."""
    first, end, _ = _choose_visible(*_list_names(view, host=True), width - _AXIS_WIDTH)
    bars = [_build_host_bar(host, host is view.host) for host in view.hosts[first:end]]
    title = _draw_title("Ranks", view.hidden_hosts + len(view.hosts) - len(bars), focused)
    if not bars or height < 4:
        return fit_height([draw_rule(title, width, glyphs)], width, height, glyphs)
    return _draw_panel(title, bars, max(bar.total for bar in bars), width, height, glyphs, parts=len(bars) == 1)


def _measure_overview(count: int, width: int) -> int:
    """Cells of the bars of so many GPUs, the axis included."""
    return min(width, _AXIS_WIDTH + count * (min(_MAX_BAR_WIDTH, max(4, 24 // count)) + _GAP))


def _list_names(view: MemoryView, *, host: bool) -> tuple[list[str], int]:
    """What stands under the bars, and which of them is chosen."""
    if host:
        return [str(one.rank) for one in view.hosts], next((n for n, one in enumerate(view.hosts) if one is view.host), 0)
    return [str(one.index) for one in view.gpus], next((n for n, one in enumerate(view.gpus) if one is view.gpu), 0)


def _choose_visible(names: Sequence[str], chosen: int, room: int) -> tuple[int, int, int]:
    """(the first bar that there is room for, the one after the last, cells of each); the chosen one is among them."""
    least = max(map(len, names), default=1)
    count = max(1, min(len(names), (room + _GAP) // (least + _GAP)))
    first = max(0, min(chosen - count // 2, len(names) - count))
    return first, min(len(names), first + count), max(least, min(_MAX_BAR_WIDTH, (room - _GAP * (count - 1)) // count))


def find_rank(x: int, view: MemoryView, width: int, *, host: bool) -> int | None:
    """The rank whose bar is at a column of what was drawn; None where there is none."""
    whose = [(held.rank,) for held in view.hosts] if host else [gpu.ranks for gpu in view.gpus]
    if not whose or x < _AXIS_WIDTH:
        return None
    room = (width if host else _measure_overview(len(whose), width)) - _AXIS_WIDTH
    first, end, each = _choose_visible(*_list_names(view, host=host), room)
    place = first + (x - _AXIS_WIDTH) // (each + _GAP)
    return min(whose[place], default=None) if x - _AXIS_WIDTH < room and place < end else None


def _draw_title(word: str, beside: int, focused: bool) -> Row:
    text = f"{word}, {beside} more" if beside else word
    return ((text, "title-focused" if focused else "title"),)


def _build_gpu_bar(gpu: GpuLedger, chosen: bool) -> _Bar:
    return _Bar(_build_parts({row.key: row.bytes for row in gpu.rows}), gpu.total_bytes, str(gpu.index), chosen)


def _build_job_bars(view: MemoryView) -> list[_Bar]:
    told = [("now", view.gpu)] + ([("peak", view.peak.ledger)] if view.peak is not None else [])
    found = []
    for name, ledger in told:
        rows = {row.key: row.bytes for row in ledger.rows if row.key not in NOT_JOB_KEYS} if ledger is not None else {}
        found.append(_Bar(_build_parts(rows), max(1, sum(rows.values())), name))
    return found


def _build_host_bar(host: HostLedger, chosen: bool) -> _Bar:
    return _Bar(_build_parts({row.key: row.bytes for row in host.rows}), max(1, host.resident_bytes), str(host.rank), chosen)


def _build_parts(rows: dict[str, int]) -> tuple[Part, ...]:
    """In the order in which they are stacked."""
    return tuple((style, float(rows[key])) for key, style in PART_STYLES.items() if rows.get(key, 0) > 0)


# --- a group of bars -----------------------------------------------------------------------------------------------------


def _draw_panel(
    title: Row, bars: Sequence[_Bar], top: int, width: int, height: int, glyphs: Glyphs, *, parts: bool = False
) -> list[Row]:
    """Title, bars with an axis, their names, and what they hold."""
    rows = height - 2
    axis = choose_scale(Quantity.BYTES, float(top), rows)
    heading: Row = ((axis.unit, "heading"), (" ", "rule")) if row_width(title) + 5 < width else ()
    room = width - _AXIS_WIDTH
    *_, each = _choose_visible([bar.name for bar in bars], 0, room)
    aside = parts and room - len(bars) * (each + _GAP) >= _PARTS_WIDTH
    if parts and not aside and len(bars) * (5 + _GAP) + _PARTS_WIDTH <= room:
        each, aside = 5, True
    columns = [draw_stacked_column(bar.parts, axis.highest, rows, glyphs) for bar in bars]
    words = _draw_part_labels(bars[-1], axis, rows, room - len(bars) * (each + _GAP), glyphs) if aside else {}
    drawn = [draw_rule((*title, (" ", "rule"), *heading) if heading else title, width, glyphs)]
    for row, label in enumerate(draw_axis_labels(axis, rows, glyphs)):
        spans: list[Span] = list(label)
        for place, column in enumerate(columns):
            text, style = column[row]
            spans += [(" " * (_GAP if place else 0), "text"), (text * each, style)]
        drawn.append(fit_row(merge_spans((*spans, *words.get(row, ()))), width, glyphs))
    names = [(fit_text(bar.name, each, glyphs).center(each), "value" if bar.is_chosen else "label") for bar in bars]
    below: list[Span] = [(" " * LABEL_WIDTH, "text"), (glyphs.corner, "rule")]
    for place, name in enumerate(names):
        below += [(" " * (_GAP if place else 0), "text"), name]
    return [*drawn, fit_row(merge_spans(below), width, glyphs)]


def _draw_part_labels(bar: _Bar, axis: Scale, rows: int, width: int, glyphs: Glyphs) -> dict[int, Row]:
    """Row -> name and size of the part that lies there, the largest where several do."""
    unit = choose_unit(max(bar.total, giga_unit().bytes))
    found: dict[int, Row] = {}
    for style, size in sorted(_find_middles(bar.parts), key=lambda part: part[1][1]):
        amount, part = size
        row = rows - 1 - int(min(rows - 1, amount / axis.highest * rows))
        figure = unit.format_bytes(int(part))
        name = fit_text(_PART_NAMES.get(style, ""), width - len(figure) - 2, glyphs)
        found[row] = ((f"  {name}".ljust(width - len(figure)), "muted"), (figure, "text"))
    return found


def _find_middles(parts: Sequence[Part]) -> list[tuple[str, tuple[float, float]]]:
    """(style, (middle, size)) of each part."""
    found, below = [], 0.0
    for style, size in parts:
        found.append((style, (below + size / 2, size)))
        below += size
    return found


_PART_NAMES = {
    "memory-parameters": "parameters",
    "memory-gradients": "gradients",
    "memory-master": "master weights",
    "memory-optimizer": "optimizer state",
    "memory-buffers": "buffers",
    "memory-activations": "activations",
    "memory-allocated": "allocated",
    "memory-unexplained": "unexplained",
    "memory-reserved": "unallocated",
    "memory-other": "outside PyTorch",
}
