"""Scrolling through output that grows."""

from __future__ import annotations

from fake_source import FakeSource, cpu_story
from zerotop.ui.app.scrollback import Scrollback
from zerotop.ui.base.frame import Pane

LINES = tuple(f"line {number}" for number in range(5000))


def make_scrollback() -> Scrollback:
    return Scrollback(FakeSource(cpu_story(output=LINES)))


def test_at_the_end_it_shows_what_the_view_has() -> None:
    assert make_scrollback().make_pane(("a", "b")) == Pane(("a", "b"))


def test_as_far_back_as_there_are_lines() -> None:
    back = make_scrollback()
    back.scroll_lines(4000, 10, 0)
    pane = back.make_pane(LINES[-200:])
    assert pane.lines[len(pane.lines) - pane.lines_below - 1] == "line 999"
    assert not pane.has_newer
    back.scroll_lines(4000, 10, 0)
    pane = back.make_pane(LINES[-200:])
    assert (pane.lines[0], pane.lines_below) == ("line 0", 4990)
    back.scroll_lines(-4990, 10, 0)
    assert back.make_pane(LINES[-200:]).lines_below == 0


def test_new_lines_do_not_move_it() -> None:
    back = make_scrollback()
    back.scroll_lines(3, 10, 0)
    before = back.make_pane(LINES[-200:])
    after = back.make_pane((*LINES[-199:], "a new line"))
    assert (after.lines, after.lines_below, after.has_newer) == (before.lines, 3, True)
    back.follow_seeks(1)
    assert back.make_pane(("a new line",)) == Pane(("a new line",))


def test_all_of_it_is_seen_already() -> None:
    back = make_scrollback()
    back.scroll_lines(1, len(LINES), 0)
    assert back.make_pane(LINES) == Pane(LINES)
