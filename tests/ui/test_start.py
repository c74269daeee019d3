"""The start screen over real recordings: every key, and what must never happen to a recording."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input

import recordings
from start_list import Start, filled_folder, is_shown, wait_for_list, wait_for_overviews
from waiting import wait_until
from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.ui.app.settings import UserSettings
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.base.tabs import TABS
from zerotop.ui.compare.screen import CompareScreen
from zerotop.ui.dialogs.dialog import Page
from zerotop.ui.dialogs.yes_no_dialogs import DeleteDialog
from zerotop.ui.drawing.formatting import format_size
from zerotop.ui.drawing.glyphs import ASCII
from zerotop.ui.drawing.theme import LIGHT_NAME
from zerotop.ui.iteration.screen import IterationScreen
from zerotop.ui.live.screen import LiveScreen
from zerotop.ui.start.screen import StartScreen
from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.recording import directory
from zerotop_probe.recording.events import Node
from zerotop_probe.recording.writer import EventWriter, Identity

SWEEPS = Path(__file__).parents[2] / "docs" / "sweeps"


@pytest.fixture
def recording_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return filled_folder(tmp_path, monkeypatch)


async def test_all_are_listed_newest_first_with_their_figures(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        assert start.names() == ["cpu-clean.zerotop", "story", "z2-oom.zerotop"]
        text = start.text()
        assert "3 recordings" in text
        (story,) = [line for line in text.splitlines() if line.strip().startswith("story")]
        for word in ("exit 0", "2 opt→CPU", "2.68", "38.2 GPU"):
            assert word in story
        await wait_until(pilot, lambda: "44 % Iterations take 2.68 s" in start.text())
        (oom,) = [line for line in text.splitlines() if line.strip().startswith("z2-oom")]
        assert "OOM (GPU)" in oom


async def test_the_title_says_the_order_and_that_columns_are_left_out(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(80, 24)) as pilot:
        await wait_for_list(start, pilot)
        assert start.text().splitlines()[1].strip().startswith("newest first +9 columns")


async def test_enter_opens_and_leaving_comes_back(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        for leave in ("q", "escape"):
            await pilot.press("home", "down", "enter")
            await wait_until(pilot, lambda: isinstance(start.app.screen, LiveScreen))
            await wait_until(pilot, lambda: "step 14/14" in start.text() or "14/14 steps" in start.text())
            await pilot.press("2")
            await wait_until(pilot, lambda: not isinstance(start.app.screen, LiveScreen))
            seen = start.app.screen.id
            await pilot.press(leave)
            await wait_until(pilot, lambda: isinstance(start.app.screen, StartScreen))
            assert start.list.model.cursor_row == 1
            # The next one opens on the screen of the monitor that was seen last.
            await pilot.press("down", "enter")
            await wait_until(pilot, partial(is_shown, start, seen))
            await wait_until(pilot, lambda: "z2-oom" in start.text())
            await pilot.press("1", leave)
            await wait_until(pilot, lambda: isinstance(start.app.screen, StartScreen))
        await pilot.press("q")
    assert start.app.return_value is Leaving.QUIT


async def test_a_second_enter_after_the_filter_opens_however_fast_it_is_typed(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("slash", *"story")
        await wait_until(pilot, lambda: start.names() == ["story"])
        for _ in range(2):  # both are there before the first one is handled
            start.app.post_message(events.Key("enter", "\r"))
        await wait_until(pilot, lambda: isinstance(start.app.screen, LiveScreen))


async def test_escape_comes_back_from_every_screen(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        for number, tab in enumerate(TABS, 1):
            await pilot.press("enter")
            await wait_until(pilot, lambda: isinstance(start.app.screen, MonitorScreen))
            await pilot.press(str(number))
            await wait_until(pilot, partial(is_shown, start, tab.name))
            await pilot.press("escape")
            await wait_until(pilot, lambda: isinstance(start.app.screen, StartScreen))


async def test_keys_of_the_monitor_do_nothing_on_the_list(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("1", "2", "n", "a", "i", "r", "g", "f", "left", "full_stop", "b", "x", "z", "tab")
        await pilot.pause()
        assert isinstance(start.app.screen, StartScreen)
        assert not start.notices()


async def test_typing_filters_and_escape_shows_all_again(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("slash", *"spode")  # no key of the list's own is pressed meanwhile
        assert start.names() == []
        assert isinstance(start.app.screen, StartScreen)
        await wait_until(pilot, lambda: "No matches" in start.text())
        await pilot.press(*["backspace"] * 5, *"zero-2 oom", "enter")
        assert start.names() == ["z2-oom.zerotop"]
        assert "1 shown" in start.text()
        await pilot.press("escape")
        assert len(start.names()) == 3
        assert not start.list.query_one(Input).display
        assert isinstance(start.list.model.chosen_item, ListedRecording)
        assert start.list.model.chosen_item.path.name == "z2-oom.zerotop"


async def test_order_is_kept_between_runs(recording_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    start = Start(settings=UserSettings(path))
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        while start.list.model.order != "slowest":
            await pilot.press("o")
        assert start.names() == ["story", "z2-oom.zerotop", "cpu-clean.zerotop"]
        await pilot.press("t")
    again = Start(settings=UserSettings(path))
    async with again.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(again, pilot)
        assert again.names() == ["story", "z2-oom.zerotop", "cpu-clean.zerotop"]
        assert again.app.theme == LIGHT_NAME


async def test_marked_ones_are_compared(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("c")
        await wait_until(pilot, lambda: any("Mark two" in notice for notice in start.notices()))
        await pilot.press("home", "down", "space", "c")
        await wait_until(pilot, lambda: isinstance(start.app.screen, CompareScreen))
        await wait_until(pilot, lambda: "LlamaForCausalLM" in start.text())
        assert "Qwen2ForCausalLM" in start.text()
        assert "parameter offload" in start.text()
        await pilot.press("d")
        await wait_until(pilot, lambda: "parameter offload" not in start.text())
        await pilot.press("end")
        await wait_until(pilot, lambda: "out of memory" in start.text())
        await pilot.press("y")
        assert start.app.clipboard.startswith("section\twhat\tstory\tz2-oom.zerotop\n")
        await pilot.press("question_mark")
        await wait_until(pilot, lambda: isinstance(start.app.screen, Page))
        await pilot.press("escape", "escape")
        await wait_until(pilot, lambda: isinstance(start.app.screen, StartScreen))
        await pilot.press("escape")
        assert start.list.model.marked_recordings == ()


async def test_the_iterations_of_two_that_are_compared_are_laid_over_one_another(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("home", "space", "c")
        await wait_until(pilot, lambda: isinstance(start.app.screen, CompareScreen))
        await pilot.press("v")
        await wait_until(pilot, lambda: isinstance(start.app.screen, IterationScreen))
        await wait_until(pilot, lambda: "story: 2.68 s, mean of 3" in start.text())
        await pilot.press("q")
        await wait_until(pilot, lambda: isinstance(start.app.screen, StartScreen))


async def test_export_writes_steps_here_and_says_where(recording_root: Path, tmp_path: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("e")
        path = tmp_path / "here" / "cpu-clean-steps.csv"
        await wait_until(pilot, lambda: any(str(path) in notice for notice in start.notices()))
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 2 * 40
    assert lines[0].startswith("rank,step")


async def test_sweeps_are_listed_with_their_answers_and_opened(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("w")
        await wait_until(pilot, lambda: any("No sweeps yet" in notice for notice in start.notices()))
        for name in ("fit", "lengths"):
            shutil.copytree(SWEEPS / name, recording_root.with_name("sweeps") / name)
        await pilot.press("w")
        await wait_until(pilot, lambda: "Largest seq-length that fits: 4,608" in start.text())
        assert start.text().index("lengths  16 of 16 points") < start.text().index("fit  9 of 9 points")
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: is_shown(start, "sweep") and "out of memory" in start.text())
        await pilot.press("home", *["down"] * 5, "enter")
        await wait_until(pilot, lambda: isinstance(start.app.screen, MonitorScreen))
        await pilot.press("q")
        await wait_until(pilot, lambda: is_shown(start, "sweep"))
        await pilot.press("escape")
        await wait_until(pilot, lambda: is_shown(start, "start"))
        await pilot.press("w")
        await wait_until(pilot, lambda: "fit  9 of 9 points" in start.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: is_shown(start, "start"))


async def test_packing_writes_a_file_here_once(recording_root: Path, tmp_path: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("down", "p")
        path = tmp_path / "here" / "story.zerotop"
        await wait_until(pilot, lambda: any(str(path) in notice for notice in start.notices()))
        before = path.read_bytes()
        await pilot.press("p")
        await wait_until(pilot, lambda: any("already exists" in notice for notice in start.notices()))
        assert path.read_bytes() == before
        await pilot.press("up", "p")
        await wait_until(pilot, lambda: any("already packed" in notice for notice in start.notices()))


@pytest.mark.parametrize("keys", [["escape"], ["enter"], ["n"], ["c"], ["q"]])
async def test_nothing_is_deleted_without_a_yes(recording_root: Path, keys: list[str]) -> None:
    start = Start()
    async with start.app.run_test(size=(80, 24)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("d")
        await wait_until(pilot, lambda: isinstance(start.app.screen, DeleteDialog))
        assert f"frees {format_size(recordings.find_packed_file('cpu-clean').stat().st_size)}" in start.text()
        await pilot.press(*keys)
        await wait_until(pilot, lambda: isinstance(start.app.screen, StartScreen))
        await pilot.pause()
    assert sorted(path.name for path in recording_root.iterdir()) == ["cpu-clean.zerotop", "story", "z2-oom.zerotop"]


@pytest.mark.parametrize("key", ["d", "y"])
async def test_a_recording_is_deleted_and_the_freed_space_is_reported(recording_root: Path, key: str) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("down", "d")
        await wait_until(pilot, lambda: isinstance(start.app.screen, DeleteDialog))
        await pilot.press(key)
        await wait_until(pilot, lambda: any("story deleted: 80" in notice for notice in start.notices()))
        await wait_until(pilot, lambda: start.names() == ["cpu-clean.zerotop", "z2-oom.zerotop"])
    assert not (recording_root / "story").exists()


async def test_a_live_one_and_files_elsewhere_are_never_deleted(recording_root: Path, tmp_path: Path) -> None:
    directory.create_recording(["python", "train.py"], path=str(recording_root / "now"), launcher="python")
    elsewhere = recordings.unpack_to_folder("z2", tmp_path)
    (recording_root / "a-link").symlink_to(elsewhere)
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("slash", *"now", "enter", "d")
        await wait_until(pilot, lambda: any("now is live" in notice for notice in start.notices()))
        await pilot.press("escape", "slash", *"a-link", "enter", "d")
        await wait_until(pilot, lambda: any("is a symbolic link" in notice for notice in start.notices()))
        await pilot.pause()
        assert isinstance(start.app.screen, StartScreen)
    assert (recording_root / "now" / "session.json").is_file()
    assert (elsewhere / "session.json").is_file()


async def test_a_recording_is_listed_soon_where_the_first_search_waited_long(recording_root: Path) -> None:
    """On a busy machine a search takes seconds: what it waited for was no work, after which it would rest."""

    def find_slowly() -> Sequence[FoundJob]:
        time.sleep(2)
        return []

    start = Start(job_finder=find_slowly)
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        directory.create_recording(["python", "train.py"], path=str(recording_root / "fresh"), launcher="python")
        begin_s = time.monotonic()
        await wait_until(pilot, lambda: "4 recordings" in start.text())
        assert time.monotonic() - begin_s < 20


async def test_a_recording_that_appears_is_listed(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.press("down")
        folder = directory.create_recording(["python", "train.py"], path=str(recording_root / "fresh"), launcher="python")
        writer = EventWriter(folder, Identity.for_this_process("node"))

        def is_live() -> bool:
            writer.write(time.monotonic_ns(), Node)  # a recording that is silent for seconds is not live
            return "● live" in start.text()

        await wait_until(pilot, is_live)
        assert "4 recordings, 1 live" in start.text()
        assert isinstance(start.list.model.chosen_item, ListedRecording)
        assert start.list.model.chosen_item.path.name == "story"


async def test_a_damaged_one_is_a_row_and_opens_as_a_sentence(recording_root: Path) -> None:
    (recording_root / "broken").mkdir()
    (recording_root / "broken" / "session.json").write_text("{")
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        assert "damaged" in start.text()
        assert "damaged     session.json is damaged" in start.text()  # the path is below the list
        await pilot.press("slash", *"broken", "enter", "enter")
        await wait_until(pilot, lambda: any("is damaged" in notice for notice in start.notices()))
        assert isinstance(start.app.screen, StartScreen)


async def test_nothing_recorded_yet_says_how_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nowhere"))
    start = Start()
    async with start.app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "zerotop run -- COMMAND" in start.text())
        await pilot.press("enter", "space", "c", "e", "p", "d", "o", "down", "end", "pageup")
        await pilot.pause()
        assert isinstance(start.app.screen, StartScreen)
        await pilot.press("question_mark")
        await wait_until(pilot, lambda: "Keys" in start.text())


@pytest.mark.parametrize("size", [(20, 4), (40, 12), (80, 24), (120, 40), (300, 90)], ids=str)
async def test_any_size_will_do(recording_root: Path, size: tuple[int, int]) -> None:
    start = Start(glyphs=ASCII)
    async with start.app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: len(start.names()) == 3)
        await wait_for_overviews(start, pilot)
        newest = ["cpu-clean.zerotop", "story", "z2-oom.zerotop"]
        await wait_until(pilot, lambda: start.names() == newest)
        await pilot.press("home", "down", "space", "down", "c")
        await wait_until(pilot, lambda: isinstance(start.app.screen, CompareScreen))
        await pilot.pause()
        assert len(start.text().splitlines()) == size[1]
        assert start.text().isascii()


async def test_the_mouse_chooses_opens_and_presses_keys(recording_root: Path) -> None:
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_for_list(start, pilot)
        await pilot.click("#sheet", offset=(10, 4))
        assert start.list.model.cursor_row == 2
        column = start.text().splitlines()[-1].index("o order")
        await pilot.click("#sheet", offset=(column, 39))
        await wait_until(pilot, lambda: start.list.model.order == "by state")
        await pilot.click("#sheet", offset=(10, 2), times=2)
        await wait_until(pilot, lambda: isinstance(start.app.screen, LiveScreen))


async def test_keys_answer_while_many_are_read(recording_root: Path) -> None:
    for number in range(100):
        shutil.copy(recordings.find_packed_file("z2"), recording_root / f"copy-{number}.zerotop")
    start = Start()
    async with start.app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: start.list.model.rows)
        slowest = 0.0
        for _ in range(10):
            begin = time.monotonic()
            await pilot.press("down")
            slowest = max(slowest, time.monotonic() - begin)
            await asyncio.sleep(0.02)
        await wait_until(pilot, lambda: len(start.list.model.rows) > 1)  # on a busy machine few are known at first
        await pilot.press("down")
        assert start.list.model.cursor_row > 0
        await wait_until(pilot, lambda: "103 recordings" in start.text())
        assert slowest < 1.0


def test_a_selection_is_cleared_before_any_screen_is_there() -> None:
    """As the list's field asks from Python 3.12 on, where a task begins at once."""
    Start().app.clear_selection()
