"""What is written straight to the terminal is what the compositor would have left there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets._toast import Toast

from cell_terminal import CellTerminal
from played_source import PlayedSource
from screens import read_rows
from zerotop.ui.app import frame_scheduler, monitor
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.rows import Row
from zerotop.ui.widgets.direct_writer import DirectWriter, iter_changes
from zerotop.ui.widgets.textual_private import WrittenText

WIDTH = 40


def make_row(cells: str, borders: list[int], styles: str) -> Row:
    """A row of these cells, a span between each two borders."""
    places = sorted({0, len(cells), *borders})
    return tuple((cells[a:b], styles[a]) for a, b in pairwise(places))


rows = st.builds(
    make_row,
    st.text("ab█", min_size=WIDTH, max_size=WIDTH),
    st.lists(st.integers(1, WIDTH - 1), max_size=8),
    st.text("xy", min_size=WIDTH, max_size=WIDTH),
)


def cells_of(row: Row) -> list[tuple[str, str]]:
    return [(character, style) for text, style in row for character in text]


@given(rows, rows)
def test_changes_make_the_one_row_of_the_other(before: Row, after: Row) -> None:
    cells = cells_of(before)
    for x, spans in iter_changes(before, after):
        piece = cells_of(tuple(spans))
        cells[x : x + len(piece)] = piece
    assert cells == cells_of(after)


def test_only_spans_that_differ_are_written() -> None:
    before = (("ab", "x"), ("cd", "y"), ("ef", "x"))
    assert list(iter_changes(before, before)) == []
    assert list(iter_changes(before, (("ab", "x"), ("cD", "y"), ("ef", "x")))) == [(2, [("cD", "y")])]
    assert list(iter_changes(before, (("a", "x"), ("bcd", "y"), ("ef", "x")))) == [(0, [("a", "x"), ("bcd", "y")])]


def test_spans_are_found_behind_wide_characters() -> None:
    assert list(iter_changes((("日本", "x"), ("a", "x")), (("日本", "x"), ("b", "x")))) == [(4, [("b", "x")])]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_terminal_shows_what_the_compositor_would_paint(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    # No picture but those that are asked for.
    monkeypatch.setattr(frame_scheduler, "ANSWER_S", 60.0)
    for pause in ("FRAME_S", "FIRST_S"):
        monkeypatch.setattr(monitor, pause, 60.0)
    monkeypatch.setattr(frame_scheduler.FrameScheduler, "search_findings", lambda self: None)

    def note_written(app: ZerotopApp, screen: object, update: object) -> None:
        if isinstance(update, WrittenText):
            written.append(update.render_segments(app.console))

    app = ZerotopApp(PlayedSource("story", lambda: 65.0), glyphs=BLOCKS)
    async with app.run_test(size=size) as pilot:
        app.viewer.go_to_seconds(50)
        app.draw_frame()
        await pilot.pause()
        terminal = CellTerminal(read_rows(app))
        monkeypatch.setattr(ZerotopApp, "_display", note_written)
        for tenths in range(501, 520):
            app.viewer.go_to_seconds(tenths / 10)
            app.draw_frame()
            await pilot.pause()
            assert len(written) == 1, "one picture is written in one go"
            terminal.write(written.pop())
            assert terminal.text == read_rows(app)


async def test_a_dialog_over_a_panel_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    app = ZerotopApp(PlayedSource("story", lambda: 65.0), glyphs=BLOCKS)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        app.notify("Something")
        while not any(isinstance(widget, Toast) for widget in app.screen._compositor.visible_widgets):
            await pilot.pause(0.01)
        monkeypatch.setattr(DirectWriter, "write", lambda *_: pytest.fail("written over a message"))
        app.viewer.go_to_seconds(50)
        app.draw_frame()
        await pilot.press("question_mark")
        app.viewer.go_to_seconds(51)
        app.draw_frame()


async def test_a_panel_that_loses_the_focus_as_the_program_ends_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    app = ZerotopApp(PlayedSource("story", lambda: 65.0), glyphs=BLOCKS)
    async with app.run_test() as pilot:
        await pilot.pause()
        await pilot.press("tab")
        panel = app.screen.focused
        assert isinstance(panel, FrameWidget)
        before = panel.plain_text()
        with monkeypatch.context() as ending:
            ending.setitem(app._screen_stacks, app.current_mode, [])
            app.viewer.go_to_seconds(50)
            frame = app.viewer.make_frame()
            panel.deliver_rows(frame, panel.draw_cached(frame, *panel.size))
            panel.on_resize()
        assert panel.plain_text() != before
