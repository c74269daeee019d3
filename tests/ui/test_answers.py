"""Keys are answered while what they ask for is still being computed."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from fake_source import FakeSource, offload_story
from settling import until
from small_recording import read
from uneven_ranks import GIB, write_ranks
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.ranks.matrix import Metric
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app import monitor
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.theme import DARK_NAME, LIGHT_NAME
from zerotop.ui.ranks import model as ranking_module
from zerotop.ui.ranks.model import Ranking
from zerotop.ui.ranks.screen import RanksScreen
from zerotop.ui.widgets.frame_widget import FrameWidget


class Slow(FakeSource):
    """A source whose looks take until they are let through."""

    def __init__(self) -> None:
        super().__init__(offload_story(), lambda: 75.0)
        self.through = True
        self.pieces = 0

    def iter_view(self, cursor_ns: int | None) -> Generator[None, None, LiveView]:
        view = self.view_at(cursor_ns)
        while not self.through:
            self.pieces += 1
            yield
        return view


def text(app: ZerotopApp) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def test_time_moves_on_the_screen_before_what_was_then() -> None:
    source = Slow()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "LIVE" in text(app)
        source.through = False
        for key in ("comma", "comma"):  # which are not waited for: what they ask for does not come yet
            app.simulate_key(key)
        await until(pilot, lambda: "PAUSED −0:19" in text(app))
        assert " 15/616" in text(app)  # the step at the end, which was shown before
        source.through = True
        await until(pilot, lambda: " 15/616" not in text(app))
        assert "PAUSED −0:19" in text(app)


async def test_who_had_to_wait_for_a_look_is_answered_before_the_next_one_is_made() -> None:
    source = Slow()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        taken = []
        for _ in range(2):
            source.through, source.pieces = False, 0
            app.viewer.seek_seconds(-10)
            app.draw_frame()
            taken.append(source.pieces)
            await until(pilot, lambda: app._frame_cpu_s > 3 * monitor.AT_ONCE_S)
            await pilot.pause(0.05)
            source.through = True
            await until(pilot, lambda: app._frame_work is None)
        assert taken[0] > taken[1] == 1


async def test_another_screen_comes_with_the_frame_there_is() -> None:
    source = Slow()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        source.through = False
        for key in ("comma", "6"):
            app.simulate_key(key)
        await until(pilot, lambda: "Threads" in text(app) and " 15/616" in text(app))
        source.through = True
        await until(pilot, lambda: " 15/616" not in text(app))


async def test_a_screen_that_was_seen_is_there_at_once_and_then_becomes_what_it_is_now() -> None:
    source = Slow()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("6")
        await until(pilot, lambda: " 15/616" in text(app))
        await pilot.press("1")
        source.through = False
        for key in ("comma", "6"):
            app.simulate_key(key)
        await until(pilot, lambda: "PAUSED −0:10" in text(app) and " 15/616" in text(app))
        source.through = True
        await until(pilot, lambda: " 15/616" not in text(app))
        assert "PAUSED −0:10" in text(app)


async def test_screens_are_made_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SETTLED_S", 0.01)
    monkeypatch.setattr(monitor, "READY_S", 0.05)
    monkeypatch.setattr(monitor, "KEYED_S", 0.0)
    app = ZerotopApp(FakeSource(offload_story(), lambda: 75.0), title="ready", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: all(tab.name in app._screen_stacks for tab in TABS))
        assert app.screen.id == "live"
        assert "Iteration" in text(app)
        for number, tab in enumerate(TABS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            assert app.screen.id == tab.name
            assert all(panel.plain_text() for panel in app.screen.query(FrameWidget) if panel.display)


async def test_a_screen_that_was_seen_in_a_terminal_of_another_size_fills_that_of_now() -> None:
    app = ZerotopApp(FakeSource(offload_story(), lambda: 75.0), title="sizes", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("2")
        await pilot.resize_terminal(80, 24)
        await pilot.press("1")
        await pilot.pause()
        seen = text(app)
        assert [len(line) for line in seen.split("\n")] == [80] * 24
        assert "15/616" in seen
        assert "Live" in seen.split("\n")[-2]


def test_steps_are_counted_from_where_one_goes() -> None:
    source = Slow()
    viewer = Viewer(source, None, lambda: 0.0)
    assert viewer.make_frame().view.progress.step == 14
    source.through = False
    making = viewer.iter_frame()
    for number in (-1, -1, -1, 1):
        viewer.seek_steps(number)
        next(making)
    source.through = True
    assert viewer.make_frame().view.progress.step == 12
    viewer.seek_steps(1)
    assert viewer.make_frame().view.progress.step == 13


@pytest.mark.parametrize("metric", [Metric.PEAK, Metric.FREE, Metric.CORES])
def test_what_is_looked_up_in_pieces_is_the_same(metric: Metric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path, 70, 9, more_bytes={2: 4 * GIB})
    source = RecordingSource(read(tmp_path))
    frame = Viewer(source, None, lambda: 0.0).make_frame()
    at_once, piecewise = Ranking(source), Ranking(source)
    at_once.metric = piecewise.metric = metric
    monkeypatch.setattr(ranking_module, "_AT_ONCE_S", 10.0)
    expected = at_once.make_picture(frame)
    assert not at_once.is_busy
    monkeypatch.setattr(ranking_module, "_AT_ONCE_S", 0.0)
    first = piecewise.make_picture(frame)
    assert piecewise.is_busy
    assert first.metric is metric
    assert np.isnan(first.values).all()
    while piecewise.is_busy:
        piecewise.continue_work(1e-9)
    found = piecewise.make_picture(frame)
    assert np.array_equal(found.values, expected.values, equal_nan=True)
    assert found.order.tolist() == expected.order.tolist()
    assert piecewise.make_picture(frame) is found


async def test_a_metric_is_named_before_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path, 70, 9)
    monkeypatch.setattr(ranking_module, "_AT_ONCE_S", 0.0)
    app = ZerotopApp(RecordingSource(read(tmp_path)), title="ranks", glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("5", "m", "m")
        screen = app.screen
        assert isinstance(screen, RanksScreen)
        assert "Ranks: " in text(app)
        assert screen.ranking.metric is Metric.PEAK
        assert screen.frame is not None
        assert screen.ranking.make_picture(screen.frame).metric is Metric.PEAK
        await until(pilot, lambda: not screen.ranking.is_busy)
        assert not np.isnan(screen.ranking.make_picture(screen.frame).values).all()


async def test_a_screen_that_comes_back_is_painted_in_the_theme_of_now() -> None:
    def painted(app: ZerotopApp) -> list[list[tuple[str, str]]]:
        strips = app.screen._compositor.render_strips()
        return [[(segment.text, str(segment.style)) for segment in strip] for strip in strips]

    seen = []
    for theme in (DARK_NAME, LIGHT_NAME):
        app = ZerotopApp(FakeSource(offload_story(), lambda: 75.0), title="themes", glyphs=BLOCKS, clock=lambda: 0.0)
        async with app.run_test(size=(120, 40)) as pilot:
            app.theme = theme
            await pilot.pause()
            seen.append(painted(app))
            await pilot.press("2")
            app.theme = LIGHT_NAME
            await pilot.press("1")
            await pilot.pause()
            seen.append(painted(app))
    assert seen[0] != seen[1]
    assert seen[1] == seen[2] == seen[3]
