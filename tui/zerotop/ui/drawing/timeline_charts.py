"""The lanes of values of the timeline, each a chart of its own with its scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from zerotop.analysis.timeline import Values
from zerotop.analysis.view import Floats
from zerotop.ui.charts import Canvas, Fitted, Kind, Scale, grid, line, scale, stack
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.timeline_picture import Picture

Painter = Callable[[Picture, Canvas], Scale]


def new_canvas(picture: Picture, height: int, glyphs: Glyphs) -> Canvas:
    """Cells for a lane, with the range behind."""
    canvas = Canvas(picture.cells, height, glyphs)
    if picture.range is not None:
        canvas.ground(picture.cell(picture.range[0]), picture.cell(picture.range[1]) + 1, "cursor-ground")
    return canvas


def highest(values: Values | None, count: int) -> Floats:
    """The highest value in each cell; NaN where there is none."""
    return np.full(count, np.nan) if values is None else np.fmax(values.highest[0::2], values.highest[1::2])


def means(values: Values | None, count: int) -> Floats:
    """The mean of each cell."""
    if values is None:
        return np.full(count, np.nan)
    left, right = values.mean[0::2], values.mean[1::2]
    return np.where(np.isnan(left), right, np.where(np.isnan(right), left, (left + right) / 2))


def largest(*several: Floats) -> float:
    """The largest value there is, 0 without any."""
    known = [float(np.nanmax(values)) for values in several if len(values) and not np.isnan(values).all()]
    return max(known, default=0.0)


def _axis(picture: Picture, name: str, kind: Kind, value: float, height: int) -> Fitted:
    return _filling(picture.scales.scale(name, kind, value, height))


def _filling(axis: Fitted) -> Fitted:
    """The scale with a tick only at its top, where more of them would leave some rows of a low lane unused."""
    return axis if axis.rows % round(axis.top / axis.distance) == 0 else replace(axis, distance=axis.top)


def _utilization(picture: Picture, canvas: Canvas) -> Scale:
    axis = _filling(scale(Kind.PERCENT, 100.0, canvas.height))
    values = picture.value("utilization")
    _mean_and_highest(canvas, 100 * means(values, picture.cells), 100 * highest(values, picture.cells), axis.highest)
    return axis


def _mean_and_highest(canvas: Canvas, mean: Floats, peak: Floats, top: float) -> None:
    """The mean as an area; above it, fainter, up to the highest: a spike is seen however short it was."""
    mean, peak = np.minimum(np.nan_to_num(mean), top), np.minimum(np.nan_to_num(peak), top)
    stack(canvas, [("load", mean), ("load-free", np.maximum(0.0, peak - mean))], top=top)


def _cores(picture: Picture, canvas: Canvas) -> Scale:
    whose = next((name for name in ("all_cores", "cores", "host_cores") if picture.value(name) is not None), "")
    values, mine = picture.value(whose), picture.value("cores")
    peak = highest(values, picture.cells)
    axis = _cores_scale(picture, largest(peak), canvas.height)
    mean, own = means(values, picture.cells), means(mine, picture.cells)
    if len(picture.ranks) + picture.other_ranks > 1 and whose == "all_cores":
        top = axis.highest
        total = np.minimum(np.nan_to_num(mean), top)
        own = np.minimum(np.nan_to_num(own), total)
        above = np.maximum(0.0, np.minimum(np.nan_to_num(peak), top) - total)
        stack(canvas, [("load", own), ("load-others", total - own), ("load-free", above)], top=top)
    else:
        _mean_and_highest(canvas, mean, peak, axis.highest)
    return axis


def _cores_scale(picture: Picture, peak: float, height: int) -> Scale:
    """All cores of the host, where more than half of them were in use; sampling may see a few more than there are."""
    peak = picture.scales.largest("cores", peak)
    if picture.cores and peak > picture.cores / 2:
        return _filling(Fitted("cores", 1.0, picture.cores / (2 if height >= 2 else 1), float(picture.cores), height))
    return _filling(scale(Kind.CORES, peak, height))


def _memory(picture: Picture, canvas: Canvas) -> Scale:
    allocated, reserved, process = (
        highest(picture.value(name), picture.cells) for name in ("allocated", "reserved", "process")
    )
    if np.isnan(process).all():
        process = highest(picture.value("device"), picture.cells)
    peak = picture.value("peak")
    axis = _axis(
        picture, "memory", Kind.BYTES, largest(allocated, reserved, process, highest(peak, picture.cells)), canvas.height
    )
    allocated = np.nan_to_num(allocated)
    reserved = np.maximum(np.nan_to_num(reserved), allocated)
    process = np.maximum(np.nan_to_num(process), reserved)
    layers = [
        ("memory-allocated", allocated),
        ("memory-reserved", reserved - allocated),
        ("memory-other", process - reserved),
    ]
    stack(canvas, layers, top=axis.highest)
    if peak is not None and canvas.height >= 2:
        line(canvas, peak.highest, peak.highest, "peak", top=axis.highest, letter="p")
    return axis


def host_fits(picture: Picture) -> bool:
    """Whether the whole host's memory can be on one scale with that of its ranks."""
    ranks, host = (largest(highest(picture.value(name), picture.cells)) for name in ("all_rss", "host_memory"))
    return host <= 3 * ranks or not ranks


