"""What the mouse does: clicks on findings, steps and ranks, and values under the pointer."""

from __future__ import annotations

import re

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget

from recordings import open_recording
from waiting import wait_until
from zerotop import demo
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.bars.footer import find_track_cell, measure_track
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.base.panels import Notices, Transport
from zerotop.ui.base.pointed_panel import PointedPanel
from zerotop.ui.charts import AXIS_WIDTH
from zerotop.ui.dialogs.findings_dialog import FindingsDialog
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.iteration.panels import WaveformPanel
from zerotop.ui.iteration.screen import IterationScreen
from zerotop.ui.live.panels import Gpus, Iteration, Memory, Ranks
from zerotop.ui.memory.screen import MemoryBars, TraceCurve
from zerotop.ui.ranks.screen import RankMap
from zerotop.ui.threads.screen import ThreadList
from zerotop.ui.timeline.drawing import chart_begin
from zerotop.ui.timeline.labels import format_moment
from zerotop.ui.timeline.picture import Picture
from zerotop.ui.timeline.screen import TimelineLanes

SIZE = (120, 40)


def make_app() -> ZerotopApp:
    return ZerotopApp(RecordingSource(Recording.open(demo.RECORDING_PATH)), glyphs=BLOCKS, title="story")


async def show_step(app: ZerotopApp, pilot: Pilot[Leaving], screen: str, step: int) -> None:
    await wait_until(pilot, lambda: len(app.viewer.source.findings_at(None)) >= 4)
    app.action_switch(screen)
    app.viewer.go_to_step(step)
    app.draw_frame()
    await wait_until(pilot, lambda: is_shown(app) and not app.is_busy)


def is_shown(app: ZerotopApp) -> bool:
    """Whether the screen shows the moment of the cursor."""
    frame = app.shown_screen.frame
    return frame is not None and frame.view.cursor_ns == app.viewer.compute_cursor()


async def show_timeline(app: ZerotopApp, pilot: Pilot[Leaving], step: int) -> tuple[TimelineLanes, Picture]:
    """Show it, and return its panel and what it shows."""
    await show_step(app, pilot, "timeline", step)
    lanes = app.screen.query_one(TimelineLanes)

    def is_complete() -> bool:
        picture = lanes.pictures.last_picture
        is_there = picture is not None and picture.cursor == app.viewer.compute_cursor() - app.viewer.source.begin_ns
        return is_there and picture is not None and picture.timeline.is_complete and not app.is_busy

    await wait_until(pilot, is_complete)
    assert lanes.pictures.last_picture is not None
    return lanes, lanes.pictures.last_picture


async def test_the_banner_opens_the_list_at_its_finding() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await show_step(app, pilot, "live", 12)
        headline = app.viewer.make_frame().headline
        assert headline is not None
        await pilot.click(app.screen.query_one(Notices), offset=(20, 0))
        await wait_until(pilot, lambda: isinstance(app.screen, FindingsDialog))
        assert isinstance(app.screen, FindingsDialog)
        assert app.screen.all_findings[app.screen.current_index].finding == headline


async def test_a_mark_on_the_seek_bar_goes_to_its_finding() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await show_step(app, pilot, "live", 2)
        frame = app.viewer.make_frame()
        finding = frame.all_findings[0]
        bar = app.screen.query_one(Transport)
        begin, length = measure_track(bar.size.width, frame.moment)
        since_s = (finding.detected_ns - app.viewer.source.begin_ns) / 1e9
        await pilot.click(bar, offset=(begin + find_track_cell(since_s, frame.moment, length), 0))
        await wait_until(
            pilot, lambda: (shown := app.viewer.make_frame().headline) is not None and shown.event == finding.event
        )
        assert app.viewer.compute_cursor() == finding.detected_ns


