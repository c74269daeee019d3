"""The sweep's screen: its picture in three sizes, the chosen point, and leaving while it runs."""

from __future__ import annotations

from typing import Any

import pytest

from sweep_progress import REASON, Progress, make_model
from zerotop.ui.app.sweep_app import SweepApp
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.sweep.drawing import draw_sweep
from zerotop.ui.sweep.model import SweepModel


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(SweepApp(make_model(), glyphs=BLOCKS), terminal_size=size)


@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
@pytest.mark.parametrize("done", [0, 1, 8, 16])
def test_any_size_is_filled_exactly(done: int, glyphs: Any) -> None:
    for width in (20, 40, 60, 79, 133, 250):
        for height in (3, 6, 10, 17, 23, 33, 60):
            rows = draw_sweep(make_model(done), width, height, glyphs)
            assert len(rows) == height
            assert {row_width(row) for row in rows} == {width}


def test_the_chosen_point_says_why_it_failed() -> None:
    model = make_model()
    model.move_cursor(-1000)
    model.move_cursor(7)
    text = " ".join(row_text(row) for row in draw_sweep(model, 120, 40, BLOCKS))
    assert "Point 7: Rank 0 ran out of GPU memory in backward" in " ".join(text.split())
    assert REASON.split()[-3] in text


def test_the_line_of_the_chosen_series_and_the_cost() -> None:
    text = " ".join(" ".join(row_text(row) for row in draw_sweep(make_model(16), 160, 45, BLOCKS)).split())
    assert "3,100.0 kB x tokens" in text
    assert "flat at 9.30 GiB up to 1,900 tokens a micro-batch" in text
    assert "16 of 16 points done $3.35" in text


@pytest.mark.parametrize("yes", ["s", "y"])
async def test_leaving_asks_while_the_sweep_runs(yes: str) -> None:
    progress = Progress()
    app = SweepApp(SweepModel(progress), glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        for no in ("c", "n", "q"):
            await pilot.press("q", no)
            assert not progress.stopped
        await pilot.press("enter")
        await pilot.press("q", yes)
    assert progress.stopped


async def test_leaving_an_ended_sweep_asks_nothing() -> None:
    progress = Progress(16)
    app = SweepApp(SweepModel(progress), glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "pageup", "end", "home", "f", "u", "y", "question_mark", "escape", "q")
    assert app.return_code == 0


async def test_a_point_without_a_recording_is_said() -> None:
    app = SweepApp(SweepModel(Progress(16)), glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("home", "enter")
        assert [note.message for note in app._notifications] == ["This point has no recording yet."]


async def test_keys_move_the_cursor() -> None:
    model = SweepModel(Progress(16))
    app = SweepApp(model, glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        rows = []
        for key in ("end", "home", "down", "j", "up", "k", "pagedown", "pageup"):
            await pilot.press(key)
            rows.append(model.cursor_row)
    assert rows[:6] == [15, 0, 1, 2, 1, 0]
    assert rows[6] > 1
    assert rows[7] == 0