def _host_memory(picture: Picture, canvas: Canvas) -> Scale:
    own, ranks, host = (highest(picture.value(name), picture.cells) for name in ("rss", "all_rss", "host_memory"))
    host = host if host_fits(picture) else ranks
    axis = _axis(picture, "host memory", Kind.BYTES, largest(own, ranks, host), canvas.height)
    own = np.nan_to_num(own)
    ranks = np.maximum(np.nan_to_num(ranks), own)
    host = np.maximum(np.nan_to_num(host), ranks)
    layers = [("memory-allocated", own), ("memory-reserved", ranks - own), ("memory-other", host - ranks)]
    stack(canvas, layers, top=axis.highest)
    return axis


def _pcie(picture: Picture, canvas: Canvas) -> Scale:
    sent, received = (np.nan_to_num(highest(picture.value(name), picture.cells)) for name in ("sent", "received"))
    axis = _axis(picture, "pcie", Kind.BYTES_PER_S, largest(sent + received), canvas.height)
    stack(canvas, [("series-2", sent), ("series-1", received)], top=axis.highest)
    return axis


def _mean_and_peak(name: str, kind: Kind, style: str) -> Painter:
    """Paints the mean of a signal in each cell, and above it up to the highest."""

    def paint(picture: Picture, canvas: Canvas) -> Scale:
        values = picture.value(name)
        peak = highest(values, picture.cells)
        axis = _axis(picture, name, kind, largest(peak), canvas.height)
        mean = np.nan_to_num(means(values, picture.cells))
        stack(canvas, [(style, mean), ("load-free", np.maximum(0.0, np.nan_to_num(peak) - mean))], top=axis.highest)
        return axis

    return paint


PAINTERS: dict[str, Painter] = {
    "utilization": _utilization,
    "cores": _cores,
    "memory": _memory,
    "host memory": _host_memory,
    "pcie": _pcie,
    "iteration": _mean_and_peak("iteration", Kind.SECONDS, "accent"),
    "power": _mean_and_peak("power", Kind.WATTS, "muted"),
}


def draw_cursor(canvas: Canvas, x: int) -> None:
    """A thin line through everything."""
    if 0 <= x < canvas.width:
        canvas.back[:, x] = canvas.shown()[:, x]
        canvas.characters[:, x] = ord(canvas.glyphs.line)
        canvas.fore[:, x] = canvas.number("cursor")


def draw_lane(name: str, picture: Picture, height: int, glyphs: Glyphs) -> tuple[Canvas, Scale]:
    """The chart of a lane and its scale."""
    canvas = new_canvas(picture, height, glyphs)
    axis = PAINTERS[name](picture, canvas)
    if height >= 3:
        grid(canvas, axis)
    return canvas, axis
