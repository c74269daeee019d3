"""Ledgers as tall bars: every GPU as a whole, and the chosen one's job now and at its peak, its parts beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.memory.host_ledger import HostLedger
from zerotop.analysis.memory.ledger_rows import GpuLedger
from zerotop.analysis.memory.memory_view import MemoryView
from zerotop.ui.charts import Kind, scale
from zerotop.ui.charts.bars import Part
from zerotop.ui.charts.stacked_columns import stacked_column
from zerotop.ui.charts.step_axis import LABEL_WIDTH, Scale, labels
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, filled, merged, row_width, to_height
from zerotop.ui.drawing.table import rule
from zerotop.ui.drawing.text import fit
from zerotop.ui.drawing.units import giga
from zerotop.ui.memory.ledger_style import BEYOND_JOB, STYLES, unit_for

_AXIS = LABEL_WIDTH + 1
_WIDEST, _GAP = 8, 1
_BESIDE = 3  # cells between the GPUs and the chosen one's job
_PARTS_FROM = 20  # cells that names and figures beside a bar need


@dataclass(frozen=True)
class _Bar:
    parts: tuple[Part, ...]  # from below
    total: int  # bytes
    name: str
    chosen: bool = False


def bars_width(view: MemoryView, room: int, *, host: bool) -> int:
    """How many cells of a room the bars make use of."""
    count = max(1, len(view.hosts if host else view.gpus))
    overview = _AXIS + count * (min(_WIDEST, max(4, 24 // count)) + _GAP)
    job = _BESIDE + _AXIS + 2 * 7 + 1
    least = overview + (0 if host else job)
    if room >= least + _PARTS_FROM + 8:
        return least + _PARTS_FROM + 8
    return min(room, least if room >= least else max(_AXIS + 4, room))


def draw_gpu_bars(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Every GPU against its whole memory; at the right, on a scale of its own, the chosen one's job."""
    left = _overview(max(1, len(view.gpus)), width)
    first, end, _ = _seen(*_names(view, host=False), left - _AXIS)
    bars = [_gpu_bar(gpu, gpu is view.gpu) for gpu in view.gpus[first:end]]
    title = _title("GPUs", view.gpus_beside + len(view.gpus) - len(bars), focused)
    if not bars or height < 4:
        return to_height([rule(title, width, glyphs)], width, height, glyphs)
    top = max(bar.total for bar in bars)
    zoom = width - left - _BESIDE
    if view.gpu is None or zoom < _AXIS + 7:
        return _panel(title, bars, top, width, height, glyphs)
    job = _job_bars(view)
    inside = f"GPU {view.gpu.index}, this job"
    inside = inside if len(inside) < zoom else f"GPU {view.gpu.index}"
    right = _panel(((inside, "title"),), job, max(bar.total for bar in job), zoom, height, glyphs, parts=True)
    overview = _panel(title, bars, top, left, height, glyphs)
    return [merged((*one, (" " * _BESIDE, "text"), *two)) for one, two in zip(overview, right, strict=True)]


