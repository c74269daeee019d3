"""The lanes of values of the timeline, each a chart of its own with its scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.analysis.timeline.timeline import Values
from zerotop.ui.charts import Canvas, Fitted, Kind, Pile, Scale, grid, line, scale, stacks
from zerotop.ui.timeline.lanes import Place
from zerotop.ui.timeline.picture import Picture

Layers = list[tuple[str, Floats]]


@dataclass(frozen=True, slots=True)
class Chart:
    """What a lane shows: layers upon one another, the scale for them, and a line over them."""

    axis: Scale
    layers: Layers
    line: Floats | None = None


Charting = Callable[[Picture, int], Chart]


def highest(values: Values | None, count: int) -> Floats:
    """The highest value in each cell; NaN where there is none."""
    return np.full(count, np.nan) if values is None else np.fmax(values.highest[0::2], values.highest[1::2])


def means(values: Values | None, count: int) -> Floats:
    """The mean of each cell."""
    if values is None:
        return np.full(count, np.nan)
    left, right = values.mean[0::2], values.mean[1::2]
    return (np.fmin(left, right) + np.fmax(left, right)) / 2


def largest(*several: Floats) -> float:
    """The largest value there is, 0 without any."""
    return float(np.fmax.reduce(np.concatenate(several), initial=0.0))


def _axis(picture: Picture, name: str, kind: Kind, value: float, height: int) -> Fitted:
    return _filling(picture.scales.scale(name, kind, value, height))


def _filling(axis: Fitted) -> Fitted:
    """The scale with a tick only at its top, where more of them would leave some rows of a low lane unused."""
    return axis if axis.rows % round(axis.top / axis.distance) == 0 else replace(axis, distance=axis.top)


def _known(values: Floats) -> Floats:
    """0 where nothing is known."""
    return np.fmax(values, 0.0)


def _utilization(picture: Picture, height: int) -> Chart:
    axis = _filling(scale(Kind.PERCENT, 100.0, height))
    values = picture.value("utilization")
    return Chart(axis, _mean_and_highest(100 * means(values, picture.cells), 100 * highest(values, picture.cells), axis))


def _mean_and_highest(mean: Floats, peak: Floats, axis: Scale, style: str = "load") -> Layers:
    """The mean as an area; above it, fainter, up to the highest: a spike is seen however short it was."""
    mean, peak = (np.minimum(_known(values), axis.highest) for values in (mean, peak))
    return [(style, mean), ("load-free", peak - mean)]


def _cores(picture: Picture, height: int) -> Chart:
    whose = next((name for name in ("all_cores", "cores", "host_cores") if picture.value(name) is not None), "")
    values = picture.value(whose)
    peak, mean = highest(values, picture.cells), means(values, picture.cells)
    axis = _cores_scale(picture, largest(peak), height)
    if len(picture.ranks) + picture.other_ranks == 1 or whose != "all_cores":
        return Chart(axis, _mean_and_highest(mean, peak, axis))
    (_, total), above = _mean_and_highest(mean, peak, axis)
    own = np.minimum(_known(means(picture.value("cores"), picture.cells)), total)
    return Chart(axis, [("load", own), ("load-others", total - own), above])


def _cores_scale(picture: Picture, peak: float, height: int) -> Scale:
    """All cores of the host, where more than half of them were in use; sampling may see a few more than there are."""
    peak = picture.scales.largest("cores", peak)
    if picture.cores and peak > picture.cores / 2:
        return _filling(Fitted("cores", 1.0, picture.cores / (2 if height >= 2 else 1), float(picture.cores), height))
    return _filling(scale(Kind.CORES, peak, height))


def _memory(picture: Picture, height: int) -> Chart:
    values = [highest(picture.value(name), picture.cells) for name in ("allocated", "reserved", "process")]
    if np.isnan(values[-1]).all():
        values[-1] = highest(picture.value("device"), picture.cells)
    peak = picture.value("peak")
    axis = _axis(picture, "memory", Kind.BYTES, largest(*values, highest(peak, picture.cells)), height)
    return Chart(axis, _nested(values), peak.highest if peak is not None and height >= 2 else None)


def _nested(values: Sequence[Floats]) -> Layers:
    """Memory each of which is part of the next."""
    allocated, reserved, process = np.maximum.accumulate(_known(np.stack(values)))
    return [
        ("memory-allocated", allocated),
        ("memory-reserved", reserved - allocated),
        ("memory-other", process - reserved),
    ]


def host_fits(picture: Picture) -> bool:
    """Whether the whole host's memory can be on one scale with that of its ranks."""
    ranks, host = (largest(highest(picture.value(name), picture.cells)) for name in ("all_rss", "host_memory"))
    return host <= 3 * ranks or not ranks


def _host_memory(picture: Picture, height: int) -> Chart:
    names = ("rss", "all_rss", "host_memory" if host_fits(picture) else "all_rss")
    values = [highest(picture.value(name), picture.cells) for name in names]
    return Chart(_axis(picture, "host memory", Kind.BYTES, largest(*values), height), _nested(values))


def _pcie(picture: Picture, height: int) -> Chart:
    sent, received = (_known(highest(picture.value(name), picture.cells)) for name in ("sent", "received"))
    axis = _axis(picture, "pcie", Kind.BYTES_PER_S, largest(sent + received), height)
    return Chart(axis, [("series-2", sent), ("series-1", received)])


def _mean_and_peak(name: str, kind: Kind, style: str) -> Charting:
    """The mean of a signal in each cell, and above it up to the highest."""

    def chart(picture: Picture, height: int) -> Chart:
        values = picture.value(name)
        peak = highest(values, picture.cells)
        axis = _axis(picture, name, kind, largest(peak), height)
        return Chart(axis, _mean_and_highest(means(values, picture.cells), peak, axis, style))

    return chart


CHARTS: dict[str, Charting] = {
    "utilization": _utilization,
    "cores": _cores,
    "memory": _memory,
    "host memory": _host_memory,
    "pcie": _pcie,
    "iteration": _mean_and_peak("iteration", Kind.SECONDS, "accent"),
    "power": _mean_and_peak("power", Kind.WATTS, "muted"),
}


def draw_charts(canvas: Canvas, picture: Picture, places: Sequence[Place]) -> list[Scale]:
    """Draws lanes where they are, and returns their scales."""
    charts = [CHARTS[place.name](picture, place.height) for place in places]
    stacks(
        canvas,
        [
            Pile(place.top, place.height, chart.layers, chart.axis.highest)
            for place, chart in zip(places, charts, strict=True)
        ],
    )
    for place, chart in zip(places, charts, strict=True):
        if chart.line is not None:
            line(canvas.part(place.top, place.height), chart.line, chart.line, "peak", top=chart.axis.highest, letter="p")
        if place.height >= 3:
            grid(canvas.part(place.top, place.height), chart.axis)
    return [chart.axis for chart in charts]
