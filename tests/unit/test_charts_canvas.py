"""Charts as strings: what they draw, what covers what, and that no number breaks them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from zerotop.ui.charts import (
    Canvas,
    Pile,
    compute_levels,
    plot_area,
    plot_band,
    plot_heatmap,
    plot_line,
    plot_ribbon,
    plot_stack,
    plot_stacks,
)
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import Row, row_text, row_width

ALL = (BLOCKS, TEXTURES, ASCII)
NAN = np.nan


def draw_lines(canvas: Canvas) -> list[str]:
    return [row_text(row) for row in canvas.to_rows()]


def style_at(rows: list[Row], x: int, y: int) -> str:
    at = 0
    for text, style in rows[y]:
        at += len(text)
        if x < at:
            return style
    raise AssertionError(f"no cell {x} in {rows[y]}")


def test_a_line_has_two_columns_and_four_rows_to_a_cell() -> None:
    canvas = Canvas(4, 2, BLOCKS)
    values = np.arange(1.0, 9.0)
    plot_line(canvas, values, values, "series-0", top=8)
    assert draw_lines(canvas) == ["  ⡠⠊", "⡠⠊  "]


def test_neighbours_are_joined_and_gaps_are_not() -> None:
    canvas = Canvas(3, 2, BLOCKS)
    values = np.array([0.0, 8.0, 8.0, NAN, 8.0, 0.0])
    plot_line(canvas, values, values, "series-0", top=8)
    assert draw_lines(canvas) == ["⢸⠁⡇", "⡇ ⢸"]


def test_a_line_reaches_from_the_lowest_to_the_highest() -> None:
    canvas = Canvas(2, 2, BLOCKS)
    plot_line(canvas, np.array([0.0, 0, 0, 0]), np.array([0.0, 8, 0, 0]), "series-0", top=8)
    assert draw_lines(canvas) == ["⢸ ", "⣸⣀"]


def test_lines_share_cells_and_the_later_gives_the_colour() -> None:
    canvas = Canvas(1, 1, BLOCKS)
    plot_line(canvas, np.array([1.0, NAN]), np.array([1.0, NAN]), "series-0", top=4)
    plot_line(canvas, np.array([NAN, 4.0]), np.array([NAN, 4.0]), "series-1", top=4)
    assert canvas.to_rows() == [(("⡈", "series-1"),)]


def test_areas_are_exact_to_an_eighth() -> None:
    canvas = Canvas(5, 2, BLOCKS)
    plot_area(canvas, np.array([0.0, 1.0, 8.0, 11.0, NAN]), "load", top=16)
    assert draw_lines(canvas) == ["   ▃ ", " ▁██ "]


def test_a_line_over_an_area_is_on_its_colour() -> None:
    canvas = Canvas(1, 2, BLOCKS)
    plot_area(canvas, np.array([8.0]), "load", top=8)
    plot_line(canvas, np.full(2, 1.0), np.full(2, 1.0), "series-0", top=8)
    assert canvas.to_rows() == [(("█", "load"),), (("⣀", "series-0/load"),)]


def test_stacked_layers_meet_within_a_cell() -> None:
    canvas = Canvas(2, 2, BLOCKS)
    layers = [("memory-allocated", np.array([6.0, 3.0])), ("memory-reserved", np.array([6.0, 0.0]))]
    plot_stack(canvas, layers, top=16)
    rows = canvas.to_rows()
    assert draw_lines(canvas) == ["▄ ", "▆▃"]
    assert rows[1] == (("▆", "memory-allocated/memory-reserved"), ("▃", "memory-allocated"))
    assert style_at(rows, 0, 0) == "memory-reserved"


def test_the_two_largest_of_three_layers_in_a_cell_are_drawn() -> None:
    canvas = Canvas(1, 1, BLOCKS)
    plot_stack(canvas, [("a", np.array([3.0])), ("b", np.array([1.0])), ("c", np.array([4.0]))], top=8)
    assert canvas.to_rows() == [(("▃", "a/c"),)]


@pytest.mark.parametrize("glyphs", [BLOCKS, TEXTURES, ASCII], ids=lambda glyphs: glyphs.name)
def test_several_stacks_at_once_look_like_each_one_alone(glyphs: Glyphs) -> None:
    numbers = np.random.default_rng(7)
    piles = [
        Pile(
            1, 3, [("load", numbers.random(40)), ("load-free", numbers.random(40)), ("load-others", numbers.random(40))], 2.0
        ),
        Pile(5, 1, [("memory-allocated", np.append(numbers.random(38) / 20, [np.nan, 0.0]))], 1.0),
        Pile(6, 4, [("series-1", 9 * numbers.random(40)), ("series-2", 9 * numbers.random(30))], 10.0),
    ]
    canvas = Canvas(40, 11, glyphs)
    plot_stacks(canvas, piles)
    rows = canvas.to_rows()
    for pile in piles:
        alone = Canvas(40, pile.rows, glyphs)
        plot_stack(alone, pile.layers, top=pile.top)
        assert rows[pile.row : pile.row + pile.rows] == alone.to_rows()
        part = canvas.slice_rows(pile.row, pile.rows)
        assert part.to_rows() == alone.to_rows()
    assert {row_text(rows[y]) for y in (0, 4, 10)} == {" " * 40}


def test_tiny_amounts_are_visible_and_zero_is_not() -> None:
    canvas = Canvas(3, 1, BLOCKS)
    plot_stack(canvas, [("a", np.array([1e-9, 0.0, -5.0])), ("b", np.array([2e-9, 0.0, NAN]))], top=1)
    assert canvas.to_rows() == [(("▁", "b"), ("  ", "text"))]


def test_a_band_is_behind_a_line() -> None:
    canvas = Canvas(1, 3, BLOCKS)
    plot_band(canvas, np.array([4.0]), np.array([20.0]), "heat-3", top=24)
    assert canvas.to_rows() == [(("▄", "heat-3"),), ((" ", "text/heat-3"),), (("▄", "ground/heat-3"),)]
    plot_line(canvas, np.full(2, 12.0), np.full(2, 12.0), "series-0", top=24)
    assert canvas.to_rows()[1] == (("⠤", "series-0/heat-3"),)


def test_a_thin_band_is_visible() -> None:
    for low, drawn in ((1, "▂"), (4, "━"), (6, "▔")):
        canvas = Canvas(1, 1, BLOCKS)
        plot_band(canvas, np.array([low]), np.array([low]), "heat-3", top=8)
        assert draw_lines(canvas) == [drawn]


def test_a_band_on_a_ground_keeps_the_ground() -> None:
    canvas = Canvas(1, 1, BLOCKS)
    canvas.fill_ground(0, 1, "phase-step")
    plot_band(canvas, np.array([4.0]), np.array([8.0]), "heat-3", top=8)
    assert canvas.to_rows() == [(("▄", "phase-step/heat-3"),)]


def test_a_cursor_goes_through_everything() -> None:
    canvas = Canvas(3, 3, BLOCKS)
    plot_area(canvas, np.full(3, 4.0), "load", top=12)
    plot_line(canvas, np.full(6, 6.0), np.full(6, 6.0), "series-0", top=12)
    canvas.plot_cursor(1)
    rows = canvas.to_rows()
    assert draw_lines(canvas) == [" │ ", "⠤⠤⠤", "█│█"]
    assert style_at(rows, 1, 0) == "cursor"
    assert style_at(rows, 1, 1) == "series-0/cursor-ground"
    assert style_at(rows, 1, 2) == "cursor/load"
    canvas.plot_cursor(-1)
    canvas.plot_cursor(3)
    assert canvas.to_rows() == rows


def test_backgrounds_of_columns() -> None:
    canvas = Canvas(4, 1, BLOCKS)
    canvas.fill_columns(np.array([0, 0, -1, 1]), ["phase-forward", "phase-step"])
    assert canvas.to_rows() == [(("  ", "text/phase-forward"), (" ", "text"), (" ", "text/phase-step"))]


def test_text_is_literal_and_stays_within() -> None:
    canvas = Canvas(6, 2, BLOCKS)
    canvas.write_text(-1, 0, "abc", "accent")
    canvas.write_text(4, 1, "界\x1bxyz", "accent")
    canvas.write_text(0, 2, "below", "accent")
    canvas.write_mark(9, 0, "▼", "warn")
    assert draw_lines(canvas) == ["bc    ", "    \ufffd\ufffd"]


def test_a_ribbon_splits_cells() -> None:
    canvas = Canvas(4, 2, BLOCKS)
    plot_ribbon(canvas, np.array([0, 0, 0, 1, -1, 1, 0, -1]), ["phase-forward", "phase-step"], rows=2)
    assert draw_lines(canvas) == ["█▌▐▌"] * 2
    assert canvas.to_rows()[0][1:] == (
        ("▌", "phase-forward/phase-step"),
        ("▐", "phase-step"),
        ("▌", "phase-forward"),
    )


@pytest.mark.parametrize(("glyphs", "drawn"), [(ASCII, "ffSS"), (TEXTURES, "▒▒██")], ids=["ascii", "textures"])
def test_a_ribbon_without_colours_has_letters(glyphs: Glyphs, drawn: str) -> None:
    canvas = Canvas(4, 1, glyphs)
    plot_ribbon(canvas, np.array([0, 0, 0, 1, 1, 1, -1, 1]), ["phase-forward", "phase-step"])
    assert draw_lines(canvas) == [drawn]


def test_a_heatmap_with_two_rows_in_a_cell() -> None:
    matrix = np.array([[0, 9], [9, 9], [4, -1]])
    canvas = Canvas(2, 3, BLOCKS)
    plot_heatmap(canvas, matrix)
    assert canvas.to_rows()[0] == (("█", "heat-0"), ("█", "heat-9"))
    canvas = Canvas(2, 2, BLOCKS)
    plot_heatmap(canvas, matrix, halves=True)
    assert canvas.to_rows() == [(("▀", "heat-0/heat-9"), ("█", "heat-9")), (("▀", "heat-4"), (" ", "text"))]


def test_a_heatmap_without_colours_has_denser_characters() -> None:
    drawn = []
    for glyphs in (ASCII, TEXTURES):
        canvas = Canvas(10, 1, glyphs)
        plot_heatmap(canvas, np.arange(10)[None, :])
        drawn += draw_lines(canvas)
    assert drawn == [".:-=+*oO#@", "·⡀⡄⡆⡇⣇⣧⣷⣿█"]
    canvas = Canvas(1, 1, ASCII)
    plot_heatmap(canvas, np.array([[0], [9]]), halves=True)
    assert draw_lines(canvas) == ["@"]  # the higher level wins


def test_levels_are_of_equal_size() -> None:
    values = np.array([0.0, 9.9, 10.0, 99.9, 100.0, -5.0, 1e300, NAN, np.inf])
    assert compute_levels(values, 0, 100).tolist() == [0, 0, 1, 9, 9, 0, 9, -1, 9]
    assert compute_levels(values[:2], 5, 5).tolist() == [0, 0]


def test_lines_without_braille_are_letters() -> None:
    canvas = Canvas(4, 2, ASCII)
    values = np.array([0.0, 0, 0, 8, 8, 8, NAN, NAN])
    plot_line(canvas, values, values, "series-0", top=8, letter="c")
    assert draw_lines(canvas) == [" cc ", "cc  "]


def test_lines_without_colours_are_named() -> None:
    canvas = Canvas(60, 4, TEXTURES)
    for number, height in enumerate((1.0, 3.0)):
        values = np.full(120, height)
        plot_line(canvas, values, values, f"series-{number}", top=4, letter="ab"[number])
    text = "".join(draw_lines(canvas))
    assert text.count("a") == text.count("b") >= 2


ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)
SCALES = st.one_of(st.just(0.0), ANY)


@given(st.integers(0, 12), st.integers(0, 6), st.sampled_from(ALL), SCALES, SCALES, st.data(), st.integers(0, 30))
def test_no_number_breaks_a_chart(
    width: int, height: int, glyphs: Glyphs, low: float, top: float, data: st.DataObject, count: int
) -> None:
    def draw_array(kind: object = np.float64, elements: object = ANY) -> np.ndarray:
        return data.draw(arrays(kind, count, elements=elements))  # type: ignore[call-overload]

    canvas = Canvas(width, height, glyphs)
    canvas.fill_ground(-3, count, "phase-step")
    plot_stack(canvas, [("a", draw_array()), ("b", draw_array())], top=top)
    plot_area(canvas, draw_array(), "c", top=top)
    plot_band(canvas, draw_array(), draw_array(), "d", top=top)
    plot_line(canvas, draw_array(), draw_array(), "e", top=top, letter="e")
    plot_ribbon(canvas, draw_array(np.int64, st.integers(-3, 3)), ["f", "phase-step"], row=count % 5)
    plot_heatmap(canvas, compute_levels(draw_array()[None, :], low, top), halves=count % 2 == 1)
    canvas.plot_cursor(count - 3)
    rows = canvas.to_rows()
    assert [row_width(row) for row in rows] == [width] * height
    assert glyphs is not ASCII or all(row_text(row).isascii() for row in rows)


LOWEST, SIZES = st.floats(-50, 150) | st.just(NAN), st.floats(0, 100)


@given(arrays(np.float64, 40, elements=LOWEST), arrays(np.float64, 40, elements=SIZES))
def test_the_highest_and_the_lowest_of_every_column_are_drawn(low: np.ndarray, size: np.ndarray) -> None:
    canvas = Canvas(20, 5, BLOCKS)
    plot_line(canvas, low, low + size, "series-0", top=100)
    bits = np.where(canvas.characters >= 0x2800, canvas.characters & 0xFF, 0)
    for column in range(40):
        masks = (0x01, 0x02, 0x04, 0x40) if column % 2 == 0 else (0x08, 0x10, 0x20, 0x80)
        dots = [bool(bits[row, column // 2] & mask) for row in range(5) for mask in masks][::-1]  # from below
        if np.isnan(low[column]):
            assert not any(dots)
            continue
        for value in (low[column], low[column] + size[column]):
            place = int(np.clip(np.ceil(np.clip(value, 0, 100) / 100 * 20) - 1, 0, 19))
            assert dots[place], (column, value)


@pytest.mark.parametrize(
    "draw", [plot_area, lambda *given, **scale: plot_stack(given[0], [(given[2], given[1])], top=scale["top"])]
)
def test_values_beyond_the_scale_fill_the_column(draw: Callable[..., None]) -> None:
    canvas = Canvas(2, 2, BLOCKS)
    draw(canvas, np.array([5.0, np.inf]), "load", top=1.0)
    assert draw_lines(canvas) == ["██", "██"]
