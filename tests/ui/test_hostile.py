"""Nothing that a terminal would obey is drawn, wherever a recording or another node may have brought it in."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.widgets._toast import Toast

from fake_source import offload_story
from watching import Watch
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.rows import Row
from zerotop.ui.widgets.drawn import Painted

NASTY = "[red]x[/red] \x1b]0;title\x07\x1b[2J\r\u202e end"


class Told(Painted):
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
async def test_what_a_panel_passes_on(glyphs: Glyphs) -> None:
    app = Page(glyphs)
    async with app.run_test(size=(60, 1)):
        told = app.query_one(Told)
        told.redraw()
        text = told.render_line(0).text
        assert "[red]x[/red]" in text
        assert text.isprintable()


async def test_a_notice() -> None:
    seen = Watch(offload_story(), 75.0)
    async with seen.app.run_test(size=(120, 40), notifications=True) as pilot:
        seen.app.notify(NASTY)
        await pilot.pause()
        text = str(seen.app.screen.query_one(Toast).render())
        assert "[red]x[/red]" in text
        assert text.isprintable()
