"""The footer: taken from the bindings, without keys that do nothing here."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import pytest
from textual.binding import BindingType
from textual.dom import DOMNode
from textual.screen import Screen

from recordings import open_recording
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.start_app import StartApp
from zerotop.ui.base.bars.footer import CursorState, draw_status
from zerotop.ui.base.bars.footer_keys import bind, choose_keys, collect_keys, format_key, in_footer, label_common_keys
from zerotop.ui.base.tabs import TABS, load_screen_class
from zerotop.ui.compare.screen import CompareScreen
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.rows import row_text
from zerotop.ui.start.screen import StartScreen

SCREENS = [StartScreen, CompareScreen, *(load_screen_class(tab.name) for tab in TABS)]


class _Screen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        bind("q", "back", "screen.back", "Back", "Go back", 9),
        bind("up", "move(-1)", "screen.up", "Up", "One row up", in_footer(5, "move", label_index=1)),
        bind("down", "move(1)", "screen.down", "Down", "One row down", in_footer(5, "move", label_index=1)),
        bind("f", "follow", "screen.follow", "Follow", "Follow the end"),
    ]


@pytest.mark.parametrize("kind", SCREENS)
def test_no_key_is_in_a_footer_twice(kind: type[DOMNode]) -> None:
    keys = list(chain.from_iterable(key.keys for key in collect_keys(kind, StartApp)))
    assert len(keys) == len(set(keys))


def test_a_screens_own_keys_replace_those_of_the_app() -> None:
    entries = {key.id: key for key in collect_keys(_Screen, ZerotopApp)}
    assert "app.leave" not in entries  # q does something else here
    assert entries["time.follow"].actions == ("app.follow",)  # f does the same here
    assert entries["screen.back"].label == "back"
    move = entries["screen.up"]
    assert (move.keys, move.label) == (("↑", "↓"), "move")
    assert (move.actions, move.label_action) == (("screen.move(-1)", "screen.move(1)"), "screen.move(1)")


def test_labels_follow_the_cursor() -> None:
    live = label_common_keys(CursorState(75, 75, True, True, False, 1.0), 0)
    assert live["time.play"] == "pause"
    assert live["time.follow"] == live["app.feed"] == ""
    past = label_common_keys(CursorState(7, 75, False, False, False, 1.0), 3)
    assert (past["time.play"], past["time.follow"], past["app.feed"]) == ("play", "end", "3 findings")


def test_keys_are_written_as_people_do() -> None:
    keys = ("question_mark", "shift+left", "ctrl+p", "escape", "enter", "N", "left_square_bracket")
    assert [format_key(key) for key in keys] == ["?", "shift+←", "^p", "esc", "enter", "N", "["]


async def test_only_keys_that_work_are_shown() -> None:
    app: Any = ZerotopApp(RecordingSource(open_recording("story")), glyphs=BLOCKS, title="story")
    async with app.run_test(size=(80, 24)):
        shown = {key.id for key in choose_keys(app.screen, {"app.help": ""})}
        assert {"app.leave", "time.play", "screen.zoom"} <= shown
        assert not shown & {"job.sampler", "job.enter", "memory.look", "app.help"}


@pytest.mark.parametrize(("once_s", "is_said"), [(0.04, False), (1.26, True)])
def test_a_cost_that_would_be_written_as_zero_is_left_out(once_s: float, is_said: bool) -> None:
    cost = replace(RecordingSource(open_recording("cpu-clean")).view_at(None).cost, one_time_s=once_s)
    text = row_text(draw_status(cost, 80))
    assert "watching costs" in text
    assert ("1.3 s once" in text) is is_said
    assert "once" not in text or is_said
