"""Find the ranks, GPUs, and values of strips and charts under the mouse on Live."""

from __future__ import annotations

from typing import Any

from zerotop.analysis.live_view import Gpu, LiveView, Rank
from zerotop.ui.charts import AXIS_WIDTH
from zerotop.ui.charts.strips import find_pieces
from zerotop.ui.drawing.formatting import format_rough_time, is_known
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.labels import phase_word
from zerotop.ui.drawing.table import PlacedColumns
from zerotop.ui.live.cpu import choose_shown_ranks, place_rank_columns, rows_per_strip
from zerotop.ui.live.gpu import choose_shown_gpus, place_gpu_columns


def find_rank_at(view: LiveView, height: int, y: int) -> Rank | None:
    """Return the rank at a row of the panel of ranks; None above and below them."""
    shown, _ = choose_shown_ranks(view, height)
    place = (y - 1) // rows_per_strip(height, len(view.ranks)) if y else -1
    return shown[place] if 0 <= place < len(shown) else None


def find_gpu_at(view: LiveView, height: int, y: int) -> Gpu | None:
    """Return the GPU at a row of the panel of GPUs; None above and below them."""
    shown, _ = choose_shown_gpus(view, height)
    place = (y - 1) // rows_per_strip(height, max(len(view.gpus), len(view.ranks))) if y else -1
    return shown[place] if 0 <= place < len(shown) else None


def describe_rank_at(view: LiveView, width: int, height: int, x: int, y: int, glyphs: Glyphs) -> str:
    """Return ``rank 2, 3 s ago: 15.4 cores, step`` at a cell of a rank's strip; empty beside it."""
    rank, rows = find_rank_at(view, height, y), rows_per_strip(height, len(view.ranks))
    history = view.history.ranks.get(rank.rank) if rank is not None else None
    if rank is None or history is None:
        return ""
    back = _find_piece(place_rank_columns(view, width, rows, glyphs), view.history.length, rows, width, x, y)
    if back is None or back >= len(history.cores_used) or not is_known(cores := float(history.cores_used[-1 - back])):
        return ""
    ago = format_rough_time(back * view.history.piece_s)
    return f"rank {rank.rank}, {ago} ago: {cores:.1f} cores, {phase_word(history.phase[-1 - back], glyphs)}"


def describe_gpu_at(view: LiveView, width: int, height: int, x: int, y: int, glyphs: Glyphs) -> str:
    """Return ``GPU 2, 3 s ago: 98 %`` at a cell of a GPU's strip; empty beside it."""
    gpu, rows = find_gpu_at(view, height, y), rows_per_strip(height, max(len(view.gpus), len(view.ranks)))
    history = view.history.gpus.get((gpu.host, gpu.index)) if gpu is not None else None
    if gpu is None or history is None:
        return ""
    values = history.utilization_percent
    back = _find_piece(place_gpu_columns(view, width, rows, glyphs), view.history.length, rows, width, x, y)
    if back is None or back >= len(values) or not is_known(float(values[-1 - back])):
        return ""
    return f"GPU {gpu.index}, {format_rough_time(back * view.history.piece_s)} ago: {values[-1 - back]:.0f} %"


def _find_piece(placed: PlacedColumns[Any], length: int, rows: int, width: int, x: int, y: int) -> int | None:
    """Return how many pieces of time before the last one a cell of a strip shows; None beside the strips."""
    begin, size = next(((begin, size) for column, begin, size in placed.columns if column.grows), (0, 0))
    if rows > 1:
        begin, size = (AXIS_WIDTH, width - AXIS_WIDTH) if (y - 1) % rows else (0, 0)
    return int(find_pieces(length, size)[x - begin]) if begin <= x < begin + size else None
