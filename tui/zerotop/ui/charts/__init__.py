"""The chart painter: NumPy columns in, rows of styled spans out. It knows no widgets and no data but numbers.

Draw from the back to the front on one :class:`Canvas`: grounds, grid, fills, lines, cursor, marks and text; then
:func:`framed` puts axes around it, or ``canvas.rows()`` gives it as it is.
"""

from zerotop.ui.charts.axes import AXIS_WIDTH, axis_row, framed, grid, step_axis, time_axis, time_ticks, zone_s
from zerotop.ui.charts.canvas import Canvas
from zerotop.ui.charts.columns import bridged, edges, last, mean, minmax, shares
from zerotop.ui.charts.fills import Pile, area, band, stack, stacks
from zerotop.ui.charts.heatmap import HEAT, heatmap, levels, ribbon
from zerotop.ui.charts.lines import line
from zerotop.ui.charts.scales import Fitted, Kind, Watched, scale
from zerotop.ui.charts.step_axis import Scale

__all__ = [
    "AXIS_WIDTH",
    "HEAT",
    "Canvas",
    "Fitted",
    "Kind",
    "Pile",
    "Scale",
    "Watched",
    "area",
    "axis_row",
    "band",
    "bridged",
    "edges",
    "framed",
    "grid",
    "heatmap",
    "last",
    "levels",
    "line",
    "mean",
    "minmax",
    "ribbon",
    "scale",
    "shares",
    "stack",
    "stacks",
    "step_axis",
    "time_axis",
    "time_ticks",
    "zone_s",
]
