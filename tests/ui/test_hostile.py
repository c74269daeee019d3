"""Nothing that a terminal would obey is drawn, wherever a recording or another node may have brought it in."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.widgets._toast import Toast

from recordings import rewrite_events
from screens import read_rows
from story_app import Watch
from waiting import wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.frame_widget import RowWidget
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.rows import Row

NASTY = "[red]x[/red] \x1b]0;title\x07\x1b[2J\r\u202e end"


class Told(RowWidget):
    """A row as a panel draws it that has not looked what it says."""

    def paint(self, width: int, height: int) -> list[Row] | None:
        return [((NASTY.ljust(width), "text"),)]


class Page(App[None]):
    """With that alone on it."""

    def __init__(self, glyphs: Glyphs) -> None:
        super().__init__()
        self._glyphs = glyphs

    def compose(self) -> ComposeResult:
        yield Told(self._glyphs, id="told")


@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
async def test_panels_pass_on_printable_text_only(glyphs: Glyphs) -> None:
    app = Page(glyphs)
    async with app.run_test(size=(60, 1)):
        panel = app.query_one(Told)
        panel.repaint()
        text = panel.render_line(0).text
        assert "[red]x[/red]" in text
        assert text.isprintable()


async def test_markup_in_a_notification_is_drawn_literally() -> None:
    seen = Watch("story", 65.0)
    async with seen.app.run_test(size=(120, 40), notifications=True) as pilot:
        seen.app.notify(NASTY)
        await wait_until(pilot, lambda: seen.app.screen.query(Toast))
        text = str(seen.app.screen.query_one(Toast).render())
        assert "[red]x[/red]" in text
        assert text.isprintable()


def text_of(app: ZerotopApp) -> str:
    return "\n".join(read_rows(app))


@pytest.mark.parametrize("number", [-5, 2**62])
async def test_numbers_that_cannot_be_and_facts_that_are_none(number: int) -> None:
    """The first are shown as they are, of the second it is told that there were some."""

    def set_numbers(line: dict[str, Any]) -> dict[str, Any]:
        match line.get("event"):
            case "hello" | "total_steps" | "tensors":
                return line | {fact: number for fact, value in line.items() if type(value) is int and fact != "time_ns"}
            case "node":
                return line | {"cores": number, "memory_bytes": number}
            case "engine":
                return line | {"devices": {"0": "x"}}
            case "microscope":
                return line | {"request": None}
        return line

    app = ZerotopApp(RecordingSource(rewrite_events("gpu-microscope", set_numbers)), title="x", glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        for tab in TABS:
            app.action_switch(tab.name)
            await wait_until(pilot, lambda: "2 damaged event lines were skipped or read in part." in text_of(app))
