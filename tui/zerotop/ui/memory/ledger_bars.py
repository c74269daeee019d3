"""Ledgers as tall bars: every GPU as a whole, and the chosen GPU's job now and at its peak, with its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.memory.host_ledger import FILES, LABELS, PINNED_SPARE, REST, HostLedger
from zerotop.analysis.memory.ledger_rows import FREE, GROWN, HELD, GpuLedger
from zerotop.analysis.memory.tensor_inventory import (
    FROZEN_PARAMETERS,
    GRADIENT_BUCKETS,
    QUANTIZED_PARAMETERS,
    UNSHARDED_PARAMETERS,
)
from zerotop.analysis.views.memory_view import MemoryView
from zerotop.ui.charts import AXIS_WIDTH, Canvas, Scale, add_axes, choose_scale, plot_stack
from zerotop.ui.drawing.formatting import choose_size_unit, format_size
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, Span, fit_height, fit_row, merge_spans, row_width
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text
from zerotop.ui.drawing.units import giga_unit
from zerotop.ui.memory.ledger_style import NOT_JOB_KEYS, PART_STYLES
from zerotop_probe.recording.metrics import BYTES

_MAX_BAR_WIDTH, _GAP = 8, 1
_JOB_GAP = 3  # cells between the GPUs and the chosen one's job
_PARTS_WIDTH = 20  # cells for names and sizes beside a bar


@dataclass(frozen=True)
class _Bar:
    sizes: Mapping[str, int]  # row of the ledger -> bytes
    total: int  # bytes
    name: str
    is_chosen: bool = False


def measure_bars(view: MemoryView, room: int, *, host: bool) -> int:
    """Return how many cells of the room the bars use."""
    count = max(1, len(view.hosts if host else view.gpus))
    overview = AXIS_WIDTH + count * (min(_MAX_BAR_WIDTH, max(4, 24 // count)) + _GAP)
    job = _JOB_GAP + AXIS_WIDTH + 2 * 7 + 1
    least = overview + (0 if host else job)
    if room >= least + _PARTS_WIDTH + 8:
        return least + _PARTS_WIDTH + 8
    return min(room, least if room >= least else max(AXIS_WIDTH + 4, room))


def draw_gpu_bars(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw every GPU against its whole memory, and at the right, on its own scale, the job on the chosen GPU."""
    left = _measure_overview(max(1, len(view.gpus)), width)
    first, end, _ = _choose_visible(*_list_names(view, host=False), left - AXIS_WIDTH)
    bars = [_build_gpu_bar(gpu, gpu is view.gpu) for gpu in view.gpus[first:end]]
    title = _draw_title("GPUs", view.hidden_gpus + len(view.gpus) - len(bars), focused)
    if not bars or height < 4:
        return fit_height([draw_rule(title, width, glyphs)], width, height, glyphs)
    job_width = width - left - _JOB_GAP
    if view.gpu is None or job_width < AXIS_WIDTH + 7:
        return _draw_panel(title, bars, width, height, glyphs)
    job_title = f"GPU {view.gpu.index}, this job"
    job_title = job_title if len(job_title) < job_width else f"GPU {view.gpu.index}"
    job = _draw_panel(panel_title(job_title, False), _build_job_bars(view), job_width, height, glyphs, parts=True)
    overview = _draw_panel(title, bars, left, height, glyphs)
    gap = (" " * _JOB_GAP, "text")
    return [merge_spans((*left_row, gap, *right_row)) for left_row, right_row in zip(overview, job, strict=True)]


