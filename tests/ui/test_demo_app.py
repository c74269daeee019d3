"""The demo's app: what it says at each stage, and the key to the recorded story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from played_source import PlayedSource
from recordings import open_recording
from screens import read_rows
from story_app import FakeJob
from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.live_view import JobState
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.demo_app import DemoApp, Guide, guide_story
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.drawing.glyphs import BLOCKS


def make_app(seconds: float, *, is_fixed: bool = False) -> DemoApp:
    source = PlayedSource("cpu-clean", lambda: seconds)
    return DemoApp(source, FakeJob(), glyphs=BLOCKS, guide=Guide(is_fixed=is_fixed))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_story_is_one_key_away(size: tuple[int, int]) -> None:
    app = make_app(0.5)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        text = " ".join(" ".join(read_rows(app)).split())
        assert "are starting, about 15 seconds" in text
        assert "R recorded story" in text
        await pilot.press("R")
    assert app.return_value is Leaving.FOR_STORY


async def test_the_tips_follow_the_training() -> None:
    for is_fixed, tip in ((False, "Soon the script will"), (True, "No fault is planted this time")):
        app = make_app(38.0, is_fixed=is_fixed)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            assert tip in "\n".join(read_rows(app))
    view, guide = app.viewer.make_frame().view, Guide(is_fixed=False)
    assert guide(view, (make_stall(),)).startswith("The planted fault. Next: 3")
    over = replace(view, job=replace(view.job, state=JobState.ENDED, exit_code=1))
    assert guide(over, ()).startswith("The training failed. Instead, R plays")


def make_stall() -> Finding:
    return Finding("data_stall", 0, 1, 1, 60, (0,), Severity.WARNING, 0.9, "Waits")


def test_the_recording_has_no_key_to_itself() -> None:
    app = DemoApp(RecordingSource(open_recording("cpu-clean")), glyphs=BLOCKS, guide=guide_story("A note."))
    assert app.check_action("story", ()) is False
    frame = app.viewer.make_frame()
    assert frame.tip.startswith("A note. Next: n goes to the next finding")
