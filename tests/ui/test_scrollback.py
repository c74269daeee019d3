"""Scrolling through output that grows."""

from __future__ import annotations

from fake_source import FakeSource, cpu_story
from zerotop.ui.app.scrollback import Scrollback
from zerotop.ui.live.output import Pane

LINES = tuple(f"line {number}" for number in range(5000))


def scrollback() -> Scrollback:
    return Scrollback(FakeSource(cpu_story(output=LINES)))


def test_at_the_end_it_shows_what_the_view_has() -> None:
    assert scrollback().pane(("a", "b")) == Pane(("a", "b"))


def test_as_far_back_as_there_are_lines() -> None:
    back = scrollback()
    back.scroll(4000, 10, 0)
    pane = back.pane(LINES[-200:])
    assert pane.lines[len(pane.lines) - pane.back - 1] == "line 999"
    assert not pane.growing
    back.scroll(4000, 10, 0)
    pane = back.pane(LINES[-200:])
    assert (pane.lines[0], pane.back) == ("line 0", 4990)
    back.scroll(-4990, 10, 0)
    assert back.pane(LINES[-200:]).back == 0


def test_new_lines_do_not_move_it() -> None:
    back = scrollback()
    back.scroll(3, 10, 0)
    before = back.pane(LINES[-200:])
    after = back.pane((*LINES[-199:], "a new line"))
    assert (after.lines, after.back, after.growing) == (before.lines, 3, True)
    back.forget()
    assert back.pane(("a new line",)) == Pane(("a new line",))


def test_all_of_it_is_seen_already() -> None:
    back = scrollback()
    back.scroll(1, len(LINES), 0)
    assert back.pane(LINES) == Pane(LINES)
