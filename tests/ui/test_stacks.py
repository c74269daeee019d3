"""The stacks of ranks that stand still, on the Ranks screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from recordings import open_searched
from screens import read_rows
from small_recording import second_to_unix_ns
from stuck_ranks_recording import SLEEPING, WAITING, Stand, write_standing
from waiting import wait_until
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.clipboard import collect_copy_text
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.ranks.screen import RankStacksPanel


def read_screen(app: ZerotopApp) -> str:
    return "\n".join(read_rows(app))


def make_app(folder: Path) -> ZerotopApp:
    stands = {0: Stand(WAITING, "wait"), 1: Stand(SLEEPING, "time.sleep"), 2: Stand(WAITING, "wait")}
    return ZerotopApp(open_searched(write_standing(folder, stands)), title="standing", glyphs=BLOCKS)


async def show_stacks(app: ZerotopApp, pilot: Pilot[Any]) -> None:
    await pilot.pause()
    app.viewer.go_to_ns(second_to_unix_ns(40))
    app.action_switch("ranks")
    await wait_until(pilot, lambda: "nothing has moved for 20 s" in read_screen(app))


async def test_the_stacks_are_hidden_and_shown(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await show_stacks(app, pilot)
        assert "Ranks: iteration" in read_screen(app)
        await pilot.press("S")
        await wait_until(pilot, lambda: "nothing has moved" not in read_screen(app))
        await pilot.press("S")
        await wait_until(pilot, lambda: "nothing has moved" in read_screen(app))


async def test_the_finding_of_hung_ranks_opens_the_stacks(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("a")
        await wait_until(pilot, lambda: "hung ranks" in read_screen(app))
        await pilot.press("enter")
        await wait_until(pilot, lambda: "Stacks" in read_screen(app) and "train.py:40 in build_batch" in read_screen(app))
        assert app.screen.id == "ranks"


async def test_stacks_are_copied_to_the_clipboard(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await show_stacks(app, pilot)
        app.screen.query_one(RankStacksPanel).focus()
        await pilot.pause()
        assert "ranks 0, 2: wait in all_reduce" in collect_copy_text(app.screen)
