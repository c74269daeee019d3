"""Keys that a terminal sends in one piece, as where a macro types: none is lost or means another thing."""

from __future__ import annotations

from textual import events
from textual.widgets import Input

from recordings import open_searched
from waiting import wait_until
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.output.screen import OutputScreen

KEYS = {"/": "slash", " ": "space"}


def make_app() -> ZerotopApp:
    return ZerotopApp(open_searched("z2-oom"), title="oom", glyphs=BLOCKS)


def type_at_once(app: ZerotopApp, text: str) -> None:
    """Type faster than any key is handled."""
    for character in text:
        app.post_message(events.Key(KEYS.get(character, character), character))


async def test_a_search_of_the_findings_gets_all_keys() -> None:
    """With / in them: in the field it is a character like others."""
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("a")
        type_at_once(app, "/qy a/b")
        await wait_until(pilot, lambda: app.screen.query_one(Input).value == "qy a/b")


async def test_a_search_of_the_output_gets_all_keys() -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.action_switch("output")
        await pilot.pause()
        screen = app.screen
        assert isinstance(screen, OutputScreen)
        type_at_once(app, "/q1 a/b")
        await wait_until(pilot, lambda: screen.reading.typed_text == "q1 a/b")
        assert app.screen is screen
