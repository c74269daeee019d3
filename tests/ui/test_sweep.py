"""The sweep's screen: its picture in three sizes, the chosen point, and leaving while it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.widgets import Static

from sweep_progress import REASON, FitProgress, Progress, make_model, make_search
from waiting import wait_until
from zerotop.analysis.sweeps.series import TOKENS
from zerotop.recording.sweeps import read_sweep
from zerotop.ui.app.sweep_app import SweepApp
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.sweep.drawing import draw_sweep
from zerotop.ui.sweep.model import SweepModel


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(SweepApp(make_model(), glyphs=BLOCKS), terminal_size=size)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture_of_a_search(snap_compare: Any, size: tuple[int, int]) -> None:
    assert snap_compare(SweepApp(make_search(), glyphs=BLOCKS), terminal_size=size)


@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
@pytest.mark.parametrize("done", [0, 1, 4, 9])
def test_a_search_of_any_size_is_filled_exactly(done: int, glyphs: Any) -> None:
    for width in (20, 40, 79, 133, 250):
        for height in (3, 6, 10, 23, 33, 60):
            rows = draw_sweep(make_search(done), width, height, glyphs)
            assert len(rows) == height
            assert {row_width(row) for row in rows} == {width}


def test_a_search_says_what_fits_and_how_many_runs_are_left() -> None:
    rows = [" ".join(row_text(row).split()) for row in draw_sweep(make_search(6), 120, 40, BLOCKS)]
    assert "6 runs, 14 more at most" in rows[1]
    assert "Largest sequence length" in rows[2]
    assert "stage 2 7,168 8,192 4,400 7,300 60.00 4 found" in rows[3]
    assert "stage 3 7,168 16,384 7,400 14,600 60.00 2 8 values left" in rows[4]
    ended = [" ".join(row_text(row).split()) for row in draw_sweep(make_search(9), 120, 40, BLOCKS)]
    assert "9 runs done" in ended[1]
    assert "stage 3 10,240 11,264 7,400 14,600 60.00 5 found" in ended[4]


def test_a_search_shows_the_limit_and_what_fragmentation_took() -> None:
    rows = [row_text(row) for row in draw_sweep(make_search(9), 120, 40, BLOCKS)]
    charts = [row for row in rows if row.startswith("Peak allocated")]
    assert [" ".join(row.replace("─", "").split()) for row in charts] == ["Peak allocated, GiB Tokens per second, thousands"]
    assert sum("available to PyTorch: 130 GiB" in row for row in rows) == 1
    text = " ".join(" ".join(rows).split())
    assert "seq-length 8,192 failed with 13.00 GiB reserved but unused, in blocks too small" in text
    assert "--allocator expandable_segments:True may allow more" in text


def test_the_axis_of_a_search_ends_near_what_fits() -> None:
    model = make_search(2)  # 4,096 fits, 8,192 does not
    assert model.shown_values == [4096, 6144, 8192]
    model.search.results = (replace(model.search.results[0], largest=3072),)  # type: ignore[union-attr]
    assert model.shown_values == [4096, 6144]


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
    assert "3.0 MiB a token on top of" in text
    assert "flat at 9.30 GiB up to 1,900 tokens a micro-batch" in text
    assert "16 of 16 points done $3.35" in text


def test_a_narrow_screen_keeps_all_series_and_the_heading_of_what_varies() -> None:
    """Four offload modes do not fit with the name of the setting each."""
    sweep = read_sweep(Path(__file__).parents[2] / "docs" / "sweeps" / "stages")
    progress = Progress(0)
    progress.sweep = sweep
    rows = [row_text(row) for row in draw_sweep(SweepModel(progress), 80, 21, BLOCKS)]
    assert "stage offload" in rows[2]
    legend = next(row for row in rows if "over stage" in row)
    assert legend.split() == [
        "offload:",
        "■",
        "none",
        "■",
        "optimizer",
        "■",
        "params",
        "■",
        "optimizer_params",
        "over",
        "stage",
    ]
    wide = [row_text(row) for row in draw_sweep(SweepModel(progress), 120, 37, BLOCKS)]
    assert any("■ offload none   ■ offload optimizer   ■ offload params" in row for row in wide)
    assert wide[2].startswith("Points stage offload")


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


def test_an_ended_sweep_says_its_answer_first() -> None:
    folder = Path(__file__).parents[2] / "docs" / "sweeps"
    for name, answer in (
        ("fit", " Largest seq-length that fits: 4,608 (offload none), 6,400 (offload optimizer)."),
        ("stages", " Fastest: stage 0, offload none, 14,559 tokens per second."),
    ):
        progress = Progress(0)
        progress.sweep, progress.is_over, progress.running = read_sweep(folder / name), True, ()
        for size in ((80, 24), (120, 40)):
            rows = [row_text(row) for row in draw_sweep(SweepModel(progress), *size, BLOCKS)]
            assert rows[2].startswith(answer)
    assert sum("ok, fastest" in row_text(row) for row in draw_sweep(SweepModel(progress), 250, 70, BLOCKS)) == 1


async def test_a_point_without_a_recording_is_reported() -> None:
    app = SweepApp(SweepModel(Progress(16)), glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("home", "enter")
        assert [note.message for note in app._notifications] == ["This point has no recording yet."]


async def test_a_search_that_begins_has_nothing_to_open() -> None:
    model = make_search(0)
    model.progress.sweep = replace(model.sweep, points=())
    app = SweepApp(model, glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "up", "end", "enter")
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


async def test_leaving_a_search_asks_in_its_own_words() -> None:
    progress = FitProgress()
    app = SweepApp(SweepModel(progress, None, progress), glyphs=BLOCKS)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("q")
        assert "Stop the search?" in str(app.screen.query_one("#text", Static).content)
        await pilot.press("s")
    assert progress.stopped


async def test_the_mouse_on_a_chart_shows_values_and_its_wheel_zooms() -> None:
    model = make_model(16)
    app = SweepApp(model, glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: bool(model.placed_charts))
        placed = next(one for one in model.placed_charts if one.measurement == TOKENS)
        column, row = placed.left + placed.width - 3, placed.top + 3
        await pilot.hover("#sweep-sheet", offset=(column, row))
        assert model.pointed == (column, row)
        title = row_text(draw_sweep(model, 120, 39, BLOCKS)[placed.top])
        assert title.rstrip().endswith("4096  ■ 25.4k")  # only one of both ran there
        for direction, count in ((1, 6), (1, 5), (-1, 6), (-1, 8)):
            turn_wheel(app, column, row, direction)
            await pilot.pause()
            assert len(model.shown_values) == count
            assert model.shown_values[-1] == 4096
        before = model.cursor_row
        turn_wheel(app, 10, model.table_top, -1)
        await pilot.pause()
        assert model.cursor_row == before
        turn_wheel(app, 10, model.table_top, 1)
        await pilot.pause()
        assert model.cursor_row == before - 1
        assert len(model.shown_values) == 8


def turn_wheel(app: SweepApp, x: int, y: int, direction: int) -> None:
    """Turn the wheel up, or down where ``direction`` is negative."""
    kind = events.MouseScrollUp if direction > 0 else events.MouseScrollDown
    app.screen.post_message(kind(None, x, y, 0, 0, 0, False, False, False, screen_x=x, screen_y=y))


def test_the_first_picture_describes_the_point_that_runs() -> None:
    model = make_model()
    first = draw_sweep(model, 200, 50, BLOCKS)
    assert model.sweep.points[model.cursor_row].settings["allocator"] == "expandable_segments:True"
    assert any(row_text(row).startswith(" allocator expandable_segments:True: ") for row in first)
    assert draw_sweep(model, 200, 50, BLOCKS) == first


def test_the_runs_of_a_search_are_in_order_of_what_is_searched() -> None:
    """Not in that of the search, which jumps; the cursor follows the run in progress."""
    model = make_search(9)
    listed = [(point.settings["stage"], int(point.settings[model.search.searched])) for point in model.listed_points]  # type: ignore[union-attr]
    assert listed == sorted(listed)
    assert [point.number for point in model.listed_points] != [point.number for point in model.sweep.points]
    model.place_cursor()
    assert model.listed_points[model.cursor_row].number == len(model.sweep.points) - 1


def test_an_ended_sweep_opens_on_its_last_point() -> None:
    """Whatever its number: combinations that cannot work have one, but are no points."""
    progress = Progress(0)
    progress.sweep = read_sweep(Path(__file__).parents[2] / "docs" / "sweeps" / "stages")
    progress.is_over, progress.running = True, ()
    model = SweepModel(progress)
    model.place_cursor()
    assert [model.cursor_row, model.listed_points[-1].number] == [len(progress.sweep.points) - 1, 15]
