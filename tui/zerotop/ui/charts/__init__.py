"""The chart painter: NumPy columns in, rows of styled spans out. It knows no widgets and no data but numbers.

Draw from the back to the front on one :class:`Canvas`: grounds, grid, fills, lines, cursor, marks and text; then
:func:`framed` puts axes around it, or ``canvas.rows()`` gives it as it is.
"""

from zerotop.ui.charts.axes import (
    AXIS_WIDTH,
    add_axes,
    choose_time_ticks,
    compute_utc_offset,
    draw_axis,
    draw_step_axis,
    draw_time_axis,
    plot_grid,
)
from zerotop.ui.charts.canvas import Canvas
from zerotop.ui.charts.columns import (
    bridge_gaps,
    compute_edges,
    compute_shares,
    resample_last,
    resample_mean,
    resample_minmax,
)
from zerotop.ui.charts.fills import Pile, plot_area, plot_band, plot_stack, plot_stacks
from zerotop.ui.charts.heatmap import HEAT, compute_levels, plot_heatmap, plot_ribbon
from zerotop.ui.charts.lines import plot_line
from zerotop.ui.charts.scales import FittedScale, GrowingScales, Quantity, choose_scale
from zerotop.ui.charts.step_axis import Scale

__all__ = [
    "AXIS_WIDTH",
    "HEAT",
    "Canvas",
    "FittedScale",
    "GrowingScales",
    "Pile",
    "Quantity",
    "Scale",
    "add_axes",
    "bridge_gaps",
    "choose_scale",
    "choose_time_ticks",
    "compute_edges",
    "compute_levels",
    "compute_shares",
    "compute_utc_offset",
    "draw_axis",
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
    "resample_last",
    "resample_mean",
    "resample_minmax",
]
