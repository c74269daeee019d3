"""Scrolling through output that grows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from printing import Printing
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.frame_builder import Scrollback
from zerotop.ui.base.frame import Pane

LINES = tuple(f"line {number}" for number in range(5000))
NOW_NS = time.time_ns() + 86_400 * 10**9  # a cursor after all output


@pytest.fixture
def back(tmp_path: Path) -> Scrollback:
    """At the end of a job's output."""
    job = Printing(tmp_path)
    job.write_output("\n".join(LINES).encode())
    return Scrollback(RecordingSource(Recording.open(job.path)))


def test_at_the_end_it_shows_what_the_view_has(back: Scrollback) -> None:
    assert back.make_pane(("a", "b")) == Pane(("a", "b"))


def test_as_far_back_as_there_are_lines(back: Scrollback) -> None:
    back.scroll_lines(4000, 10, NOW_NS)
    pane = back.make_pane(LINES[-200:])
    assert pane.lines[len(pane.lines) - pane.lines_below - 1] == "line 999"
    assert not pane.has_newer
    back.scroll_lines(4000, 10, NOW_NS)
    pane = back.make_pane(LINES[-200:])
    assert (pane.lines[0], pane.lines_below) == ("line 0", 4990)
    back.scroll_lines(-4990, 10, NOW_NS)
    assert back.make_pane(LINES[-200:]).lines_below == 0


def test_new_lines_do_not_move_the_scrolled_output(back: Scrollback) -> None:
    back.scroll_lines(3, 10, NOW_NS)
    before = back.make_pane(LINES[-200:])
    after = back.make_pane((*LINES[-199:], "a new line"))
    assert (after.lines, after.lines_below, after.has_newer) == (before.lines, 3, True)
    back.follow_seeks(1)
    assert back.make_pane(("a new line",)) == Pane(("a new line",))


def test_output_that_fits_does_not_scroll(back: Scrollback) -> None:
    back.scroll_lines(1, len(LINES), NOW_NS)
    assert back.make_pane(LINES) == Pane(LINES)
