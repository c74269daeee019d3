"""Every key of every screen does something that is seen, or says why it does not. A new one fails here until it is tried."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from textual.binding import Binding
from textual.dom import DOMNode
from textual.pilot import Pilot
from textual.widgets import Input

import zerotop.ui
from recordings import open_recording
from start_list import Start, filled_folder, wait_for_list
from waiting import wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.monitor import Monitor
from zerotop.ui.app.start_app import ListApp
from zerotop.ui.base.base_screen import MonitorScreen
from zerotop.ui.base.frame_widget import RowWidget
from zerotop.ui.base.tabs import TABS, load_screen_class
from zerotop.ui.compare.screen import CompareScreen
from zerotop.ui.dialogs.dialog import Dialog, Page
from zerotop.ui.dialogs.findings_dialog import FindingsDialog
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.iteration.screen import IterationScreen
from zerotop.ui.output.screen import OutputScreen
from zerotop.ui.ranks.screen import RanksScreen
from zerotop.ui.start.screen import StartScreen

COMPARING = ("space", "down", "space", "c")
# Keys that are pressed before, so that there is something to do: by a binding's id.
FIRST: dict[str, tuple[str, ...]] = {
    "screen.unzoom": ("z",),
    "time.end": ("left",),
    "app.screen.1": ("2",),
    "app.copy": ("tab",),
    "page.close": ("i",),
    "feed.close": ("a",),
    "feed.search": ("a",),
    "feed.order": ("a",),
    "feed.back": ("a",),
    "dialog.close": ("g",),
    "live.output.down": ("up", "up"),
    "live.output.pagedown": ("pageup",),
    "timeline.out": ("plus",),
    "timeline.earlier": ("plus",),
    "timeline.later": ("plus", "h"),
    "timeline.end": ("left_square_bracket", "right_square_bracket", "right"),
    "timeline.back": ("left_square_bracket",),
    "timeline.up": ("down",),
    "iteration.more": ("end", "plus"),
    "iteration.fewer": ("end",),
    "iteration.rank.before": ("down",),
    "memory.rank.before": ("down",),
    "ranks.up": ("down",),
    "threads.up": ("down",),
    "threads.pageup": ("pagedown",),
    "threads.pagedown": ("pageup",),
    "output.down": ("up",),
    "output.pagedown": ("pageup",),
    "output.next": ("slash", *"loss", "enter"),
    "output.before": ("slash", *"loss", "enter"),
    "output.back": ("slash", *"loss", "enter"),
    "start.up": ("down",),
    "start.pageup": ("pagedown",),
    "start.first": ("pagedown",),
    "start.all": ("slash", *"story", "enter"),
    "start.compare": COMPARING[:-1],
    "app.back": ("enter",),
    **dict.fromkeys(("compare.close", "compare.differing", "compare.down", "compare.pagedown", "compare.last"), COMPARING),
    **dict.fromkeys(("compare.up", "compare.pageup", "compare.first"), (*COMPARING, "end")),
}
# Those that need a job, several recordings or a yes, and the tests that press them.
ELSEWHERE: dict[str, str] = {
    "demo.story": "test_demo_app::test_the_story_is_one_key_away",
    "job.sampler": "test_app::test_a_dead_sampler_is_reported_and_started_again",
    "job.enter": "test_app::test_ranks_attached_to_from_outside_are_entered",
    "memory.look": "test_memory_screen::test_x_asks_for_a_look_and_its_result_is_drawn_when_it_arrives",
    "ranks.stacks": "test_stacks::test_the_stacks_are_hidden_and_shown",
    **dict.fromkeys(("ranks.nodes", "ranks.back"), "test_ranks::test_a_node_is_opened_closed_and_found"),
    "app.leave": "test_app::test_every_way_out_asks",
    "app.leave.always": "test_app::test_every_way_out_asks",
    "leave.detach": "test_app::test_the_leave_dialog_detaches",
    "leave.again": "test_app::test_the_leave_dialog_detaches",
    "leave.cancel": "test_app::test_the_leave_dialog_can_be_cancelled",
    "leave.stop": "test_app::test_stop_shows_its_progress_then_forces_then_ends",
    "delete.yes": "test_start::test_a_recording_is_deleted_and_the_freed_space_is_reported",
    "delete.no": "test_start::test_nothing_is_deleted_without_a_yes",
    "compare.overlay": "test_start::test_the_iterations_of_two_that_are_compared_are_laid_over_one_another",
    "sweep.open": "test_sweep::test_a_point_without_a_recording_is_reported",
    "stop.yes": "test_sweep::test_leaving_asks_while_the_sweep_runs",
    "stop.no": "test_sweep::test_leaving_asks_while_the_sweep_runs",
    "sweep.follow": "test_sweep::test_leaving_an_ended_sweep_asks_nothing",
    **dict.fromkeys(
        (f"sweep.{move}" for move in ("up", "down", "pageup", "pagedown", "first", "last")),
        "test_sweep::test_keys_move_the_cursor",
    ),
    **dict.fromkeys(
        (f"what_if.{key}" for key in ("close", "up", "down", "less", "more", "reset", "copy")),
        "test_what_if_dialog::test_every_key_moves_the_ledger",
    ),
    "beside.down": "test_iteration_screen::test_another_recordings_iteration_is_chosen_from_a_list",
    "beside.up": "test_iteration_screen::test_another_recordings_iteration_is_chosen_from_a_list",
}


def find_key_owners() -> Iterator[type[DOMNode]]:
    """All that declare keys."""
    for module in pkgutil.walk_packages(zerotop.ui.__path__, "zerotop.ui."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, DOMNode) and kind.__module__ == module.name:
                yield kind


def find_own_bindings(kind: type[DOMNode]) -> list[Binding]:
    """A class's own."""
    return [binding for binding in vars(kind).get("BINDINGS", ()) if isinstance(binding, Binding)]


