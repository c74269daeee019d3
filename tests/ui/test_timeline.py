"""The timeline in a terminal that is not there: its keys, its mouse, and what it shows while a recording grows."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import time_ns

import pytest
from textual.events import MouseScrollDown, MouseScrollLeft, MouseScrollRight, MouseScrollUp
from textual.pilot import Pilot

from printing import Printing
from recordings import open_recording
from screens import read_rows
from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from story_app import Watch
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.drawing.glyphs import BLOCKS, Glyphs
from zerotop.ui.timeline.drawing import chart_begin
from zerotop.ui.timeline.picture import Picture
from zerotop.ui.timeline.screen import TimelineLanes, TimelineScreen
from zerotop_probe.recording.tables import BEGINS, BOUNDARY, PHASE_CODE, PROCESSES, SPANS


class Looking:
    """An app that shows the timeline of a recording."""

    def __init__(self, recording: Recording, pilot: Pilot[Leaving], app: ZerotopApp) -> None:
        self.recording, self.pilot, self.app = recording, pilot, app

    @property
    def screen(self) -> TimelineScreen:
        assert isinstance(self.app.screen, TimelineScreen)
        return self.app.screen

    @property
    def lanes(self) -> TimelineLanes:
        return self.screen.query_one(TimelineLanes)

    @property
    def picture(self) -> Picture:
        picture = self.screen.query_one(TimelineLanes).pictures.last_picture
        assert picture is not None
        return picture

    @property
    def length(self) -> int:
        """Nanoseconds that are seen."""
        return self.picture.cell_count * self.picture.cell_ns

    async def press_keys(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    def read_text(self) -> str:
        return "\n".join(read_rows(self.app))

    def column(self, cell: int) -> tuple[int, int]:
        """Where in the lanes a cell of the charts is."""
        return chart_begin(self.lanes.size.width) + cell, 4


@asynccontextmanager
async def open_timeline(
    recording: Recording, size: tuple[int, int] = (120, 40), glyphs: Glyphs = BLOCKS
) -> AsyncIterator[Looking]:
    app = ZerotopApp(RecordingSource(recording), None, title="test", glyphs=glyphs)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await app.run_action("switch('timeline')")
        app.draw_frame()
        await pilot.pause()
        yield Looking(recording, pilot, app)


async def test_the_timeline_names_all_its_lanes() -> None:
    async with open_timeline(open_recording("story")) as seen:
        text = seen.read_text()
        for words in (
            "rank 0",
            "GPU 0 %",
            "■cores",
            "■allocated GiB",
            "■reserved",
            "PCIe D2H GB/s",
            "iteration s",
            "power W",
        ):
            assert words in text


async def test_phases_are_shown_without_samples() -> None:
    async with open_timeline(open_recording("x2-slow-links")) as seen:
        text = seen.read_text()
        assert "rank 1" in text
        assert "iteration s" in text
        assert "Not recorded: GPU, CPU (no sampler)" in text


async def test_after_the_end_the_loss_is_that_of_the_last_step() -> None:
    """It is logged after the end of the step whose values the other lanes have."""
    async with open_timeline(open_recording("gpu-z3-all")) as seen:
        await seen.press_keys("end")
        assert re.search(r"loss +3\.33\b", seen.read_text())


async def test_a_loss_of_an_earlier_step_has_its_step() -> None:
    """Every 20 steps one is printed."""
    async with open_timeline(open_recording("jobs-savestate"), size=(80, 24)) as seen:
        await seen.press_keys("end")
        assert re.search(r"loss, step 279 +9\.71\b", seen.read_text())
        seen.app.action_switch("live")
        await seen.press_keys("end")
        assert "loss 9.709 at step 279" in seen.read_text()


async def test_allocated_is_that_at_the_cursor_as_on_other_screens() -> None:
    """Of the last 0.1 s of the step it is 16.2 GiB on average."""
    async with open_timeline(open_recording("x2-zero3")) as seen:
        await seen.press_keys("end")
        assert re.search(r"allocated GiB +8\.10\b", seen.read_text())


async def test_after_a_job_without_a_failure_no_step_is_in_progress() -> None:
    async with open_timeline(open_recording("story")) as seen:
        assert max(number for _, number in seen.picture.steps) == 13
    async with open_timeline(open_recording("z2-oom")) as seen:
        steps = seen.app.viewer.source.rank_steps[0].step_rows["step"]
        assert max(number for _, number in seen.picture.steps) == steps[-1] + 1  # in which it failed


async def test_zoom_keys() -> None:
    async with open_timeline(open_recording("story")) as seen:
        assert seen.picture.begin == 0, "a job that has ended is first seen whole"
        await seen.press_keys("w", "left", "left")
        before = seen.length
        await seen.press_keys("plus")
        assert 0.4 * before < seen.length < 0.6 * before
        await seen.press_keys("equals_sign")
        assert 0.2 * before < seen.length < 0.3 * before
        await seen.press_keys("minus", "minus")
        assert seen.length == pytest.approx(before, rel=0.15)
        await seen.press_keys("w")
        assert seen.picture.begin == 0
        assert seen.length > 75 * S
        await seen.press_keys("w")
        assert seen.length == before
        for _ in range(30):
            await seen.press_keys("plus")
        assert seen.picture.timeline.window.column_ns == 1000
        assert 0 <= seen.picture.find_cell(seen.picture.cursor) < seen.picture.cell_count


async def test_panning_keys_leave_the_cursor_where_it_is() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("w", "left")
        begin, cursor = seen.picture.begin, seen.picture.cursor
        for key, direction in (("h", -1), ("shift+left", -1), ("l", 1), ("shift+right", 1)):
            await seen.press_keys(key)
            assert (seen.picture.begin - begin) * direction > 0
            assert seen.picture.cursor == cursor
            begin = seen.picture.begin
        await seen.press_keys(*"hhhh", "f")
        assert seen.picture.find_cell(seen.picture.cursor) < seen.picture.cell_count
        assert not seen.screen.timeline_view.is_detached


async def test_time_keys_move_the_cursor_through_it() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("left", "left", "left")
        cursors = [seen.picture.cursor]
        for _ in range(6):
            await seen.press_keys("left")
            cursors.append(seen.picture.cursor)
            assert 0 <= seen.picture.find_cell(cursors[-1]) < seen.picture.cell_count
        assert cursors == sorted(cursors, reverse=True)
        await seen.press_keys("home")
        assert seen.picture.cursor == seen.picture.begin == 0
        await seen.press_keys("n")
        here = [mark for mark in seen.picture.marks if mark.at_ns == seen.picture.cursor]
        assert here
        assert "◆" in seen.read_text()


async def test_a_range_by_keys() -> None:
    async with open_timeline(open_recording("story"), (200, 50)) as seen:
        assert "no range" not in seen.read_text()
        await seen.press_keys(
            "left", "left", "left", "left_square_bracket", "right", "right", "right_square_bracket", "right"
        )
        assert seen.picture.selected_range is not None
        begin, end = seen.picture.selected_range
        assert seen.picture.summary is not None
        assert seen.picture.summary.steps == 2
        assert "]  2 steps" in seen.read_text()
        seen.app.draw_frame()
        await seen.pilot.pause()
        assert "esc no range" in seen.read_text()
        assert 4 * S < end - begin < 7 * S
        await seen.press_keys("escape")
        assert seen.picture.selected_range is None
        assert "2 steps" not in seen.read_text()


async def test_the_ranks_keys_choose_whose_lanes_are_shown() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("down")
        assert seen.picture.subject.rank == 1
        assert seen.picture.subject.gpu == (seen.picture.subject.host, 1)
        assert seen.picture.ranks[0] == 1
        await seen.press_keys("up")
        assert seen.picture.subject.rank == 0


async def test_a_click_moves_the_cursor() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("left", "left")
        window = seen.picture.timeline.window
        await seen.pilot.click(TimelineLanes, offset=seen.column(20))
        await seen.pilot.pause()
        assert seen.picture.find_cell(seen.picture.cursor) == 20
        assert seen.picture.timeline.window == window
        assert "PAUSED" in seen.read_text()
        # Beside the charts there is nothing to go to.
        await seen.pilot.click(TimelineLanes, offset=(3, 4))
        await seen.pilot.pause()
        assert seen.picture.find_cell(seen.picture.cursor) == 20


async def test_dragging_selects_a_range() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("left", "left")
        cursor = seen.picture.cursor
        await seen.pilot.mouse_down(TimelineLanes, offset=seen.column(30))
        await seen.pilot.hover(TimelineLanes, offset=seen.column(20))
        await seen.pilot.hover(TimelineLanes, offset=seen.column(12))
        await seen.pilot.mouse_up(TimelineLanes, offset=seen.column(12))
        await seen.pilot.pause()
        picture = seen.picture
        assert picture.selected_range == (picture.begin + 12 * picture.cell_ns, picture.begin + 31 * picture.cell_ns)
        assert picture.cursor == cursor
        # The button is up: the mouse only passes by.
        await seen.pilot.hover(TimelineLanes, offset=seen.column(60))
        await seen.pilot.pause()
        assert seen.picture.selected_range == picture.selected_range


async def test_the_wheel_zooms_where_the_mouse_is() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("left", "left")
        x, y = seen.column(25)
        for kind, longer in ((MouseScrollUp, False), (MouseScrollDown, True)):
            before, there = seen.length, seen.picture.begin + 25 * seen.picture.cell_ns
            seen.lanes.post_message(kind(seen.lanes, x, y, 0, 0, 0, False, False, False, x, y))
            await seen.pilot.pause()
            assert (seen.length > before) == longer
            assert abs(seen.picture.find_cell(there) - 25) <= 2


@pytest.mark.parametrize(
    ("kind", "shift", "direction"),
    [(MouseScrollLeft, False, -1), (MouseScrollRight, False, 1), (MouseScrollUp, True, -1), (MouseScrollDown, True, 1)],
)
async def test_the_wheel_pans_sideways(kind: type[MouseScrollUp], shift: bool, direction: int) -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("w", "left", "left", "h")
        begin, length = seen.picture.begin, seen.length
        seen.lanes.post_message(kind(seen.lanes, 50, 4, 0, 0, 0, shift, False, False, 50, 4))
        await seen.pilot.pause()
        assert (seen.picture.begin - begin) * direction > 0
        assert seen.length == length


async def test_window_and_range_stay_while_another_screen_is_shown() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("left", "plus", "plus", "left_square_bracket", "h", "left_square_bracket")
        window = seen.picture.timeline.window
        await seen.app.run_action("switch('live')")
        await seen.pilot.pause()
        await seen.app.run_action("switch('timeline')")
        await seen.pilot.pause()
        assert seen.picture.timeline.window == window
        assert seen.screen.timeline_view.has_range


async def test_the_numbers_of_a_range_can_be_copied() -> None:
    async with open_timeline(open_recording("story")) as seen:
        await seen.press_keys("left", "left", "y")
        heading, *rows = seen.app.clipboard.split("\n")
        assert heading.startswith("time_s\trank 0 phase\t")
        assert "utilization mean\tutilization highest" in heading
        assert "allocated_bytes highest" in heading
        assert len(rows) == seen.picture.timeline.window.columns
        assert {row.count("\t") for row in rows} == {heading.count("\t")}
        assert float(rows[0].split("\t")[0]) == pytest.approx(seen.picture.begin / S)
        assert any("\tcpu_optimizer\t" in row for row in rows)
        begin = seen.picture.begin + 20 * seen.picture.cell_ns
        seen.screen.timeline_view.select_range(begin, begin + 5 * seen.picture.cell_ns)
        seen.lanes.repaint()
        await seen.press_keys("y")
        assert len(seen.app.clipboard.split("\n")) == 11


async def test_help_explains_it() -> None:
    async with open_timeline(open_recording("story"), (120, 60)) as seen:
        await seen.press_keys("question_mark")
        text = seen.read_text()
        assert "Zoom in around the cursor" in text
        assert "Begin a range at the cursor" in text


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (300, 90)])
@pytest.mark.parametrize("name", ["story", "cpu-clean", "z2-oom"])
async def test_any_terminal(name: str, size: tuple[int, int]) -> None:
    async with open_timeline(open_recording(name), size) as seen:
        for key in ("left", "plus", "minus", "w", "h", "left_square_bracket", "n", "down", "right", "escape"):
            await seen.press_keys(key)
        assert seen.read_text()


async def test_a_recording_of_which_nothing_is_recorded_yet(tmp_path: Path) -> None:
    seen = Watch(Recording.open(Printing(tmp_path).path), None)
    async with seen.app.run_test(size=(80, 24)) as pilot:
        await seen.app.run_action("switch('timeline')")
        await pilot.pause()
        assert "Nothing recorded up to this time." in seen.text()
        for key in ("plus", "w", "h", "left_square_bracket", "right_square_bracket", "escape", "f"):
            await pilot.press(key)
        await pilot.click(TimelineLanes, offset=(60, 4))
        assert "Nothing recorded up to this time." in seen.text()


async def test_lanes_appear_and_move_while_a_job_runs(tmp_path: Path) -> None:
    begin_ns = time_ns() - 100 * S
    recording_folder = tmp_path
    spans, begins = (
        write_table(recording_folder, SPANS, make_identity(0)),
        write_table(recording_folder, BEGINS, make_identity(0)),
    )
    processes = write_table(recording_folder, PROCESSES, make_identity(-1))

    def go_on(step: int) -> None:
        at = float(step)
        begins.write(*make_record(BEGINS, time_ns=int(at * S), step=step, phase=PHASE_CODE["backward"]))
        spans.write(*make_span(at, at + 0.6, "backward", step))
        spans.write(*make_span(at + 0.6, at + 1, "step", step, BOUNDARY))
        for tick in range(10):
            cores = 8.0 if tick >= 6 else 1.0
            processes.write(*make_record(PROCESSES, time_ns=int((at + tick / 10) * S), rank=0, pid=100, cores_used=cores))

    async with open_timeline(read_recording(recording_folder, begin_ns=begin_ns), (80, 24)) as seen:
        assert "Not recorded" in seen.read_text()
        for step in range(40, 90):
            go_on(step)
        seen.app.viewer.source.refresh()
        seen.app.draw_frame()
        await seen.pilot.pause()
        assert "CPU cores" in seen.read_text()
        assert "backward" in seen.read_text()
        first = seen.picture.timeline.window.first
        for step in range(90, 99):
            go_on(step)
        seen.app.viewer.source.refresh()
        seen.app.draw_frame()
        await seen.pilot.pause()
        assert seen.picture.timeline.window.first >= first
        assert seen.picture.pointed_step == 99
    for writer in (spans, begins, processes):
        writer.close()