def draw_host_bars(view: MemoryView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw the resident memory of every rank."""
    first, end, _ = _choose_visible(*_list_names(view, host=True), width - AXIS_WIDTH)
    bars = [_build_host_bar(host, host is view.host) for host in view.hosts[first:end]]
    title = _draw_title("Ranks", view.hidden_hosts + len(view.hosts) - len(bars), focused)
    if not bars or height < 4:
        return fit_height([draw_rule(title, width, glyphs)], width, height, glyphs)
    return _draw_panel(title, bars, width, height, glyphs, parts=len(bars) == 1)


def _measure_overview(count: int, width: int) -> int:
    """Return the cells of the bars of all GPUs, the axis included."""
    return min(width, AXIS_WIDTH + count * (min(_MAX_BAR_WIDTH, max(4, 24 // count)) + _GAP))


def _list_names(view: MemoryView, *, host: bool) -> tuple[list[str], int]:
    """Return the names under the bars and the index of the chosen bar."""
    if host:
        names, chosen = [str(ledger.rank) for ledger in view.hosts], [ledger is view.host for ledger in view.hosts]
    else:
        names, chosen = [str(gpu.index) for gpu in view.gpus], [gpu is view.gpu for gpu in view.gpus]
    return names, chosen.index(True) if True in chosen else 0


def _choose_visible(names: Sequence[str], chosen: int, room: int) -> tuple[int, int, int]:
    """Return (index of the first bar that fits, index after the last, cells of each); the chosen one is among them."""
    least = max(map(len, names), default=1)
    count = max(1, min(len(names), (room + _GAP) // (least + _GAP)))
    first = max(0, min(chosen - count // 2, len(names) - count))
    return first, min(len(names), first + count), max(least, min(_MAX_BAR_WIDTH, (room - _GAP * (count - 1)) // count))


def find_rank(x: int, view: MemoryView, width: int, *, host: bool) -> int | None:
    """Return the rank whose bar is at a column of the drawing, None if there is none."""
    index = _find_bar(x, view, width, host=host)
    if index is None:
        return None
    return view.hosts[index].rank if host else min(view.gpus[index].ranks, default=None)


def describe_bar(x: int, view: MemoryView, width: int, *, host: bool) -> str:
    """Return ``GPU 2: 40.4 of 140 GiB`` for the bar at a column of the drawing; "" if there is none."""
    index = _find_bar(x, view, width, host=host)
    if index is None:
        return ""
    if host:
        return f"rank {view.hosts[index].rank}: {format_size(view.hosts[index].resident_bytes)}"
    gpu = view.gpus[index]
    return f"GPU {gpu.index}: {format_size(gpu.total_bytes - gpu.sum_bytes(FREE))} of {format_size(gpu.total_bytes)}"


def _find_bar(x: int, view: MemoryView, width: int, *, host: bool) -> int | None:
    """Return the index of the GPU or rank whose bar is at a column."""
    count = len(view.hosts if host else view.gpus)
    if not count or x < AXIS_WIDTH:
        return None
    room = (width if host else _measure_overview(count, width)) - AXIS_WIDTH
    first, end, bar_width = _choose_visible(*_list_names(view, host=host), room)
    index = first + (x - AXIS_WIDTH) // (bar_width + _GAP)
    return index if x - AXIS_WIDTH < room and index < end else None


def _draw_title(word: str, hidden: int, focused: bool) -> Row:
    return panel_title(f"{word}, {hidden} more" if hidden else word, focused)


def _build_gpu_bar(gpu: GpuLedger, is_chosen: bool) -> _Bar:
    return _Bar({row.key: row.bytes for row in gpu.rows}, gpu.total_bytes, str(gpu.index), is_chosen)


def _build_job_bars(view: MemoryView) -> list[_Bar]:
    when = "now" if view.moment_ns == view.cursor_ns else "end"
    ledgers = [(when, view.gpu)] + ([("peak", view.peak.ledger)] if view.peak is not None else [])
    bars = []
    for name, ledger in ledgers:
        sizes = {row.key: row.bytes for row in ledger.rows if row.key not in NOT_JOB_KEYS} if ledger is not None else {}
        bars.append(_Bar(sizes, max(1, sum(sizes.values())), name))
    return bars


def _build_host_bar(host: HostLedger, is_chosen: bool) -> _Bar:
    return _Bar({row.key: row.bytes for row in host.rows}, max(1, host.resident_bytes), str(host.rank), is_chosen)


def _draw_panel(
    title: Row, bars: Sequence[_Bar], width: int, height: int, glyphs: Glyphs, *, parts: bool = False
) -> list[Row]:
    """Draw a title, bars with an axis and their names; with ``parts`` also the last bar's parts beside it."""
    canvas = Canvas(width - AXIS_WIDTH, height - 2, glyphs)
    axis = choose_scale(BYTES, float(max(bar.total for bar in bars)), canvas.height)
    *_, bar_width = _choose_visible([bar.name for bar in bars], 0, canvas.width)
    has_room = canvas.width - len(bars) * (bar_width + _GAP) >= _PARTS_WIDTH
    if parts and not has_room and len(bars) * (5 + _GAP) + _PARTS_WIDTH <= canvas.width:
        bar_width, has_room = 5, True
    filled = np.arange(bar_width + _GAP) < bar_width
    layers = [
        (style, np.outer([max(0, bar.sizes.get(key, 0)) for bar in bars], filled).ravel().astype(np.float64))
        for key, style in PART_STYLES.items()
    ]
    plot_stack(canvas, layers, top=axis.highest)
    if parts and has_room:
        _write_parts(canvas, bars[-1], axis, len(bars) * (bar_width + _GAP) - _GAP)
    names: list[Span] = []
    for bar in bars:
        text = fit_text(bar.name, bar_width, glyphs).center(bar_width)
        names += [(text, "value" if bar.is_chosen else "label"), (" " * _GAP, "text")]
    unit: Row = ((" ", "rule"), (axis.unit, "heading"), (" ", "rule")) if row_width(title) + 5 < width else ()
    rows = [draw_rule((*title, *unit), width, glyphs), *add_axes(canvas, axis, tuple(names[:-1]))]
    return [fit_row(row, width, glyphs) for row in rows]


def _write_parts(canvas: Canvas, bar: _Bar, axis: Scale, x: int) -> None:
    """Write the name and size of each part beside its middle; where several share a row, the largest."""
    unit = choose_size_unit(max(bar.total, giga_unit().bytes))
    below, labels = 0, []
    for key, style in PART_STYLES.items():
        size = max(0, bar.sizes.get(key, 0))
        middle = (below + size / 2) / axis.highest * canvas.height
        labels.append(
            (size, canvas.height - 1 - int(min(canvas.height - 1, middle)), _PART_NAMES.get(key, _PART_NAMES.get(style, "")))
        )
        below += size
    for size, row, name in sorted(label for label in labels if label[0]):
        figure = unit.format_bytes(size)
        room = canvas.width - _GAP - x - len(figure)
        canvas.write_text(x, row, f"  {fit_text(name, room - 2, canvas.glyphs)}".ljust(room), "muted")
        canvas.write_text(x + room, row, figure, "text")


# By style, or by key where another key has that style too.
_PART_NAMES = {
    FROZEN_PARAMETERS: "frozen parameters",
    QUANTIZED_PARAMETERS: "quantized",
    UNSHARDED_PARAMETERS: "gathered by FSDP",
    GRADIENT_BUCKETS: "DDP buckets",
    HELD: "kept by script",
    GROWN: "grown",
    REST: LABELS[REST],
    FILES: LABELS[FILES],
    PINNED_SPARE: "pinned, spare",
    "memory-parameters": "parameters",
    "memory-gradients": "gradients",
    "memory-master": "master weights",
    "memory-optimizer": "optimizer state",
    "memory-buffers": "buffers",
    "memory-workspaces": "cuBLAS workspaces",
    "memory-activations": "activations",
    "memory-allocated": "allocated",
    "memory-unexplained": "unexplained",
    "memory-reserved": "unallocated",
    "memory-other": "outside PyTorch",
}