def draw_host_bars(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """What is resident of every rank."""
    first, end, _ = _seen(*_names(view, host=True), width - _AXIS)
    bars = [_host_bar(host, host is view.host) for host in view.hosts[first:end]]
    title = _title("Ranks", view.hosts_beside + len(view.hosts) - len(bars), focused)
    if not bars or height < 4:
        return to_height([rule(title, width, glyphs)], width, height, glyphs)
    return _panel(title, bars, max(bar.total for bar in bars), width, height, glyphs, parts=len(bars) == 1)


def _overview(count: int, width: int) -> int:
    """Cells of the bars of so many GPUs, the axis included."""
    return min(width, _AXIS + count * (min(_WIDEST, max(4, 24 // count)) + _GAP))


def _names(view: MemoryView, *, host: bool) -> tuple[list[str], int]:
    """What stands under the bars, and which of them is chosen."""
    if host:
        return [str(one.rank) for one in view.hosts], next((n for n, one in enumerate(view.hosts) if one is view.host), 0)
    return [str(one.index) for one in view.gpus], next((n for n, one in enumerate(view.gpus) if one is view.gpu), 0)


def _seen(names: Sequence[str], chosen: int, room: int) -> tuple[int, int, int]:
    """(the first bar that there is room for, the one after the last, cells of each); the chosen one is among them."""
    least = max(map(len, names), default=1)
    count = max(1, min(len(names), (room + _GAP) // (least + _GAP)))
    first = max(0, min(chosen - count // 2, len(names) - count))
    return first, min(len(names), first + count), max(least, min(_WIDEST, (room - _GAP * (count - 1)) // count))


def rank_at(x: int, view: MemoryView, width: int, *, host: bool) -> int | None:
    """The rank whose bar is at a column of what was drawn; None where there is none."""
    whose = [(held.rank,) for held in view.hosts] if host else [gpu.ranks for gpu in view.gpus]
    if not whose or x < _AXIS:
        return None
    room = (width if host else _overview(len(whose), width)) - _AXIS
    first, end, each = _seen(*_names(view, host=host), room)
    place = first + (x - _AXIS) // (each + _GAP)
    return min(whose[place], default=None) if x - _AXIS < room and place < end else None


def _title(word: str, beside: int, focused: bool) -> Row:
    text = f"{word}, {beside} more" if beside else word
    return ((text, "title-focused" if focused else "title"),)


def _gpu_bar(gpu: GpuLedger, chosen: bool) -> _Bar:
    return _Bar(_parts({row.key: row.bytes for row in gpu.rows}), gpu.total_bytes, str(gpu.index), chosen)


def _job_bars(view: MemoryView) -> list[_Bar]:
    told = [("now", view.gpu)] + ([("peak", view.peak.ledger)] if view.peak is not None else [])
    found = []
    for name, ledger in told:
        rows = {row.key: row.bytes for row in ledger.rows if row.key not in BEYOND_JOB} if ledger is not None else {}
        found.append(_Bar(_parts(rows), max(1, sum(rows.values())), name))
    return found


def _host_bar(host: HostLedger, chosen: bool) -> _Bar:
    return _Bar(_parts({row.key: row.bytes for row in host.rows}), max(1, host.resident_bytes), str(host.rank), chosen)


def _parts(rows: dict[str, int]) -> tuple[Part, ...]:
    """In the order in which they are stacked."""
    return tuple((style, float(rows[key])) for key, style in STYLES.items() if rows.get(key, 0) > 0)


# --- a group of bars -----------------------------------------------------------------------------------------------------


def _panel(
    title: Row, bars: Sequence[_Bar], top: int, width: int, height: int, glyphs: Glyphs, *, parts: bool = False
) -> list[Row]:
    """Title, bars with an axis, their names, and what they hold."""
    rows = height - 2
    axis = scale(Kind.BYTES, float(top), rows)
    heading: Row = ((axis.unit, "heading"), (" ", "rule")) if row_width(title) + 5 < width else ()
    room = width - _AXIS
    *_, each = _seen([bar.name for bar in bars], 0, room)
    aside = parts and room - len(bars) * (each + _GAP) >= _PARTS_FROM
    if parts and not aside and len(bars) * (5 + _GAP) + _PARTS_FROM <= room:
        each, aside = 5, True
    columns = [stacked_column(bar.parts, axis.highest, rows, glyphs) for bar in bars]
    words = _beside(bars[-1], axis, rows, room - len(bars) * (each + _GAP), glyphs) if aside else {}
    drawn = [rule((*title, (" ", "rule"), *heading) if heading else title, width, glyphs)]
    for row, label in enumerate(labels(axis, rows, glyphs)):
        spans: list[Span] = list(label)
        for place, column in enumerate(columns):
            text, style = column[row]
            spans += [(" " * (_GAP if place else 0), "text"), (text * each, style)]
        drawn.append(filled(merged((*spans, *words.get(row, ()))), width, glyphs))
    names = [(fit(bar.name, each, glyphs).center(each), "value" if bar.chosen else "label") for bar in bars]
    below: list[Span] = [(" " * LABEL_WIDTH, "text"), (glyphs.corner, "rule")]
    for place, name in enumerate(names):
        below += [(" " * (_GAP if place else 0), "text"), name]
    return [*drawn, filled(merged(below), width, glyphs)]


def _beside(bar: _Bar, axis: Scale, rows: int, width: int, glyphs: Glyphs) -> dict[int, Row]:
    """Row -> name and size of the part that lies there, the largest where several do."""
    unit = unit_for(max(bar.total, giga().bytes))
    found: dict[int, Row] = {}
    for style, size in sorted(_middles(bar.parts), key=lambda part: part[1][1]):
        amount, part = size
        row = rows - 1 - int(min(rows - 1, amount / axis.highest * rows))
        figure = unit.text(int(part))
        name = fit(_WORDS.get(style, ""), width - len(figure) - 2, glyphs)
        found[row] = ((f"  {name}".ljust(width - len(figure)), "muted"), (figure, "text"))
    return found


def _middles(parts: Sequence[Part]) -> list[tuple[str, tuple[float, float]]]:
    """(style, (middle, size)) of each part."""
    found, below = [], 0.0
    for style, size in parts:
        found.append((style, (below + size / 2, size)))
        below += size
    return found


_WORDS = {
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
