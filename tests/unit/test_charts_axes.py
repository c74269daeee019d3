"""Axes and scales with round numbers in readable units."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.ui.charts import (
    AXIS_WIDTH,
    Canvas,
    GrowingScales,
    add_axes,
    choose_memory_scale,
    choose_scale,
    choose_time_ticks,
    draw_axis_labels,
    draw_step_axis,
    draw_time_axis,
    plot_area,
    plot_grid,
    plot_line,
)
from zerotop.ui.charts.axes import TICK_INTERVALS_S, choose_tick_interval
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.drawing.units import DECIMAL, DEFAULT_UNITS, set_units
from zerotop_probe.recording.metrics import BYTES, BYTES_PER_S, CORES, NUMBER, PERCENT, SECONDS, WATTS

DAY = 86400.0
GIB = 1 << 30

UNITS = (BYTES, BYTES_PER_S, CORES, NUMBER, PERCENT, SECONDS, WATTS, "MHz")


def read_labels(begin: float, end: float, width: int) -> list[str]:
    return [text for _, text in choose_time_ticks(begin, end, width)]


def test_time_labels_are_as_precise_as_the_axis_needs() -> None:
    assert read_labels(0, 0.05, 100) == ["0 ms", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms"]
    assert read_labels(12.3, 14.9, 60) == ["13 s", "14 s"]
    assert read_labels(61.0, 61.3, 60) == ["1:01.0", "1:01.1", "1:01.2", "1:01.3"]
    assert read_labels(0, 300, 80) == ["0:00", "1:00", "2:00", "3:00", "4:00", "5:00"]
    assert read_labels(-20, 20, 60) == ["-20 s", "-10 s", "0 s", "10 s", "20 s"]
    assert read_labels(0, DAY, 100) == ["0:00", "6:00:00", "12:00:00", "18:00:00", "1d 00:00"]


def test_ticks_are_at_their_times() -> None:
    assert choose_time_ticks(0, 100, 50) == [(0, "0 s"), (30 // 2, "30 s"), (30, "1:00"), (45, "1:30")]
    assert row_text(draw_time_axis(0, 100, 30, BLOCKS)) == "0:00──────────────1:00────────"


@given(st.floats(-1e10, 1e10), st.floats(1e-4, 1e9), st.integers(0, 300))
def test_no_time_breaks_the_axis(begin: float, length: float, width: int) -> None:
    axis = draw_time_axis(begin, begin + length, width, ASCII)
    assert row_width(axis) == width
    assert row_text(axis).isascii()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_no_time_at_all_is_a_bare_line(bad: float) -> None:
    assert row_text(draw_time_axis(0, bad, 5, ASCII)) == "-----"


@given(st.floats(1e-4, 1e9), st.integers(20, 300))
def test_ticks_are_apart_but_not_rare(length: float, width: int) -> None:
    apart = choose_tick_interval(length, width) / length * width
    assert apart >= 13.99 or length / width * 14 <= TICK_INTERVALS_S[0]
    assert apart <= 14 * 3.01 or choose_tick_interval(length, width) == TICK_INTERVALS_S[0]


def test_steps_are_under_their_columns() -> None:
    assert row_text(draw_step_axis(range(7, 37), range(30), 30, BLOCKS)) == "───10───15───20───25───30───35"
    assert row_text(draw_step_axis(range(5), range(0, 20, 4), 20, BLOCKS)) == "0───1───2───3───4───"
    assert row_text(draw_step_axis([], [], 4, BLOCKS)) == "────"


def test_scales_have_readable_units() -> None:
    assert choose_scale(PERCENT, math.nan, 8).tick_rows(8) == {6: 25, 4: 50, 2: 75, 0: 100}
    assert choose_scale(BYTES, 14e15, 8).unit == "TiB"
    assert (memory := choose_scale(BYTES, 37 * GIB, 8)).unit == "GiB"
    assert (memory.top, memory.highest) == (40, 40 * GIB)
    assert choose_scale(SECONDS, 0.042, 6).unit == "ms"
    assert choose_scale(BYTES_PER_S, 12e9, 6).top == 15
    assert choose_scale(WATTS, 0.0, 6).top == 1
    assert choose_scale(BYTES, 5 * 1024**2, 6).unit == "MiB"


@given(
    st.sampled_from(UNITS),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(0, 50),
)
def test_no_value_breaks_a_scale(kind: str, largest: float, height: int) -> None:
    scale = choose_scale(kind, largest, height)
    assert 0 < scale.highest < math.inf
    assert scale.highest >= largest * 0.999 or not largest < 1e7 or kind == PERCENT
    assert all(0 <= row < max(1, height) for row in scale.tick_rows(height))
    labels = [float(row[0][0]) for row in draw_axis_labels(scale, height, BLOCKS) if row[0][0].strip()]
    assert labels == pytest.approx(sorted(scale.tick_rows(height).values(), reverse=True)[: height or 0])  # no label is cut


def test_a_growing_scale_never_shrinks() -> None:
    growing = GrowingScales()
    tops = [growing.choose_scale("a", WATTS, value, 8).top for value in (90.0, 310.0, math.nan, 5.0, math.inf, 300.0)]
    assert tops == [100, 400, 400, 400, 400, 400]
    assert growing.choose_scale("b", WATTS, 5.0, 8).top == 6
    growing.clear()
    assert growing.choose_scale("a", WATTS, 90.0, 8).top == 100


def test_a_chart_in_its_axes() -> None:
    canvas = Canvas(12, 4, BLOCKS)
    axis = choose_scale(WATTS, 380.0, 4)
    plot_area(canvas, np.linspace(0, 400, 12), "load", top=axis.highest)
    plot_grid(canvas, axis)
    rows = add_axes(canvas, axis, draw_time_axis(0, 12, 12, BLOCKS))
    assert [row_width(row) for row in rows] == [12 + AXIS_WIDTH] * 5
    assert [row_text(row) for row in rows] == [
        " 400┤▔▔▔▔▔▔▔▔▔▂▅█",
        "    │      ▁▄▇███",
        " 200┤▔▔▔▁▄▇██████",
        "    │ ▃▆█████████",
        "    └0 s─────────",
    ]


def test_the_grid_is_behind() -> None:
    canvas = Canvas(3, 2, BLOCKS)
    axis = choose_scale(PERCENT, 100, 2)
    plot_grid(canvas, axis)
    plot_line(canvas, np.array([100.0, 100]), np.array([100.0, 100]), "series-0", top=100)
    assert [row_text(row) for row in canvas.to_rows()] == ["⠉▔▔", "▔▔▔"]


@pytest.mark.parametrize(
    ("held", "labels"), [(13 * 1024**2, ["0.04", "0.03", "0.02", "0.01"]), (9e4 * GIB, ["100k", " 50k"])]
)
def test_labels_of_very_little_and_very_much_memory_are_not_cut(held: float, labels: list[str]) -> None:
    rows = draw_axis_labels(choose_memory_scale(held, 8), 8, BLOCKS)
    assert [text for ((text, _), _) in rows if text.strip()] == labels


@given(st.integers(1, 60), st.floats(0.01, 1e6))
def test_a_value_at_a_tick_is_drawn_at_it(height: int, largest: float) -> None:
    """A fill up to a tick's value ends at the upper edge of the tick's row at any height."""
    axis = choose_scale(WATTS, largest, height)
    for row, value in axis.tick_rows(height).items():
        canvas = Canvas(1, height, BLOCKS)
        plot_area(canvas, np.array([value / axis.factor]), "load", top=axis.highest)
        drawn = [row_text(line) for line in canvas.to_rows()]
        assert drawn == [" "] * row + ["█"] * (height - row), (row, value, axis)


@pytest.mark.parametrize("height", [4, 8, 30])
def test_ticks_are_round_in_decimal_units(height: int) -> None:
    held = 79.6 * GIB  # of an 80 GB GPU
    assert choose_scale(BYTES, held, height).unit == "GiB"
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    for axis in (choose_scale(BYTES, held, height), choose_memory_scale(held, height)):
        assert (axis.unit, axis.factor) == ("GB", 1e-9)
        assert axis.distance in (20, 50)
        assert all(value % axis.distance == 0 for value in axis.tick_rows(height).values())
        assert axis.top >= held / 1e9


@pytest.mark.parametrize(
    ("size", "binary", "decimal"),
    [
        (0, "GiB", "GB"),
        (99e3, "KiB", "kB"),
        (101e3, "KiB", "MB"),
        (4e6, "MiB", "MB"),
        (105e6, "MiB", "GB"),
        (6e12, "TiB", "TB"),
    ],
)
def test_the_unit_of_an_axis_follows_the_setting(size: float, binary: str, decimal: str) -> None:
    assert choose_scale(BYTES, size, 8).unit == binary
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    assert choose_scale(BYTES, size, 8).unit == decimal
    assert choose_scale(BYTES_PER_S, 12e9, 8).unit == "GB/s"


def test_a_growing_scale_does_not_shrink_when_units_change() -> None:
    growing = GrowingScales()
    growing.choose_scale("memory", BYTES, 60e9, 8)
    set_units(DEFAULT_UNITS._replace(sizes=DECIMAL))
    assert growing.choose_scale("memory", BYTES, 10e9, 8).top >= 60
