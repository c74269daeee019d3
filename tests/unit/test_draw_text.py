"""Foreign text is made safe and fitted."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color

from zerotop.ui.app.ascii_filter import AsciiFilter
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs, choose_glyphs
from zerotop.ui.drawing.rows import Row, row_text
from zerotop.ui.drawing.table import Column, draw_rule, place_columns
from zerotop.ui.drawing.text import fit_text, sanitize, wrap_text


@pytest.mark.parametrize(
    ("text", "shown"), [("Search for commands…", "Search for commands."), ("▃▅█", "-##"), ("损é", "???")]
)
def test_foreign_text_is_readable_without_utf8_in_as_many_cells(text: str, shown: str) -> None:
    (segment,) = AsciiFilter(ASCII).apply([Segment(text)], Color(0, 0, 0))
    assert segment.text == shown
    assert cell_len(shown) == cell_len(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[red]loss[/red]", "[red]loss[/red]"),
        ("\x1b[31mred", "�[31mred"),
        ("a\tb", "a       b"),
        ("bell\x07\x00", "bell��"),
        ("left\u202eright", "leftright"),  # an override that reverses the text
        ("zero\u200bwidth", "zerowidth"),
        ("损失 1.5 é", "损失 1.5 é"),
    ],
)
def test_sanitize(text: str, shown: str) -> None:
    assert sanitize(text, BLOCKS) == shown


def test_sanitize_without_utf8() -> None:
    assert sanitize("损 → 5µs – ok", ASCII) == "? -> 5us - ok"


@given(st.text(max_size=60))
def test_sanitized_text_has_no_control_characters(text: str) -> None:
    for glyphs in (BLOCKS, ASCII):
        for character in sanitize(text, glyphs):
            assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
            assert glyphs is BLOCKS or character.isascii()


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("short", 10, "short"),
        ("one two three", 9, "one two…"),
        ("one two three", 8, "one two…"),
        ("unbreakableword", 8, "unbreak…"),
        ("损失损失", 5, "损失…"),
        ("ab", 1, "a"),
        ("ab", 0, ""),
    ],
)
def test_fit(text: str, width: int, shown: str) -> None:
    assert fit_text(text, width, BLOCKS) == shown


@given(st.text(max_size=40), st.integers(0, 30))
def test_fit_never_exceeds_the_width(text: str, width: int) -> None:
    assert cell_len(fit_text(sanitize(text, BLOCKS), width, BLOCKS)) <= width


def test_wrap_breaks_between_words_and_ends_with_an_ellipsis() -> None:
    text = "rank 2 ran out of GPU memory in backward of step 24"
    assert wrap_text(text, 20, 3, BLOCKS) == ["rank 2 ran out of", "GPU memory in", "backward of step 24"]
    assert wrap_text(text, 20, 2, BLOCKS) == ["rank 2 ran out of", "GPU memory in…"]
    assert wrap_text("", 20, 2, BLOCKS) == []


@pytest.mark.parametrize(
    ("environment", "encoding", "glyphs"),
    [
        ({"LANG": "en_US.UTF-8"}, "utf-8", BLOCKS),
        ({"LC_ALL": "de_DE.utf8", "LANG": "C"}, "utf-8", BLOCKS),
        ({}, "utf-8", BLOCKS),  # a container without a locale
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, "utf-8", ASCII),
        ({"LANG": "de_DE.ISO-8859-1"}, "utf-8", ASCII),
        ({"LANG": "en_US.UTF-8"}, "ascii", ASCII),
        ({"LANG": "en_US.UTF-8", "NO_COLOR": "1"}, "utf-8", TEXTURES),
    ],
)
def test_glyphs_follow_the_locale(environment: dict[str, str], encoding: str, glyphs: Glyphs) -> None:
    assert choose_glyphs(environment, encoding) is glyphs


def test_a_table_says_which_columns_it_left_out() -> None:
    def make_column(heading: str, width: int, importance: int) -> Column[str]:
        return Column(heading, width, importance, lambda item, size: ((item.rjust(size), "text"),))

    columns = [make_column("", 8, 9), make_column("now", 5, 9), make_column("total", 5, 2), make_column("job", 5, 1)]
    title: Row = (("GPU", "title"),)

    def draw_title(width: int, first: int) -> str:
        wide = [make_column("", first, 9), *columns[1:]]
        return row_text(draw_rule(title, width, BLOCKS, place_columns(wide, width)))

    assert draw_title(40, 8) == "GPU ────── now total ─ job ─────────────"
    assert draw_title(24, 18) == "GPU +total, job ──── now"
    assert draw_title(16, 10) == "GPU ──────── now"