# Where keys are tried: a screen of the monitor, with those that are the same everywhere on the first one.
EVERYWHERE = (MonitorScreen, Monitor, Page, FindingsDialog, Dialog)
ON_SCREENS = [
    pytest.param(tab.name, (load_screen_class(tab.name), *(EVERYWHERE if tab is TABS[0] else ())), id=tab.name)
    for tab in TABS
]
ON_LISTS = (StartScreen, CompareScreen, ListApp)


def test_each_key_is_pressed_somewhere() -> None:
    here = {binding.id for param in ON_SCREENS for kind in cast(Any, param.values[1]) for binding in find_own_bindings(kind)}
    here |= {binding.id for kind in ON_LISTS for binding in find_own_bindings(kind)}
    found = {binding.id: binding for kind in find_key_owners() for binding in find_own_bindings(kind)}
    assert None not in found
    assert set(ELSEWHERE) - set(found) == set()
    assert set(FIRST) - here == set()
    for id in set(found) - here:
        assert id in ELSEWHERE, f"no test presses {found[id].key} ({id})"


class Seen:
    """What somebody sees of an app, and hears of it."""

    def __init__(self, app: ZerotopApp, pilot: Pilot[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.app, self.pilot = app, pilot
        self.told: list[str] = []
        monkeypatch.setattr(app, "notify", lambda message, **_: self.told.append(message))

    def read_everything(self) -> object:
        """Without how often it is drawn, which the tabs say."""
        screen = self.app.screen
        shown = {
            panel.id: (panel.region, panel._rows)
            for panel in screen.query(RowWidget)
            if panel.display and panel.id != "tabs"
        }
        fields = [field.value for field in screen.query(Input) if field.display]
        titles = [box.border_title for box in screen.query("#box")]
        return type(screen), shown, fields, titles, screen.focused, self.app.theme, len(self.told), self.app.is_running

    async def wait_until_settled(self) -> None:
        await self.pilot.pause()
        screen = self.app.screen
        if isinstance(screen, IterationScreen):
            await wait_until(self.pilot, lambda: not screen.folding.is_busy)
        if isinstance(screen, RanksScreen):
            await wait_until(self.pilot, lambda: not screen.ranking.is_busy)
        if isinstance(screen, OutputScreen):
            await wait_until(self.pilot, lambda: not screen.reading.is_busy)
        if isinstance(screen, StartScreen):
            await wait_until(self.pilot, lambda: not screen._sheet.busy_text)
        if isinstance(screen, MonitorScreen):
            self.app.draw_frame()
        await self.pilot.pause()

    async def try_key(self, key: str, id: str) -> None:
        """Presses it, and waits for something to be different."""
        for before in FIRST.get(id, ()):
            await self.pilot.press(before)
            await self.wait_until_settled()
        unpressed = self.read_everything()
        await self.pilot.press(key)
        await wait_until(self.pilot, lambda: self.read_everything() != unpressed, f"{key} ({id}) changes nothing")


@pytest.mark.parametrize(("name", "kinds"), ON_SCREENS)
async def test_each_key_of_a_screen(
    name: str, kinds: tuple[type[DOMNode], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    app = ZerotopApp(RecordingSource(open_recording("story")), glyphs=BLOCKS, title="story", clock=lambda: 1000.0)
    async with app.run_test(size=(120, 40)) as pilot:
        seen = Seen(app, pilot, monkeypatch)
        await wait_until(pilot, lambda: len(app.viewer.source.findings_at(None)) == 6)
        for binding in [binding for kind in kinds for binding in find_own_bindings(kind) if binding.id not in ELSEWHERE]:
            for key in binding.key.split(","):
                while not isinstance(app.screen, MonitorScreen):
                    await pilot.press("escape")
                app.action_switch(name)
                await pilot.pause()
                await pilot.press("escape")
                app.viewer.go_to_step(12)
                await seen.wait_until_settled()
                await seen.try_key(key, binding.id or "")


async def test_each_key_of_the_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled_folder(tmp_path, monkeypatch)
    start = Start()
    async with start.app.run_test(size=(100, 14)) as pilot:
        await wait_for_list(start, pilot)
        seen = Seen(start.app, pilot, monkeypatch)
        for binding in [binding for kind in ON_LISTS for binding in find_own_bindings(kind) if binding.id not in ELSEWHERE]:
            for key in binding.key.split(","):
                await seen.wait_until_settled()
                while not isinstance(start.app.screen, StartScreen):
                    await pilot.press("escape")
                    await pilot.pause()
                await pilot.press("escape", "home")
                await seen.wait_until_settled()
                await seen.try_key(key, binding.id or "")