async def test_a_mark_on_the_timeline_goes_to_its_finding() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        lanes, picture = await show_timeline(app, pilot, 12)
        mark = next(mark for mark in picture.marks if 0 <= picture.find_cell(mark.at_ns) < picture.cell_count)
        for _ in range(20):  # the window may still move while the first pictures come
            cell = (lanes.pictures.last_picture or picture).find_cell(mark.at_ns)
            await pilot.click(lanes, offset=(chart_begin(lanes.size.width) + cell, 0))
            await pilot.pause()
            if app.viewer.compute_cursor() == mark.finding.detected_ns:
                break
        assert app.viewer.compute_cursor() == mark.finding.detected_ns
        assert app.viewer.make_frame().headline == mark.finding


async def test_the_timeline_shows_values_under_the_mouse() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        lanes, picture = await show_timeline(app, pilot, 12)
        assert picture.pointed == picture.cursor
        await pilot.hover(lanes, offset=(chart_begin(lanes.size.width) + 5, 8))
        await wait_until(pilot, lambda: lanes.pictures.last_picture.pointed != picture.cursor)  # type: ignore[union-attr]
        pointed = lanes.pictures.last_picture
        assert pointed is not None
        assert picture.begin <= pointed.pointed < picture.cursor == pointed.cursor
        moment = format_moment(pointed.pointed, pointed.cell_ns)
        await wait_until(pilot, lambda: any(row.startswith(moment) for row in lanes.plain_text().split("\n")))
        await pilot.hover("#header")
        await wait_until(pilot, lambda: lanes.pictures.last_picture.pointed == picture.cursor)  # type: ignore[union-attr]


async def test_a_column_of_live_shows_its_step_and_goes_to_its_end() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await show_step(app, pilot, "live", 12)
        chart = app.screen.query_one(Iteration)
        await wait_until(pilot, lambda: "step 12" in chart.plain_text())
        await pilot.hover(chart, offset=(AXIS_WIDTH, 5))
        await wait_until(pilot, lambda: "step 0 " in chart.plain_text())
        await pilot.click(chart, offset=(AXIS_WIDTH, 5))
        await wait_until(pilot, lambda: app.viewer.make_frame().view.progress.step == 0)


@pytest.mark.parametrize("size", [SIZE, (200, 50)])
async def test_a_rank_of_live_is_chosen(size: tuple[int, int]) -> None:
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await show_step(app, pilot, "live", 12)
        panel = app.screen.query_one(Ranks)
        await wait_until(pilot, lambda: "rank 2" in panel.plain_text())
        row = next(y for y, line in enumerate(panel.plain_text().split("\n")) if line.startswith("rank 2"))
        await pilot.click(panel, offset=(3, row))
        await wait_until(pilot, lambda: app.viewer.make_frame().rank == 2)


@pytest.mark.parametrize("size", [SIZE, (200, 50)])
async def test_a_row_of_a_gpu_chooses_its_rank(size: tuple[int, int]) -> None:
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await show_step(app, pilot, "live", 12)
        for panel, rank in ((app.screen.query_one(Gpus), 2), (app.screen.query_one(Memory), 3)):
            await wait_until(pilot, lambda panel=panel: "GPU 3" in panel.plain_text())  # type: ignore[misc]
            rows = panel.plain_text().split("\n")
            await pilot.click(panel, offset=(3, next(y for y, row in enumerate(rows) if row.startswith(f"GPU {rank}"))))
            await wait_until(pilot, lambda rank=rank: app.viewer.make_frame().rank == rank)  # type: ignore[misc]


# Screen, panel, cell of the panel, pattern of what stands in its title then.
POINTED = [
    ("live", Memory, (40, 9), r"\d+ s ago: allocated .* GiB, reserved .*used"),
    ("live", Ranks, (22, 2), r"rank 1, \d+ s ago: \d+\.\d cores, \w+"),
    ("live", Gpus, (12, 3), r"GPU 2, \d+ s ago: \d+ %"),
    ("ranks", RankMap, (40, 4), r"rank \d, step \d+: \d\.\d\d s"),
    ("threads", ThreadList, (60, 14), r"\d:\d\d: \d+\.\d cores used, \d+\.\d runnable"),
    ("threads", ThreadList, (70, 26), r"\d:\d\d: \S.* \d+\.\d cores"),
    ("memory", MemoryBars, (8, 8), r"GPU 0: 40\.\d GiB of 140 GiB"),
]


