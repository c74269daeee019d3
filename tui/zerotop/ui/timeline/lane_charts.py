"""The timeline's value lanes: each is a chart with its own scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.analysis.timeline.timeline import ColumnValues
from zerotop.ui.charts import Canvas, Pile, Scale, choose_scale, plot_grid, plot_line, plot_stacks
from zerotop.ui.timeline.lanes import LANES_BY_NAME, LaneBox
from zerotop.ui.timeline.picture import Picture
from zerotop_probe.recording.metrics import BYTES, BYTES_PER_S, CORES, PERCENT, Metric

Layers = list[tuple[str, Floats]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A lane's stacked layers, their scale, and a line over them."""

    axis: Scale
    layers: Layers
    line: Floats | None = None


def compute_highest(values: ColumnValues | None, count: int) -> Floats:
    """Return the highest value in each cell; NaN without one."""
    return np.full(count, np.nan) if values is None else np.fmax(values.highest[0::2], values.highest[1::2])


def compute_means(values: ColumnValues | None, count: int) -> Floats:
    """Return the mean of each cell; NaN without one."""
    if values is None:
        return np.full(count, np.nan)
    left, right = values.mean[0::2], values.mean[1::2]
    return (np.fmin(left, right) + np.fmax(left, right)) / 2


def find_largest(*several: Floats) -> float:
    """Return the largest value, 0 without any."""
    return float(np.fmax.reduce(np.concatenate(several), initial=0.0))


def _choose_axis(picture: Picture, name: str, unit: str, value: float, height: int) -> Scale:
    return _simplify_axis(picture.scales.choose_scale(name, unit, value, height))


def _simplify_axis(axis: Scale) -> Scale:
    """Return the scale with its only tick at the top if more ticks do not divide the lane's rows evenly."""
    return axis if axis.rows % round(axis.top / axis.distance) == 0 else replace(axis, distance=axis.top)


def _replace_missing(values: Floats) -> Floats:
    """Replace NaN by 0."""
    return np.fmax(values, 0.0)


def _build_utilization(picture: Picture, height: int) -> Chart:
    axis = _simplify_axis(choose_scale(PERCENT, 100.0, height))
    values = picture.find_values("utilization")
    return Chart(
        axis,
        _build_mean_layers(
            100 * compute_means(values, picture.cell_count), 100 * compute_highest(values, picture.cell_count), axis
        ),
    )


def _build_mean_layers(mean: Floats, peak: Floats, axis: Scale, style: str = "load") -> Layers:
    """Return the mean as an area, and a fainter one above it up to the highest value, so that short spikes stay visible."""
    mean, peak = (np.minimum(_replace_missing(values), axis.highest) for values in (mean, peak))
    return [(style, mean), ("load-free", peak - mean)]


def _build_cores(picture: Picture, height: int) -> Chart:
    name = next((name for name in ("all_cores", "cores", "host_cores") if picture.find_values(name) is not None), "")
    values = picture.find_values(name)
    peak, mean = compute_highest(values, picture.cell_count), compute_means(values, picture.cell_count)
    axis = _choose_cores_scale(picture, find_largest(peak), height)
    if len(picture.ranks) + picture.other_ranks == 1 or name != "all_cores":
        return Chart(axis, _build_mean_layers(mean, peak, axis))
    (_, total), above = _build_mean_layers(mean, peak, axis)
    own = np.minimum(_replace_missing(compute_means(picture.find_values("cores"), picture.cell_count)), total)
    return Chart(axis, [("load", own), ("load-others", total - own), above])


def _choose_cores_scale(picture: Picture, peak: float, height: int) -> Scale:
    """Scale to all cores of the host if more than half of them were in use. Samples may slightly exceed that number."""
    peak = picture.scales.track_largest("cores", peak)
    if picture.host_cores and peak > picture.host_cores / 2:
        return _simplify_axis(
            Scale("cores", 1.0, picture.host_cores / (2 if height >= 2 else 1), float(picture.host_cores), height)
        )
    return _simplify_axis(choose_scale(CORES, peak, height))


