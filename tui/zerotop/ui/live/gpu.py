"""The utilization of each GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerotop.analysis.live_view import Gpu, LiveView
from zerotop.ui.charts import AXIS_WIDTH
from zerotop.ui.drawing.formatting import format_fixed, format_range
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import draw_last_step
from zerotop.ui.drawing.rows import Row, fit_height, fit_row
from zerotop.ui.drawing.table import Column, PlacedColumns, draw_rule, panel_title, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.live.cpu import draw_history_strip, draw_strip_heading, indent_strip, rows_per_strip
from zerotop.ui.live.memory import choose_shown, gpu_name


def draw_gpu(view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False) -> list[Row]:
    """Draw for each GPU its utilization over the last while, power, temperature and PCIe rates."""
    shown, hidden = choose_shown_gpus(view, height)
    rows_per_gpu = rows_per_strip(height, max(len(view.gpus), len(view.ranks)))
    placed = place_gpu_columns(view, width, rows_per_gpu, glyphs)
    rows = [draw_rule((*panel_title("GPU", focused), *draw_last_step(view)), width, glyphs, placed)]
    for gpu in shown:
        rows.append(placed.draw_row(gpu, width, glyphs))
        if rows_per_gpu > 1:
            strip = _draw_utilization_strip(view, gpu, width - AXIS_WIDTH, rows_per_gpu - 1, glyphs)
            rows.extend(indent_strip(strip, width, glyphs))
    if hidden:
        text = f"{glyphs.ellipsis} {len(hidden)} more, {format_range((gpu.utilization_percent for gpu in hidden), 0)} %"
        rows.append(fit_row(((text, "muted"),), width, glyphs))
    return fit_height(rows, width, height, glyphs)


def choose_shown_gpus(view: LiveView, height: int) -> tuple[list[Gpu], list[Gpu]]:
    """Return the (shown, hidden) GPUs in a panel of this height."""
    return choose_shown(view.gpus, height - 1, [0] * len(view.gpus))


def place_gpu_columns(view: LiveView, width: int, rows_per_gpu: int, glyphs: Glyphs) -> PlacedColumns[Gpu]:
    return place_columns(_build_gpu_columns(view, width, rows_per_gpu, glyphs), width)


def _build_gpu_columns(view: LiveView, width: int, rows_per_gpu: int, glyphs: Glyphs) -> list[Column[Gpu]]:
    has_hosts = len({gpu.host for gpu in view.gpus}) > 1
    names = {id(gpu): gpu_name(gpu, has_hosts, width < 46, glyphs) for gpu in view.gpus}
    longest = max([1, *(len(name) for name in names.values())])

    def draw_load(gpu: Gpu, cells: int) -> Row:
        if rows_per_gpu > 1:
            return ((fit_text(sanitize(gpu.name, glyphs), cells, glyphs), "muted"),)
        return _draw_utilization_strip(view, gpu, cells, 1, glyphs)[0]

    def make_figure_column(
        heading: str, cells: int, importance: int, value: Callable[[Gpu], float], decimals: int = 0, style: str = "value"
    ) -> Column[Gpu]:
        return Column(heading, cells, importance, lambda gpu, cells: ((format_fixed(value(gpu), decimals, cells), style),))

    is_wide = width >= 56
    load_heading = "" if rows_per_gpu > 1 else partial(draw_strip_heading, view.history.piece_s, view.history.length)
    return [
        Column("", longest, 9, lambda gpu, _: ((names[id(gpu)].rjust(longest), "label"),), left=True),
        Column(load_heading, 6, 9, draw_load, grows=True, left=True),
        make_figure_column("%", 3, 9, lambda gpu: gpu.utilization_percent),
        make_figure_column("W", 4, 7, lambda gpu: gpu.sample["power_w"]),
        make_figure_column(f"{glyphs.degree}C", 3, 5, lambda gpu: gpu.sample["temperature_c"], style="muted"),
        make_figure_column(
            "D2H GB/s" if is_wide else "D2H", 8 if is_wide else 5, 6, lambda gpu: gpu.pcie_tx_bytes_per_s / 1e9, 1
        ),
        make_figure_column(
            "H2D GB/s" if is_wide else "H2D", 8 if is_wide else 5, 6, lambda gpu: gpu.pcie_rx_bytes_per_s / 1e9, 1
        ),
    ]


def _draw_utilization_strip(view: LiveView, gpu: Gpu, width: int, height: int, glyphs: Glyphs) -> Sequence[Row]:
    history = view.history.gpus.get((gpu.host, gpu.index))
    return draw_history_strip(history, 100.0, view.history.length, width, height, glyphs)