@pytest.mark.parametrize(("screen", "kind", "cell", "pattern"), POINTED)
async def test_charts_show_values_under_the_mouse(
    screen: str, kind: type[PointedPanel], cell: tuple[int, int], pattern: str
) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await show_step(app, pilot, screen, 12)
        panel = app.screen.query_one(kind)
        await wait_until(pilot, lambda: bool(panel.plain_text()) and not app.is_busy)
        assert re.search(pattern, panel.plain_text().split("\n")[0]) is None
        # A panel that still moves loses the mouse, which a hand would move again.
        for _ in range(100):
            await pilot.hover(panel, offset=cell)
            await pilot.pause(0.05)
            if re.search(pattern, panel.plain_text().split("\n")[0]) is not None:
                break
            await pilot.hover("#header")
        assert re.search(pattern, panel.plain_text().split("\n")[0]) is not None
        await pilot.hover("#header")
        await wait_until(pilot, lambda: re.search(pattern, panel.plain_text().split("\n")[0]) is None)


async def test_the_microscope_s_curve_shows_values_under_the_mouse() -> None:
    app = ZerotopApp(RecordingSource(open_recording("gpu-microscope")), glyphs=BLOCKS, title="microscope")
    async with app.run_test(size=SIZE) as pilot:
        app.action_switch("memory")
        app.viewer.go_to_step(40)
        await wait_until(pilot, lambda: bool(app.screen.query(TraceCurve)) and is_shown(app) and not app.is_busy)
        curve = app.screen.query_one(TraceCurve)
        await wait_until(pilot, lambda: "rank 0" in curve.plain_text())
        await pilot.hover(curve, offset=(20, 4))
        await wait_until(pilot, lambda: re.search(r"ms: [\d.]+ GiB in \w+", curve.plain_text().split("\n")[0]) is not None)


async def test_a_click_shows_the_threads_of_a_name() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await show_step(app, pilot, "threads", 12)
        panel = app.screen.query_one(ThreadList)
        await wait_until(pilot, lambda: BLOCKS.closed in panel.plain_text())
        closed = [row for row in panel.plain_text().split("\n") if BLOCKS.closed in row]
        at = panel.plain_text().split("\n").index(closed[-1])
        await pilot.click(panel, offset=(3, at))
        await wait_until(pilot, lambda: any(BLOCKS.opened in row for row in panel.plain_text().split("\n")))


async def test_the_iteration_shows_values_under_the_mouse() -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await show_step(app, pilot, "iteration", 12)
        waves = app.screen.query_one(WaveformPanel)
        await wait_until(pilot, lambda: "mean of" in waves.plain_text())
        await pilot.hover(waves, offset=(60, 10))
        await wait_until(pilot, lambda: any(line.startswith("at ") for line in waves.plain_text().split("\n")))
        said = next(line for line in waves.plain_text().split("\n") if line.startswith("at "))
        assert all(words in said for words in (" in ", "GPU ", " %", "CPU ", "power ", " W"))
        await pilot.hover("#header")
        await wait_until(pilot, lambda: any(line.startswith("GPUs idle") for line in waves.plain_text().split("\n")))


async def test_the_wheel_averages_fewer_iterations() -> None:
    app = ZerotopApp(RecordingSource(open_recording("cpu-clean")), glyphs=BLOCKS, title="clean")
    async with app.run_test(size=SIZE) as pilot:
        app.action_switch("iteration")
        await wait_until(pilot, lambda: isinstance(app.screen, IterationScreen) and app.screen.query(WaveformPanel))
        waves = app.screen.query_one(WaveformPanel)
        await wait_until(pilot, lambda: "mean of" in waves.plain_text())
        before = waves.plain_text().split("\n")[0]
        waves.post_message(make_wheel_up(waves))
        await wait_until(pilot, lambda: waves.plain_text().split("\n")[0] != before)


def make_wheel_up(widget: Widget) -> events.MouseScrollUp:
    return events.MouseScrollUp(widget, 60, 10, 0, 0, 0, False, False, False)
