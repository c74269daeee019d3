"""The program in a terminal that is not there: keys, mouse, sizes, leaving, and what must never happen."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from textual.command import Command, CommandList
from textual.events import Key, MouseScrollUp
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from cell_terminal import CellTerminal
from changed_recordings import open_with_nodes
from printing import Printing
from screens import resize
from story_app import Watch
from waiting import wait_until
from zerotop.analysis.live_view import LiveView
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.base.panels import Transport
from zerotop.ui.base.tabs import TABS, load_screen_class
from zerotop.ui.dialogs.dialog import Page
from zerotop.ui.dialogs.go_to_dialog import GoToDialog
from zerotop.ui.dialogs.quit_dialog import LeaveDialog
from zerotop.ui.drawing.glyphs import ASCII, TEXTURES, Glyphs
from zerotop.ui.drawing.theme import DARK_NAME, LIGHT_NAME
from zerotop.ui.live.panels import Output
from zerotop.ui.memory.screen import MemoryScreen
from zerotop.ui.widgets.textual_private import WrittenText


async def seen_by_ticks(seen: Watch, pilot: Pilot[Leaving], true: Callable[[], bool]) -> None:
    """Ticks until the job was asked how it is, and that was drawn."""
    while not true():
        await seen.wait_for_tick(pilot)


def test_each_tab_is_the_screen_of_that_name() -> None:
    kinds = {tab.name: load_screen_class(tab.name) for tab in TABS}
    assert [(kind.NAME, kind.TITLE) for kind in kinds.values()] == [(tab.name, tab.title) for tab in TABS]


async def test_new_records_are_drawn_at_the_next_tick() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "13/14" in seen.text()
        seen.seconds = 66.0
        await seen.wait_for_tick(pilot)
        assert "14/14" in seen.text()
        assert "● LIVE" in seen.text()


async def test_quiet_recordings_still_get_a_heartbeat() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        seen.app.viewer.source.refresh()
        views = seen.source.views
        await seen_by_ticks(seen, pilot, lambda: seen.source.views - views >= 2)


@pytest.mark.parametrize(
    ("keys", "step", "badge"),
    [
        (["space"], 12, "▮▮ PAUSED −0:00"),
        (["left", "space", "space"], 11, "▮▮ PAUSED −0:"),
        (["left"], 11, "▮▮ PAUSED −0:"),
        (["left", "left", "right"], 11, "▮▮ PAUSED −0:"),
        (["shift+left"], 2, "▮▮ PAUSED −0:"),
        (["shift+left", "shift+right"], 12, "▮▮ PAUSED −0:"),
        (["comma"], 9, "▮▮ PAUSED −0:10"),
        (["comma", "comma", "full_stop"], 9, "▮▮ PAUSED −0:10"),
        (["left", "f"], 12, "● LIVE"),
        (["left", "end"], 12, "● LIVE"),
        (["g", *"7", "enter"], 7, "▮▮ PAUSED −0:"),
        (["g", *"1:00", "enter"], 10, "▮▮ PAUSED −0:04"),
        (["left", "space"], 11, "▶ −0:"),
        (["left", "less_than_sign", "space"], 11, "0.5×"),
        (["left", "greater_than_sign", "greater_than_sign", "space"], 11, "4×"),
        (["left", "greater_than_sign", "space"], 11, "2×"),
    ],
)
async def test_keys_move_through_time(keys: list[str], step: int, badge: str) -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        assert f"{step + 1:>3}/14 " in seen.text()
        assert badge in seen.text()


async def test_home_is_the_begin() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.press("home")
        await pilot.pause()
        assert "no step yet" in seen.text()
        assert "−1:04" in seen.text()


async def test_the_mouse_scrubs() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert await pilot.mouse_down(Transport, offset=(64, 0))
        await pilot.pause()
        first = seen.app.viewer.make_frame().moment.cursor_s
        assert first == pytest.approx(64 * (64 - 17) / (120 - 17 - 7 - 1), abs=1.0)
        assert await pilot.hover(Transport, offset=(40, 0))
        await pilot.pause()
        assert seen.app.viewer.make_frame().moment.cursor_s < first
        assert await pilot.mouse_up(Transport, offset=(40, 0))
        await pilot.hover(Transport, offset=(100, 0))
        await pilot.pause()
        assert seen.app.viewer.make_frame().moment.cursor_s < first


async def test_a_replay_plays_and_ends() -> None:
    seen = Watch("story", None)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "EXIT 0" in seen.text()
        await pilot.press("space")
        await pilot.pause()
        assert "▶ REPLAY 1×" in seen.text()
        seen.clock += 18  # it begins shortly before the first step
        await seen.wait_for_tick(pilot)
        assert " 11/14" in seen.text()
        seen.clock += 60
        await seen.wait_for_tick(pilot)
        assert "EXIT 0" in seen.text()
        assert "The job ended with exit code 0." in seen.text()
        await pilot.press("q")
    assert seen.app.return_value is Leaving.QUIT


async def test_go_to_says_what_it_does_not_understand() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.press("g", "x", "enter")
        await pilot.pause()
        assert isinstance(seen.app.screen, GoToDialog)
        assert "Enter a step (12), a time (1:30), begin or end." in seen.text()
        assert "A step (0 to 12) such as 12" in seen.text()
        seen.app.screen.query_one(Input).value = "99"
        await pilot.press("enter")
        await pilot.pause()
        assert "There is no step 99: the last one is 12." in seen.text()
        seen.app.screen.query_one(Input).value = "5:00"
        await pilot.press("enter")
        await pilot.pause()
        assert "There is no 5:00: the recording ends at 1:04." in seen.text()
        seen.app.screen.query_one(Input).value = ""
        await pilot.press("enter")
        await pilot.pause()
        assert not isinstance(seen.app.screen, GoToDialog)
        await pilot.press("g", "escape")
        await pilot.pause()
        assert "● LIVE" in seen.text()


async def test_keys_that_arrive_at_once_are_typed_into_the_prompt_that_the_first_opens() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        for key, character in (("g", "g"), ("7", "7"), ("enter", "\r")):  # without waiting for what a key does
            seen.app.post_message(Key(key, character))
        await wait_until(pilot, lambda: "8/14" in seen.text())
        assert "PAUSED" in seen.text()


async def test_output_scrolls_back(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output(b"".join(b"line %03d\n" % number for number in range(1000)))
    seen = Watch(Recording.open(job.path), None)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "line 999" in seen.text()
        await pilot.press("up", "up")
        await pilot.pause()
        assert "2 newer below" in seen.text()
        assert "line 999" not in seen.text()
        await pilot.press("pageup")
        await pilot.pause()
        assert "line 997" not in seen.text()
        await pilot.press("pagedown", "down", "down")
        await pilot.pause()
        assert "line 999" in seen.text()
        await pilot._post_mouse_events([MouseScrollUp], Output)
        await pilot.pause()
        assert "3 newer below" in seen.text()
        await pilot.press("f")
        await pilot.pause()
        assert "line 999" in seen.text()


async def test_output_scrolled_back_stands_and_reaches_the_begin() -> None:
    seen = Watch("story", 64.0, findings=())
    async with seen.app.run_test(size=(80, 40)) as pilot:
        await pilot.pause()
        await pilot.press(*["pageup"] * 3)
        seen.seconds = 66.0
        await seen.wait_for_tick(pilot)
        assert "newer below, this is the beginning" in seen.text()
        assert "more than" in seen.text()
        await pilot.press(*["pagedown"] * 3)
        await pilot.pause()
        assert "newer below" not in seen.text()


async def test_tab_moves_and_z_zooms() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert seen.app.focused is None
        order: list[str | None] = []
        for _ in range(5):
            await pilot.press("tab")
            assert seen.app.focused is not None
            order.append(seen.app.focused.id)
        assert order == ["memory", "iteration", "cpu", "gpu", "output"]
        await pilot.press("shift+tab", "shift+tab", "z")
        await pilot.pause()
        assert "rank 3" in seen.text()
        assert "Iteration s" not in seen.text()
        await pilot.press("escape")
        await pilot.pause()
        assert "Iteration s" in seen.text()
        await pilot.press("z", "z")
        await pilot.pause()
        assert "Iteration" in seen.text()


async def test_hidden_panels_take_no_focus() -> None:
    seen = Watch("cpu-clean", 35.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        order: list[str | None] = []
        for _ in range(4):
            await pilot.press("tab")
            order.append(seen.app.focused.id if seen.app.focused else None)
        assert order == ["memory", "iteration", "cpu", "output"]


async def test_keys_can_be_clicked() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        row = seen.text().split("\n")[-1]
        await pilot.click("#keys", offset=(row.index("space"), 0))
        await pilot.pause()
        assert "▮▮" in seen.text()
        await pilot.click("#keys", offset=(seen.text().split("\n")[-1].index("help"), 0))
        await pilot.pause()
        assert isinstance(seen.app.screen, Page)


async def test_each_of_two_keys_in_an_entry_can_be_clicked() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.press("home")
        for key, steps in (("→", "1/14 steps"), ("→", "2/14 steps"), ("←", "1/14 steps")):
            await pilot.click("#keys", offset=(seen.text().split("\n")[-1].index(key), 0))
            await wait_until(pilot, lambda: f" {steps}" in seen.text())  # noqa: B023 as it is awaited here


async def test_help_explains_every_key_and_term() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 220)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        text = seen.text()
        for binding in seen.app.BINDINGS:
            assert not isinstance(binding, tuple)
            assert binding.id
            assert binding.description
            assert binding.tooltip
            assert binding.tooltip in text or binding.id in ("job.sampler", "job.enter")
        assert "Reserved but unallocated memory is cache" in text
        await pilot.press("escape")
        assert not isinstance(seen.app.screen, Page)


async def test_info_has_the_whole_command_and_every_message() -> None:
    seen = Watch("host-killed", 200.0)
    async with seen.app.run_test(size=(100, 40)) as pilot:
        await pilot.press("i")
        await pilot.pause()
        for part in (
            "stage_host.py --train host-killed",
            "exit code 1",
            "OOM killer ended 1 process",
            "No NVIDIA driver",
        ):
            assert part in seen.text()


async def test_the_palette_has_every_action() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        titles = {command.title for command in seen.app.get_system_commands(seen.app.screen)}
        assert {
            "Pause",
            "Step back",
            "Go to",
            "Leave",
            "Help",
            "Zoom",
            "Screenshot",
            "Scroll up",
        } <= titles
        assert "Restart sampler" not in titles
        await pilot.press("ctrl+p", *"step back", "enter", "enter")
        await pilot.pause()
        assert "12/14" in seen.text()


async def test_the_palette_begins_with_what_was_used_most_in_it() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()

        async def open_palette() -> list[str]:
            await pilot.press("ctrl+p")
            await wait_until(
                pilot, lambda: seen.app.screen.query(CommandList) and seen.app.screen.query_one(CommandList).options
            )
            options = seen.app.screen.query_one(CommandList).options
            return [str(option.hit.text) for option in options if isinstance(option, Command)]

        first = await open_palette()
        assert first[0] == "Live"  # not the first by letter
        at = next(place for place, title in enumerate(first) if title == "Memory")
        await pilot.press(*["down"] * at, "enter")
        await wait_until(pilot, lambda: isinstance(seen.app.screen, MemoryScreen))
        assert (await open_palette())[0] == "Memory"


async def test_themes_switch() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        dark = seen.app.export_screenshot()
        assert seen.app.theme == DARK_NAME
        await pilot.press("t")
        await pilot.pause()
        assert seen.app.theme == LIGHT_NAME
        assert seen.app.export_screenshot() != dark
        seen.app.theme = "nord"  # any other theme has our names too
        await pilot.pause()
        assert "GPU" in seen.text()


async def test_a_screenshot_is_saved_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.press("s")
        await pilot.pause()
        (saved,) = tmp_path.glob("*.svg")
        assert "Iteration" in saved.read_text(encoding="utf-8")
        await wait_until(pilot, lambda: "Saved as" in seen.text())
        monkeypatch.chdir("/proc")  # where nothing can be saved
        await pilot.press("s")
        await wait_until(pilot, lambda: "Cannot save" in seen.text())


class TestLeaving:
    """While a job runs, leaving asks."""

    @pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
    async def test_every_way_out_asks(self, key: str) -> None:
        seen = Watch("story", 64.0)
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press(key)
            await pilot.pause()
            assert isinstance(seen.app.screen, LeaveDialog)
            assert "zerotop attach brisk-otter" in seen.text()
            await pilot.press(key)  # again: what harms nothing
        assert seen.app.return_value is Leaving.DETACHED
        assert seen.job.stops == 0

    @pytest.mark.parametrize("keys", [["d"], ["l"], ["enter"]])
    async def test_the_leave_dialog_detaches(self, keys: list[str]) -> None:
        seen = Watch("story", 64.0)
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press("q", *keys)
        assert seen.app.return_value is Leaving.DETACHED

    @pytest.mark.parametrize("keys", [["c"], ["escape"], ["down", "down", "enter"]])
    async def test_the_leave_dialog_can_be_cancelled(self, keys: list[str]) -> None:
        seen = Watch("story", 64.0)
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press("q", *keys)
            await pilot.pause()
            assert not isinstance(seen.app.screen, LeaveDialog)
            assert seen.app.is_running
        assert seen.job.stops == 0

    async def test_stop_shows_its_progress_then_forces_then_ends(self) -> None:
        seen = Watch("cpu-clean", 35.0)
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press("q", "s")
            await wait_until(pilot, lambda: seen.job.stops == 1)
            seen.clock += 3
            await seen.wait_for_tick(pilot)
            assert "asked to end 3 s ago" in seen.text()
            await pilot.press("s")
            await wait_until(pilot, lambda: seen.job.stops == 2)
            assert "Killing the job" in seen.text()
            seen.seconds = 500.0
            await seen.wait_for_tick(pilot)
            assert "The job has ended." in seen.text()
            await pilot.press("s", "c")  # nothing is left to stop
            await pilot.pause()
            assert seen.job.stops == 2
            assert "EXIT 0" in seen.text()
            await pilot.press("q")
        assert seen.app.return_value is Leaving.QUIT

    async def test_leaving_after_stopping(self) -> None:
        seen = Watch("cpu-clean", 35.0)
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press("q", "s")
            seen.seconds = 500.0
            await seen.wait_for_tick(pilot)
            assert [option.id for option in seen.app.screen.query_one(OptionList).options] == [
                "leave",
                "cancel",
            ]
            await pilot.press("enter")
        assert seen.app.return_value is Leaving.STOPPED

    async def test_a_job_that_cannot_be_stopped(self) -> None:
        seen = Watch("story", 64.0)
        seen.job.trouble = PermissionError(1, "Operation not permitted [red]")
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press("q", "s")
            await wait_until(pilot, lambda: "Cannot stop the job: [Errno 1] Operation not permitted [red]" in seen.text())
            assert "The job is still running." in seen.text()

    async def test_a_node_that_is_not_asked_to_stop(self) -> None:
        seen = Watch("story", 64.0)
        seen.job.stop_description = "Stops it gracefully here and on two; again forces it."
        seen.job.not_stopped = "two was not asked to stop: ssh does not reach it."
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.press("q")
            await wait_until(pilot, lambda: "here and on two" in seen.text())
            await pilot.press("s")
            await wait_until(pilot, lambda: "two was not asked to stop: ssh does not reach it." in seen.text())
            assert "asked to end 0 s ago" in seen.text()

    async def test_when_the_job_is_over_leaving_does_not_ask(self) -> None:
        seen = Watch("z2-oom", 60.0)
        async with seen.app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            assert "EXIT 1" in seen.text()
            assert "ran out of GPU memory" in seen.text()
            await pilot.press("q")
        assert seen.app.return_value is Leaving.QUIT


async def test_a_dead_sampler_is_reported_and_started_again() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.press("r")
        assert seen.job.restarts == 0  # there is nothing to restart
        seen.job.sampler = False
        await seen_by_ticks(seen, pilot, lambda: "The sampler has stopped" in seen.text())
        assert "restart sampler" in seen.text()
        seen.job.trouble = OSError("no more processes")
        await pilot.press("r")
        await wait_until(pilot, lambda: "no more processes" in seen.text())
        seen.job.trouble = None
        await pilot.press("r")
        assert seen.job.restarts == 1
        await seen_by_ticks(seen, pilot, lambda: "The sampler has stopped" not in seen.text())


async def test_ranks_attached_to_from_outside_are_entered() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(120, 40), notifications=True) as pilot:
        await pilot.press("E")
        await pilot.pause()
        assert "enter" not in seen.text()  # there is nobody to enter
        seen.job.outside = True
        await seen_by_ticks(seen, pilot, lambda: "E enter ranks" in seen.text())
        seen.job.trouble = OSError("no more processes")
        await pilot.press("E")
        await wait_until(pilot, lambda: "no more processes" in seen.text())
        seen.job.trouble = None
        await pilot.press("E")
        await wait_until(pilot, lambda: "Probe injected into 2 ranks." in seen.text())
        await seen_by_ticks(seen, pilot, lambda: "E enter ranks" not in seen.text())


NASTY = "[red]x[/red] [link=file:///]y \x1b]0;title\x07\x1b[2J \u202e rtl 损失 e\u0301 \x00"


@pytest.mark.parametrize("glyphs", [None, ASCII], ids=["utf8", "ascii"])
async def test_markup_in_recorded_text_is_drawn_literally(glyphs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watch("story", 64.0, glyphs=cast(Glyphs, glyphs)) if glyphs else Watch("story", 64.0)
    whole = seen.source.view_at

    def view_at(cursor_ns: int | None) -> LiveView:
        view = whole(cursor_ns)
        engine = replace(view.job.engine, model=NASTY)
        job = replace(view.job, name=NASTY, command=(NASTY, NASTY), engine=engine, notices=(NASTY,))
        return replace(view, job=job, output=(NASTY,) * 5)

    monkeypatch.setattr(seen.source, "view_at", view_at)
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        for keys in ([], ["i"], ["escape", "q"]):
            await pilot.press(*keys)
            await pilot.pause()
            text = seen.text()
            assert "[red]x[/red] [link=file:///]y" in text or keys == ["escape", "q"]
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
            assert glyphs is None or text.isascii()
        assert {len(line) for line in seen.text().split("\n")} == {120} or glyphs is None


@pytest.mark.parametrize("keys", [[], ["question_mark"], ["q"], ["g"], ["ctrl+p"], ["i"], ["s"]])
async def test_without_utf8_only_ascii_leaves(keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = Watch("story", 64.0, glyphs=ASCII)
    async with seen.app.run_test(size=(100, 30)) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        assert seen.text().isascii()


SIZES = [(80, 24), (120, 40), (200, 50), (300, 90), (40, 24), (40, 10), (20, 6), (8, 3), (3, 1), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "seconds"), [("story", 64.0), ("host-killed", 200.0)])
async def test_every_terminal_size_is_filled(name: str, seconds: float, size: tuple[int, int]) -> None:
    seen = Watch(name, seconds)
    async with seen.app.run_test(size=size) as pilot:
        for keys in ([], ["left"], ["q"]):
            await pilot.press(*keys)
            await pilot.pause()
            assert [len(line) for line in seen.text().split("\n")] == [size[0]] * size[1]


@pytest.mark.parametrize("glyphs", [ASCII, TEXTURES], ids=lambda glyphs: glyphs.name)
async def test_sizes_in_other_characters(glyphs: Glyphs, tmp_path: Path) -> None:
    seen = Watch(open_with_nodes("x4-z3", 16, tmp_path), 62.0, glyphs=glyphs)
    async with seen.app.run_test(size=(30, 8)) as pilot:
        for size in SIZES:
            await resize(pilot, size)
            for keys in ([], ["left"], ["q"], ["escape"]):
                await pilot.press(*keys)
                await pilot.pause()
                assert [len(line) for line in seen.text().split("\n")] == [size[0]] * size[1]


async def test_panels_move_when_there_is_more_or_less_to_say() -> None:
    seen = Watch("cpu-clean", 33.0)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        memory = seen.app.screen.query_one("#memory")
        assert memory.region.y == 5  # two sentences, of which one takes two rows
        seen.seconds = 35.0
        await seen.wait_for_tick(pilot)
        assert memory.region.y == 4
        assert seen.text().split("\n")[4].startswith("Host GiB")
        await pilot.press("home")  # before there were any ranks
        await pilot.pause()
        assert memory.region.y == 3


async def test_resizing() -> None:
    seen = Watch("story", 64.0)
    async with seen.app.run_test(size=(200, 50)) as pilot:
        for size in ((40, 12), (120, 40), (10, 2), (80, 24)):
            await resize(pilot, size)
            await pilot.pause()
            assert [len(line) for line in seen.text().split("\n")] == [size[0]] * size[1]
        assert "GPU GiB" in seen.text()
        assert "13/14" in seen.text()


async def test_only_changed_cells_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watch("story", 65.55, findings=())
    async with seen.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        region = seen.app.screen.query_one("#iteration").region
        terminal = CellTerminal(seen.text().split("\n"))

        def note_update(app: ZerotopApp, screen: object, update: object) -> None:
            assert update is None or isinstance(update, WrittenText), "painted by whole rows"
            if update is not None:
                terminal.write(update.render_segments(app.console))

        monkeypatch.setattr(ZerotopApp, "_display", note_update)
        seen.seconds = 65.6  # within the same step
        views = seen.source.views
        await seen_by_ticks(seen, pilot, lambda: seen.source.views > views)
        assert not [place for place in terminal.touched if region.contains(*place)]
        before = terminal.text
        seen.seconds = 65.7  # one step more
        await seen_by_ticks(seen, pilot, lambda: terminal.text != before)
        assert terminal.text == seen.text().split("\n")
        assert 0 < sum(region.contains(*place) for place in terminal.touched) < region.area / 2
        assert len(terminal.touched) < seen.app.size.area / 2
