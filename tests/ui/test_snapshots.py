"""Whole screens as pictures: fixed sizes, a clock that stands still, a pinned Textual.

``pytest tests/ui/test_snapshots.py --snapshot-update`` takes them anew; look at them before you commit them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from changed_recordings import open_with_nodes
from recordings import open_recording
from story_app import Watch
from waiting import wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.iteration.screen import IterationScreen
from zerotop.ui.memory.what_if_dialog import WhatIfDialog
from zerotop.ui.ranks.screen import RanksScreen

FOUND = 6  # findings of the story


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_offload(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(Watch("story", 64.0, findings=()).app, terminal_size=size)


def test_two_ranks_without_gpus(snap_compare: Any) -> None:
    assert snap_compare(Watch("cpu-clean", 35.05, findings=()).app, terminal_size=(100, 30))


def test_post_mortem(snap_compare: Any) -> None:
    assert snap_compare(Watch("host-killed", 200.0, findings=()).app, terminal_size=(80, 24))


def test_64_ranks(snap_compare: Any, tmp_path: Path) -> None:
    assert snap_compare(Watch(open_with_nodes("x4-z3", 16, tmp_path), 62.0, findings=()).app, terminal_size=(120, 40))


def test_40_columns(snap_compare: Any) -> None:
    assert snap_compare(Watch("story", 64.0, findings=()).app, terminal_size=(40, 24))


def test_without_utf8(snap_compare: Any) -> None:
    assert snap_compare(Watch("story", 64.0, glyphs=ASCII, findings=()).app, terminal_size=(80, 24))


def test_looking_back_in_the_light_theme(snap_compare: Any) -> None:
    assert snap_compare(Watch("story", 64.0, findings=()).app, terminal_size=(120, 40), press=["t", "shift+left"])


def test_leaving(snap_compare: Any) -> None:
    assert snap_compare(Watch("story", 64.0, findings=()).app, terminal_size=(80, 24), press=["q"])


# --- every screen, over the recording that is shipped with the demo -------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", [tab.name for tab in TABS])
def test_each_screen(snap_compare: Any, story_source: RecordingSource, name: str, size: tuple[int, int]) -> None:
    app = ZerotopApp(story_source, glyphs=BLOCKS, title="story", clock=lambda: 1000.0)

    async def wait_until_settled(pilot: Pilot[Any]) -> None:
        """At the end of step 12, with all that was found and folded."""
        await wait_until(pilot, lambda: len(story_source.findings_at(None)) == FOUND)
        app.action_switch(name)
        app.viewer.go_to_step(12)
        app.draw_frame()
        await pilot.pause()
        screen = app.screen
        await wait_until(pilot, lambda: not (isinstance(screen, IterationScreen) and screen.folding.is_busy))
        await wait_until(pilot, lambda: not (isinstance(screen, RanksScreen) and screen.ranking.is_busy))
        app.draw_frame()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=wait_until_settled)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_what_if(snap_compare: Any, size: tuple[int, int]) -> None:
    """The recorded training in stage 3 with twice the rows."""
    app = ZerotopApp(RecordingSource(open_recording("z2-offload")), glyphs=BLOCKS, title="z2-offload", clock=lambda: 1000.0)

    async def ask(pilot: Pilot[Any]) -> None:
        app.action_switch("memory")
        await pilot.pause()
        app.draw_frame()
        await pilot.press("w")
        await wait_until(pilot, lambda: isinstance(app.screen, WhatIfDialog))
        await pilot.press("right", "down", "down", "right")
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ask)
