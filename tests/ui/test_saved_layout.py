"""An enlarged panel and the theme are there again in the next run."""

from __future__ import annotations

from pathlib import Path

from waiting import wait_until
from zerotop import demo
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.settings import UserSettings
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.theme import LIGHT_NAME


def make_app(path: Path) -> ZerotopApp:
    source = RecordingSource(Recording.open(demo.RECORDING_PATH))
    return ZerotopApp(source, glyphs=BLOCKS, title="story", settings=UserSettings(path))


async def test_the_layout_and_the_theme_are_kept(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    first = make_app(settings)
    async with first.run_test(size=(120, 40)) as pilot:
        await pilot.press("tab", "z", "t")
        await wait_until(pilot, lambda: UserSettings(settings).get("zoom.live", ""))
    second = make_app(settings)
    async with second.run_test(size=(120, 40)) as pilot:
        assert second.theme == LIGHT_NAME
        panel = UserSettings(settings).get("zoom.live", "")
        await wait_until(pilot, lambda: second.shown_screen.query_one(f"#{panel}").region.height > 25)
        await pilot.press("escape")
        await wait_until(pilot, lambda: not UserSettings(settings).get("zoom.live", ""))
        await wait_until(pilot, lambda: second.shown_screen.query_one(f"#{panel}").region.height < 25)
