"""One chart of a recording or sweep as a PNG picture. Drawn by matplotlib, which only this module uses."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from zerotop.analysis.live_view import Floats
from zerotop.report.charts import Chart
from zerotop.ui.drawing.theme import LIGHT

_SIZE_INCHES, _DOTS_PER_INCH = (12.0, 4.5), 150


def draw_png(chart: Chart, title: str, marks: list[dict[str, Any]]) -> bytes:
    """Return the picture of a chart of ``build_charts``, with the samples of the first rank, or of ``build_sweep_charts``.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained", facecolor=LIGHT.background)
    axes = figure.add_subplot(facecolor=LIGHT.background)
    x, series = _read_series(chart)
    lines = [one for one in series if chart["kind"] != "stack" or one.get("line")]
    parts = [one for one in series if one not in lines]
    if parts:
        _draw_stack(axes, x, parts)
    if chart["kind"] == "points":
        _draw_points(axes, chart, x)
    else:
        _draw_lines(axes, chart, x, lines)
    top = axes.get_ylim()[1]
    if chart.get("limit") and top > chart["limit"] / 2:
        axes.axhline(chart["limit"], color=_get_colour("muted"), linestyle="--", linewidth=1.0)
    for mark in marks:
        colour = str(LIGHT.error if mark["level"] == "error" else LIGHT.warning)
        axes.axvline(mark["x"], color=colour, linestyle=":", linewidth=1.0)
    axes.set(ylabel=chart["unit"], ylim=(0, None))
    axes.set_title(f"{title}: {chart['title']}", loc="left", fontweight="bold")
    axes.grid(color=_get_colour("panel"))
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_lines(axes: Any, chart: Chart, x: Floats, lines: list[dict[str, Any]]) -> None:
    for one in lines:
        colour, values = _get_colour(one["colour"]), _to_array(one["values"])
        style: dict[str, Any] = {"color": colour, "label": one["name"], "linewidth": 1.2}
        axes.plot(x, values, drawstyle="steps-pre" if "x" in chart else "default", **style)
        if one.get("fill"):
            axes.fill_between(x, values, color=colour, alpha=0.2, linewidth=0, step="pre" if "x" in chart else None)
    axes.set(xlabel="seconds since the launch", xlim=(x[0], x[-1]))


def _draw_points(axes: Any, chart: Chart, x: Floats) -> None:
    """Draw a sweep's series: a line through the points of each, and a cross above where it ran out of memory."""
    for number, one in enumerate(chart["series"]):
        colour, values = _get_colour(one["colour"]), _to_array(one["values"])
        known = ~np.isnan(values)
        axes.plot(x[known], values[known], color=colour, label=one["name"], linewidth=1.2, marker="o", markersize=5)
        height = 0.98 - 0.04 * number
        for place in one["failed"]:
            axes.plot(place, height, color=colour, marker="x", markersize=7, transform=axes.get_xaxis_transform())
    axes.set(xlabel=f"{chart['axis']} (× out of memory)" if _has_failures(chart) else chart["axis"])
    if chart["labels"] is not None:
        axes.set_xticks(x, chart["labels"])
    edge = 0.04 * (x[-1] - x[0]) or 1.0
    axes.set_xlim(x[0] - edge, x[-1] + edge)


def _has_failures(chart: Chart) -> bool:
    return any(one["failed"] for one in chart["series"])


def _read_series(chart: Chart) -> tuple[Floats, list[dict[str, Any]]]:
    if "x" in chart:
        return np.array(chart["x"], np.float64), chart["series"]
    series = next(iter(chart["ranks"].values()))
    count = len(series[0]["values"])
    return chart["x0"] + (np.arange(count) + 1) * chart["dx"], series


def _draw_stack(axes: Any, x: Floats, parts: list[dict[str, Any]]) -> None:
    below = np.zeros(len(x))
    for one in parts:
        above = below + np.nan_to_num(_to_array(one["values"]))
        axes.fill_between(x, below, above, color=_get_colour(one["colour"]), label=one["name"], linewidth=0, step="pre")
        below = above


def _to_array(values: list[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _get_colour(name: str) -> str:
    return str(LIGHT.variables.get(name) or getattr(LIGHT, name))
