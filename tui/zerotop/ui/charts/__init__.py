"""Charts: NumPy columns in, rows of styled spans out. This package knows neither widgets nor recordings.

Draw from back to front on one :class:`Canvas`: backgrounds, fills, lines, cursor, marks and text; the grid comes first
or last. Then :func:`add_axes` puts axes around it, or ``canvas.to_rows()`` returns it without.
"""

from zerotop.ui.charts.axes import (
    AXIS_WIDTH,
    add_axes,
    choose_time_ticks,
    draw_axis,
    draw_axis_labels,
    draw_step_axis,
    draw_time_axis,
    plot_grid,
)
from zerotop.ui.charts.canvas import Canvas
from zerotop.ui.charts.columns import resample_mean
from zerotop.ui.charts.fills import Pile, plot_area, plot_band, plot_stack, plot_stacks
from zerotop.ui.charts.heatmap import HEAT, compute_levels, plot_heatmap, plot_ribbon
from zerotop.ui.charts.lines import plot_line
from zerotop.ui.charts.scales import GrowingScales, Scale, choose_memory_scale, choose_scale, choose_time_scale

__all__ = [
    "AXIS_WIDTH",
    "HEAT",
    "Canvas",
    "GrowingScales",
    "Pile",
    "Scale",
    "add_axes",
    "choose_memory_scale",
    "choose_scale",
    "choose_time_scale",
    "choose_time_ticks",
    "compute_levels",
    "draw_axis",
    "draw_axis_labels",
    "draw_step_axis",
    "draw_time_axis",
    "plot_area",
    "plot_band",
    "plot_grid",
    "plot_heatmap",
    "plot_line",
    "plot_ribbon",
    "plot_stack",
    "plot_stacks",
    "resample_mean",
]
