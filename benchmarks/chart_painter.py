"""The cost of a frame of lines: our chart painter beside textual-plot and textual-plotext, in one program, in turn.

Each is a widget that fills a terminal of 200x50. A frame is new points, all of them changed, to the strips of text that the
terminal would get, with axes, in braille. Figures are medians of processor time; a peer that is not installed is said to be
missing (``pip install 'zerotop[bench]'``). Below: what finding each column's lowest and highest costs for ten million
points, and a frame of each of our other kinds of chart.

    python benchmarks/chart_painter.py [--size 200x50] [--frames 20]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import numpy as np
from textual.app import App, ComposeResult
from textual.filter import LineFilter
from textual.geometry import Region
from textual.widget import Widget

from zerotop.ui import charts
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.rows import Row
from zerotop.ui.drawing.theme import DARK
from zerotop_probe.recording.metrics import NUMBER

Series = list[tuple[Any, Any]]  # x and y of each line
Maker = Callable[[], tuple[Widget, Callable[[Series], None]]]
LOADS = ((1, 500), (1, 5_000), (10, 10_000))
BUDGET_MS = 5.0  # for the last of them
COLORS = ("white", "yellow", "cyan", "green", "magenta", "blue")


class Lines(FrameWidget):
    """Our lines, with axes."""

    series: Series

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        canvas = charts.Canvas(width - charts.AXIS_WIDTH, height - 1, self.glyphs)
        axis = charts.choose_scale(NUMBER, 8.0, canvas.height)
        charts.plot_grid(canvas, axis)
        for number, (x, y) in enumerate(self.series):
            means = charts.resample_mean(x, y, x[0], x[-1], canvas.dot_columns)
            charts.plot_line(canvas, means, means, f"series-{number % 6}", top=axis.highest)
        return charts.add_axes(canvas, axis, charts.draw_time_axis(0, 100, canvas.width, self.glyphs))

    def show_series(self, series: Series) -> None:
        """Draw one frame."""
        self.series = series
        self.repaint()
        self.render_lines(Region(0, 0, *self.size))


def prepare_ours() -> tuple[Widget, Callable[[Series], None]]:
    """Return our widget and a function that draws a frame of it."""
    widget = Lines(BLOCKS, id="lines")
    widget.series = [(np.arange(2.0), np.zeros(2))]
    widget.frame = cast("Frame", object())
    return widget, widget.show_series


def textual_plot() -> tuple[Widget, Callable[[Series], None]]:
    """Return textual-plot's widget and a function that draws a frame of it. Raises ImportError."""
    from textual_hires_canvas import Canvas, HiResMode
    from textual_plot import PlotWidget

    widget = PlotWidget()

    def show_frame(series: Series) -> None:
        widget.clear()
        for number, (x, y) in enumerate(series):
            widget.plot(x, y, line_style=COLORS[number % len(COLORS)], hires_mode=HiResMode.BRAILLE)
        widget.render()
        canvas = widget.query_one("#plot", Canvas)
        canvas.refresh()
        canvas.render_lines(Region(0, 0, *canvas.size))

    return widget, show_frame


def textual_plotext() -> tuple[Widget, Callable[[Series], None]]:
    """Return textual-plotext's widget and a function that draws a frame of it. Raises ImportError."""
    from textual_plotext import PlotextPlot

    widget = PlotextPlot()

    def show_frame(series: Series) -> None:
        widget.plt.clear_data()
        for number, (x, y) in enumerate(series):
            widget.plt.plot(x.tolist(), y.tolist(), marker="braille", color=COLORS[number % len(COLORS)])
        widget.refresh()
        widget.render_lines(Region(0, 0, *widget.size))

    return widget, show_frame


class Stage(App[None]):
    """A terminal with one widget."""

    CSS = "Screen { layout: vertical; } Drawn, PlotWidget, PlotextPlot { width: 100%; height: 100%; }"

    def __init__(self, widget: Widget) -> None:
        super().__init__()
        self.widget = widget

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return DARK.variables

    def get_line_filters(self) -> list[LineFilter]:
        return []  # a program whose colours are all its own has no use for them, and they cost each widget time

    def compose(self) -> ComposeResult:
        yield self.widget


