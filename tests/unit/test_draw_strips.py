"""Strips as strings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drawn_rows import read_texts
from zerotop.analysis.live_view import GpuHistory
from zerotop.ui.charts.strips import draw_strip, find_pieces
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.rows import Row, row_text, row_width
from zerotop.ui.live.cpu import draw_history_strip, draw_strip_heading


def draw_load(*values: float, width: int, height: int = 1, glyphs: Glyphs = BLOCKS) -> list[Row]:
    return draw_strip(values, ["load"] * len(values), 100.0, width, height, glyphs)


def test_the_newest_is_at_the_right() -> None:
    assert read_texts(draw_load(100, 50, 0, 1, width=6)) == ["  ▇▄ ▁"]
    assert read_texts(draw_load(1, 50, 100, width=2)) == ["▄▇"]


def test_a_full_strip_does_not_touch_the_one_above() -> None:
    assert read_texts(draw_load(100, 500, width=2)) == ["▇▇"]


def test_several_rows_are_one_column() -> None:
    assert read_texts(draw_load(100, 50, 10, 0, width=4, height=2)) == ["▇   ", "██▂ "]


def test_missing_values_are_empty() -> None:
    assert read_texts(draw_load(math.nan, 100, math.nan, width=3)) == [" ▇ "]
    assert read_texts(draw_load(width=3)) == ["   "]


def test_without_utf8_levels_are_densities() -> None:
    assert read_texts(draw_load(0, 1, 20, 50, 80, 100, width=6, glyphs=ASCII)) == [" ..=*#"]


def test_every_value_has_its_own_style() -> None:
    (row,) = draw_strip((100, 100, 50), ("phase-forward", "phase-step", "phase-step"), 100, 3, 1, BLOCKS)
    assert row == (("▇", "phase-forward/strip"), ("▇▄", "phase-step/strip"))


@pytest.mark.parametrize(("width", "text"), [(48, "last 24 s"), (8, "last 4 s"), (7, ""), (400, "last 3 min")])
def test_heading(width: int, text: str) -> None:
    assert row_text(draw_strip_heading(0.5, 1000, width)) == text


def test_the_heading_says_how_much_time_there_is() -> None:
    assert row_text(draw_strip_heading(0.5, 26, 48)) == "last 13 s"


def test_a_short_recording_fills_the_width() -> None:
    assert find_pieces(3, 7).tolist() == [2, 2, 1, 1, 0, 0, 0]
    assert find_pieces(9, 3).tolist() == [2, 1, 0]
    values = np.array([math.nan, 0.0, 50.0, 100.0])
    history = GpuHistory(values, values, values, values)
    assert read_texts(list(draw_history_strip(history, 100.0, 2, 6, 1, BLOCKS))) == ["▄▄▄▇▇▇"]
    assert read_texts(list(draw_history_strip(history, 100.0, 6, 6, 1, BLOCKS))) == ["    ▄▇"]


@example([math.inf], math.inf, 1, 1, BLOCKS)
@given(st.lists(st.floats()), st.floats(), st.integers(0, 40), st.integers(1, 5), st.sampled_from((BLOCKS, ASCII)))
def test_a_strip_always_has_its_size(values: list[float], top: float, width: int, height: int, glyphs: Glyphs) -> None:
    rows = draw_strip(values, ["load"] * len(values), top, width, height, glyphs)
    assert [row_width(row) for row in rows] == [width] * height