def _build_memory(picture: Picture, height: int) -> Chart:
    values = [
        compute_highest(picture.find_values(name), picture.cell_count) for name in ("allocated", "reserved", "process")
    ]
    if np.isnan(values[-1]).all():
        values[-1] = compute_highest(picture.find_values("device"), picture.cell_count)
    peak = picture.find_values("peak")
    axis = _choose_axis(picture, "memory", BYTES, find_largest(*values, compute_highest(peak, picture.cell_count)), height)
    return Chart(axis, _build_nested_layers(values), peak.highest if peak is not None and height >= 2 else None)


def _build_nested_layers(values: Sequence[Floats]) -> Layers:
    """Return the layers of values that each include the one before."""
    allocated, reserved, process = np.maximum.accumulate(_replace_missing(np.stack(values)))
    return [
        ("memory-allocated", allocated),
        ("memory-reserved", reserved - allocated),
        ("memory-other", process - reserved),
    ]


def is_host_on_scale(picture: Picture) -> bool:
    """Whether the host's memory fits on one scale with that of its ranks."""
    ranks, host = (
        find_largest(compute_highest(picture.find_values(name), picture.cell_count)) for name in ("all_rss", "host_memory")
    )
    return host <= 3 * ranks or not ranks


def _build_host_memory(picture: Picture, height: int) -> Chart:
    names = ("rss", "all_rss", "host_memory" if is_host_on_scale(picture) else "all_rss")
    values = [compute_highest(picture.find_values(name), picture.cell_count) for name in names]
    return Chart(_choose_axis(picture, "host memory", BYTES, find_largest(*values), height), _build_nested_layers(values))


def _build_pcie(picture: Picture, height: int) -> Chart:
    sent, received = (
        _replace_missing(compute_highest(picture.find_values(name), picture.cell_count)) for name in ("sent", "received")
    )
    axis = _choose_axis(picture, "pcie", BYTES_PER_S, find_largest(sent + received), height)
    return Chart(axis, [("series-2", sent), ("series-1", received)])


def _build_means(picture: Picture, metric: Metric, height: int) -> Chart:
    """Return a chart of a metric's means and highest values."""
    values = picture.find_values(metric.name)
    peak = compute_highest(values, picture.cell_count)
    axis = _choose_axis(picture, metric.name, metric.unit, find_largest(peak), height)
    return Chart(axis, _build_mean_layers(compute_means(values, picture.cell_count), peak, axis, metric.style))


_CHARTS: dict[str, Callable[[Picture, int], Chart]] = {
    "utilization": _build_utilization,
    "cores": _build_cores,
    "memory": _build_memory,
    "host memory": _build_host_memory,
    "pcie": _build_pcie,
}


def build_chart(picture: Picture, name: str, height: int) -> Chart:
    """Return the chart of a lane: its own, or one of its metric's means."""
    build = _CHARTS.get(name)
    return build(picture, height) if build else _build_means(picture, LANES_BY_NAME[name].metrics[0], height)


def draw_charts(canvas: Canvas, picture: Picture, places: Sequence[LaneBox]) -> list[Scale]:
    """Draw lanes at their boxes and return their scales."""
    charts = [build_chart(picture, place.name, place.height) for place in places]
    plot_stacks(
        canvas,
        [
            Pile(place.top, place.height, chart.layers, chart.axis.highest)
            for place, chart in zip(places, charts, strict=True)
        ],
    )
    for place, chart in zip(places, charts, strict=True):
        if chart.line is not None:
            plot_line(
                canvas.slice_rows(place.top, place.height),
                chart.line,
                chart.line,
                "peak",
                top=chart.axis.highest,
                letter="p",
            )
        if place.height >= 3:
            plot_grid(canvas.slice_rows(place.top, place.height), chart.axis)
    return [chart.axis for chart in charts]