def make_points(number: int, count: int) -> Iterator[Series]:
    """Yield lines of noise on waves, shifted a little each time, at unevenly spaced times."""
    chance = np.random.default_rng(0)
    x = np.sort(chance.uniform(0, 100, count))
    noise = chance.normal(0, 0.15, (number, count))
    shift = 0.0
    while True:
        shift += 1.7
        yield [(x, 4 + 3 * np.sin(x / (7 + place) + place + shift) + np.roll(noise[place], 31)) for place in range(number)]


async def frames_ms(make: Maker, size: tuple[int, int], most: int) -> list[float]:
    """Return the median processor time of a frame for each load, in milliseconds."""
    widget, show = make()
    found: list[float] = []
    async with Stage(widget).run_test(size=size) as pilot:
        await pilot.pause()
        for number, count in LOADS:
            source, times = make_points(number, count), []
            show(next(source))
            began = time.perf_counter()
            while len(times) < most and (len(times) < 3 or time.perf_counter() - began < 10):
                series = next(source)
                before = time.process_time()
                show(series)
                times.append((time.process_time() - before) * 1e3)
            found.append(float(np.median(times)))
    return found


def median_ms(work: Callable[[], object], times: int) -> float:
    """Return the median processor time in milliseconds."""
    found = []
    for _ in range(times):
        before = time.process_time()
        work()
        found.append((time.process_time() - before) * 1e3)
    return float(np.median(found))


def measure_others(size: tuple[int, int], times: int) -> Iterator[tuple[str, float]]:
    """Yield the name and milliseconds of each of our other charts, and of the columns' means."""
    chance = np.random.default_rng(0)
    many = np.sort(chance.uniform(0, 1, 10_000_000))
    for dtype in (np.float64, np.float32, np.int64):
        values = (chance.normal(0, 100, len(many))).astype(dtype)
        draw_chart = lambda values=values: charts.resample_mean(many, values, 0, 1, 2 * size[0])  # noqa: E731
        yield f"means of 10 million {np.dtype(dtype).name}", median_ms(draw_chart, 5)
    width, height = size
    layers = [(f"series-{place}", chance.uniform(0, 3, width)) for place in range(6)]
    codes, styles = chance.integers(0, 5, 2 * width), ["phase-data", "phase-forward", "phase-backward", "phase-step", "load"]
    heat = chance.integers(-1, 10, (2 * height, width))
    low = chance.uniform(0, 5, width)
    kinds: dict[str, Callable[[charts.Canvas], None]] = {
        "a stack of six layers": lambda canvas: charts.plot_stack(canvas, layers, top=10.0),
        "a band": lambda canvas: charts.plot_band(canvas, low, low + 2, "heat-3", top=10.0),
        "ribbons in all rows": lambda canvas: charts.plot_ribbon(canvas, codes, styles, rows=height),
        "a heatmap of two rows a cell": lambda canvas: charts.plot_heatmap(canvas, heat, halves=True),
    }
    for name, draw in kinds.items():

        def draw_chart() -> list[Row]:
            canvas = charts.Canvas(width, height, BLOCKS)
            draw(canvas)  # noqa: B023
            return canvas.to_rows()

        yield name, median_ms(draw_chart, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="200x50")
    parser.add_argument("--frames", type=int, default=20)
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    names = [f"{number} x {count:,}" for number, count in LOADS]
    print(f"{width}x{height}, ms a frame".ljust(34), *(name.rjust(12) for name in names))
    own: list[float] = []
    for name, make in (("zerotop", prepare_ours), ("textual-plot", textual_plot), ("textual-plotext", textual_plotext)):
        try:
            told = name if name == "zerotop" else f"{name} {version(name)}"
            times = asyncio.run(frames_ms(make, (width, height), given.frames))
        except (ImportError, PackageNotFoundError):
            print(f"{name} is not installed: nothing to compare with (pip install 'zerotop[bench]')")
            continue
        own = own or times
        ratios = "" if times is own else ", ".join(f"{peer / mine:.0f}x" for peer, mine in zip(times, own, strict=True))
        print(told.ljust(34), *(f"{value:12.2f}" for value in times), " ", ratios)
    within = "within" if own[-1] <= BUDGET_MS else "OVER"
    print(f"ten series of 10,000 points: {own[-1]:.2f} ms, {within} {BUDGET_MS:.0f} ms")
    for what, cost in measure_others((width, height), given.frames):
        print(f"{what}: {cost:.2f} ms")


if __name__ == "__main__":
    main()
