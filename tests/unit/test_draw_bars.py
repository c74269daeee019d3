"""Bars, columns and rows as strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotop.ui.charts import Canvas, plot_stack
from zerotop.ui.charts.bars import Part, draw_stacked_bar
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import Span, align_ends, choose_items, fit_row, join_rows, merge_spans, row_text, row_width
from zerotop.ui.drawing.table import Column, draw_rule, place_columns

MEMORY = (("memory-allocated", 4.0), ("memory-reserved", 2.0), ("memory-other", 1.0))


def test_a_bar_in_whole_cells() -> None:
    assert row_text(draw_stacked_bar(MEMORY, 10, 10, BLOCKS)) == "▇" * 10
    assert row_text(draw_stacked_bar(MEMORY, 10, 10, TEXTURES)) == "████▓▓▒···"
    assert row_text(draw_stacked_bar(MEMORY, 10, 10, ASCII)) == "####==-..."


def test_a_bar_names_the_style_of_every_part() -> None:
    assert draw_stacked_bar(MEMORY, 10, 10, BLOCKS) == (
        ("▇▇▇▇", "memory-allocated"),
        ("▇▇", "memory-reserved"),
        ("▇", "memory-other"),
        ("▇▇▇", "memory-free"),
    )


@pytest.mark.parametrize(("amount", "cells"), [(24, 2), (28, 3), (31, 3), (32, 3), (37, 4)])
def test_a_part_ends_at_the_nearest_cell(amount: float, cells: int) -> None:
    assert draw_stacked_bar((("load", amount),), 100, 10, BLOCKS)[0] == ("▇" * cells, "load")


def test_a_tiny_part_has_a_cell() -> None:
    assert row_text(draw_stacked_bar((("load", 0.001),), 100, 3, ASCII)) == "#.."
    assert row_text(draw_stacked_bar((("load", 0.0),), 100, 3, ASCII)) == "..."


def test_a_tiny_second_part_has_no_cell() -> None:
    parts = (("memory-allocated", 0.7), ("memory-reserved", 0.01))
    assert row_text(draw_stacked_bar(parts, 24, 20, ASCII)) == "#" + "." * 19
    assert (
        row_text(draw_stacked_bar((("memory-allocated", 0.7), ("memory-reserved", 0.5)), 24, 20, ASCII)) == "#=" + "." * 18
    )


def test_marks_keep_the_colour_of_their_cell() -> None:
    bar = draw_stacked_bar(MEMORY, 10, 10, BLOCKS, marks=[6.0, 9.0])
    assert row_text(bar) == "▇▇▇▇▇▕▇▇▕▇"
    assert ("▕", "peak/memory-reserved") in bar
    assert ("▕", "peak/memory-free") in bar


def test_too_much_fills_the_bar() -> None:
    assert row_text(draw_stacked_bar((("load", 300.0),), 100, 4, BLOCKS, marks=[500.0])) == "▇▇▇▕"
    assert row_text(draw_stacked_bar((("load", 1.0),), 0, 2, ASCII)) == "#."


amounts = st.lists(st.floats(min_value=0, max_value=1e12), min_size=0, max_size=4)


@given(
    amounts,
    st.floats(min_value=0, max_value=1e12),
    st.integers(0, 60),
    amounts,
    st.sampled_from((BLOCKS, ASCII)),
)
def test_a_bar_always_has_its_width(parts, total, width, marks, glyphs) -> None:  # type: ignore[no-untyped-def]
    named = [(f"part{number}", part) for number, part in enumerate(parts)]
    assert row_width(draw_stacked_bar(named, total, width, glyphs, marks=marks)) == width


PHASES = (("phase-forward", 1.0), ("phase-backward", 2.0), ("phase-step", 1.0))


def draw_column(parts: Sequence[Part], top: float, height: int, glyphs: Glyphs) -> list[Span]:
    """The cells of one stacked column from the top down."""
    canvas = Canvas(1, height, glyphs)
    plot_stack(canvas, [(style, np.array([amount])) for style, amount in parts], top=top)
    return [span for (span,) in canvas.to_rows()]


def test_a_column_from_the_top_down() -> None:
    assert draw_column(PHASES, 8.0, 8, BLOCKS) == [
        *[(" ", "text")] * 4,
        ("█", "phase-step"),
        ("█", "phase-backward"),
        ("█", "phase-backward"),
        ("█", "phase-forward"),
    ]
    assert [cell for cell, _ in draw_column(PHASES, 4.0, 4, ASCII)] == ["S", "b", "b", "f"]


def test_two_phases_share_a_cell_of_a_column() -> None:
    assert draw_column((("low", 0.5), ("high", 0.5)), 1.0, 1, BLOCKS) == [("▄", "low/high")]
    assert draw_column((("low", 0.25), ("high", 0.0)), 1.0, 1, BLOCKS) == [("▂", "low")]


def test_a_column_taller_than_the_chart_fills_it() -> None:
    assert draw_column(PHASES, 2.0, 3, BLOCKS) == [
        ("█", "phase-backward"),
        ("▄", "phase-forward/phase-backward"),
        ("█", "phase-forward"),
    ]


def test_a_very_short_column_is_visible() -> None:
    assert draw_column((("phase-forward", 0.001),), 100.0, 3, BLOCKS)[-1] == ("▁", "phase-forward")


@given(amounts, st.floats(min_value=0, max_value=1e12), st.integers(1, 30), st.sampled_from((BLOCKS, ASCII)))
def test_a_column_has_one_cell_a_row(parts, top, height, glyphs) -> None:  # type: ignore[no-untyped-def]
    cells = draw_column([(f"part{number}", part) for number, part in enumerate(parts)], top, height, glyphs)
    assert len(cells) == height
    assert all(len(text) == 1 for text, _ in cells)


def test_rows_are_padded_or_cut() -> None:
    row = (("one ", "a"), ("two three", "b"))
    assert fit_row(row, 15, BLOCKS) == (("one ", "a"), ("two three", "b"), ("  ", "text"))
    assert row_text(fit_row(row, 9, BLOCKS)) == "one two… "
    assert row_text(fit_row(row, 2, BLOCKS)) == "o…"
    assert row_text(fit_row((("exit 0     ", "a"), (" ", "b")), 9, BLOCKS)) == "exit 0   "
    assert row_text(fit_row((("exit 0     ", "a"), ("1", "b")), 9, BLOCKS)) == "exit 0…  "
    assert merge_spans((("a", "x"), ("b", "x"), ("", "y"), ("c", "z"))) == (("ab", "x"), ("c", "z"))


@given(st.lists(st.tuples(st.text("ab 损", max_size=8), st.sampled_from("xyz"))), st.integers(0, 20))
def test_fit_row_is_exact(spans, width) -> None:  # type: ignore[no-untyped-def]
    assert row_width(fit_row(tuple(spans), width, BLOCKS)) == width


def test_the_least_important_items_are_dropped_first() -> None:
    items = [(9, (("step 13", "a"),)), (2, (("bar", "a"),)), (8, (("2.75 s/it", "a"),)), (5, (("ETA", "a"),))]
    assert row_text(join_rows(choose_items(items, 100))) == "step 13  bar  2.75 s/it  ETA"
    assert row_text(join_rows(choose_items(items, 24))) == "step 13  2.75 s/it  ETA"
    assert row_text(join_rows(choose_items(items, 8))) == "step 13"
    assert row_text(align_ends((("left", "a"),), (("right", "b"),), 12, BLOCKS)) == "left   right"


def test_columns_are_dropped_and_headings_are_above_their_columns() -> None:
    columns: list[Column[int]] = [
        Column("", 4, 9, lambda item, width: ((f"r{item}", "label"),), left=True),
        Column("", 4, 9, lambda item, width: (("#" * width, "load"),), grows=True),
        Column("cores", 5, 9, lambda item, width: ((f"{item:5}", "value"),)),
        Column("busy", 4, 5, lambda item, width: ((f"{item:4}", "value"),)),
    ]
    wide = place_columns(columns, 30)
    assert row_text(draw_rule((("CPU", "title"),), 30, BLOCKS, wide)) == "CPU ─────────────── cores busy"
    assert row_text(wide.draw_row(7, 30, BLOCKS)) == "r7   ##############     7    7"
    narrow = place_columns(columns, 16)
    assert row_text(draw_rule((("CPU", "title"),), 16, BLOCKS, narrow)) == "CPU +busy  cores"
    assert row_text(narrow.draw_row(7, 16, BLOCKS)) == "r7   #####     7"
