"""Keys are answered while what they ask for is still being computed."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from played_source import PlayedSource
from screens import read_rows, resize
from small_recording import read_recording
from uneven_ranks import GIB, write_ranks
from waiting import PATIENCE_S, wait_until
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.ranks.matrix import Matrix, RankMatrix, RankMetric
from zerotop.analysis.ranks.samples import RankSamples
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app import monitor
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.monitor import freeze_garbage
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.base.frame_widget import FrameWidget
from zerotop.ui.base.tabs import TABS
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.drawing.theme import DARK_NAME, LIGHT_NAME
from zerotop.ui.ranks import model as ranking_module
from zerotop.ui.ranks.model import Ranking
from zerotop.ui.ranks.screen import RanksScreen


class SlowSource(PlayedSource):
    """A source whose views take until the gate is opened."""

    def __init__(self) -> None:
        super().__init__("story", lambda: 65.0)
        self.gate = threading.Event()
        self.gate.set()

    def view_at(self, cursor_ns: int | None) -> LiveView:
        view = super().view_at(cursor_ns)
        assert self.gate.wait(PATIENCE_S)
        return view


def read_screen(app: ZerotopApp) -> str:
    return "\n".join(read_rows(app))


async def wait_while_busy(is_true: Callable[[], object]) -> None:
    """Wait while the worker is still busy, which a pause of the pilot would wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_time_moves_on_the_screen_before_what_was_then() -> None:
    source = SlowSource()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "LIVE" in read_screen(app)
        source.gate.clear()
        for key in ("comma", "comma"):
            app.simulate_key(key)
        await wait_while_busy(lambda: "PAUSED −0:20" in read_screen(app))
        assert " 13/14" in read_screen(app)  # the step at the end, which was shown before
        source.gate.set()
        await pilot.pause()
        assert " 13/14" not in read_screen(app)
        assert "PAUSED −0:20" in read_screen(app)


async def test_the_newest_request_is_answered_and_those_before_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "FRAME_S", 60.0)
    source = SlowSource()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        source.gate.clear()
        views = source.views
        app.draw_frame()
        await wait_while_busy(lambda: source.views == views + 1)
        for _ in range(5):
            app.viewer.seek_seconds(-10)
            app.draw_frame()
        source.gate.set()
        await pilot.pause()
        assert source.views == views + 2
        assert "PAUSED −0:50" in read_screen(app)


async def test_another_screen_comes_with_the_frame_there_is() -> None:
    source = SlowSource()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        source.gate.clear()
        for key in ("comma", "6"):
            app.simulate_key(key)
        await wait_while_busy(lambda: "Threads" in read_screen(app) and " 13/14" in read_screen(app))
        source.gate.set()
        await pilot.pause()
        assert " 13/14" not in read_screen(app)


async def test_a_screen_that_was_seen_is_there_at_once_and_then_becomes_what_it_is_now() -> None:
    source = SlowSource()
    app = ZerotopApp(source, title="slow", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("6")
        await wait_until(pilot, lambda: " 13/14" in read_screen(app))
        await pilot.press("1")
        source.gate.clear()
        for key in ("comma", "6"):
            app.simulate_key(key)
        await wait_while_busy(
            lambda: app.screen.id == "threads" and "PAUSED −0:10" in read_screen(app) and " 13/14" in read_screen(app)
        )
        source.gate.set()
        await pilot.pause()
        assert " 13/14" not in read_screen(app)
        assert "PAUSED −0:10" in read_screen(app)


async def test_an_error_in_the_worker_ends_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    source = PlayedSource("story", lambda: 65.0)
    app = ZerotopApp(source, title="broken", glyphs=BLOCKS, clock=lambda: 0.0)

    def fail_at(cursor_ns: int | None) -> LiveView:
        raise RuntimeError("damaged")

    async def go_back() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            monkeypatch.setattr(source, "view_at", fail_at)
            await pilot.press("comma")

    with pytest.raises(RuntimeError, match="damaged"):
        await go_back()


async def test_screens_are_made_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SETTLED_S", 0.01)
    monkeypatch.setattr(monitor, "READY_S", 0.05)
    monkeypatch.setattr(monitor, "KEYED_S", 0.0)
    app = ZerotopApp(PlayedSource("story", lambda: 65.0), title="ready", glyphs=BLOCKS, clock=lambda: 0.0)
    frozen = list[int]()
    monkeypatch.setattr(monitor, "freeze_garbage", lambda: frozen.append(len(app._screen_stacks)))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: all(tab.name in app._screen_stacks for tab in TABS))
        assert frozen == [1]  # once, and before there is more to go through
        assert app.screen.id == "live"
        assert "Iteration" in read_screen(app)
        for number, tab in enumerate(TABS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            assert app.screen.id == tab.name
            assert all(panel.plain_text() for panel in app.screen.query(FrameWidget) if panel.display)


def test_garbage_of_the_start_is_never_looked_at_again() -> None:
    thresholds = gc.get_threshold()
    kept = [object()]
    assert any(found is kept for found in gc.get_objects())
    try:
        freeze_garbage()
        assert not any(found is kept for found in gc.get_objects())
        assert gc.get_threshold()[0] > monitor.GARBAGE_OBJECTS
    finally:
        gc.set_threshold(*thresholds)


async def test_a_screen_that_was_seen_in_a_terminal_of_another_size_fills_that_of_now() -> None:
    app = ZerotopApp(PlayedSource("story", lambda: 65.0), title="sizes", glyphs=BLOCKS, clock=lambda: 0.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("2")
        await resize(pilot, (80, 24))
        await pilot.press("1")
        await pilot.pause()
        seen = read_screen(app)
        assert [len(line) for line in seen.split("\n")] == [80] * 24
        assert "13/14" in seen
        assert "Live" in seen.split("\n")[-2]


def test_steps_are_counted_from_where_one_goes() -> None:
    viewer = Viewer(PlayedSource("story", lambda: 65.0), None, lambda: 0.0)
    assert viewer.make_frame().view.progress.step == 12
    for number in (-1, -1, -1, 1):  # before any frame of them is made
        viewer.seek_steps(number)
    assert viewer.make_frame().view.progress.step == 10
    viewer.seek_steps(1)
    assert viewer.make_frame().view.progress.step == 11


@pytest.mark.parametrize("metric", [RankMetric.PEAK, RankMetric.FREE, RankMetric.CORES])
def test_a_picture_completed_later_equals_one_made_at_once(
    metric: RankMetric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ranks(tmp_path, 70, 9, more_bytes={2: 4 * GIB})
    source = RecordingSource(read_recording(tmp_path))
    frame = Viewer(source, None, lambda: 0.0).make_frame()
    at_once, later = Ranking(source), Ranking(source)
    at_once.metric = later.metric = metric
    expected = at_once.make_picture(frame)
    assert not at_once.is_busy
    monkeypatch.setattr(ranking_module, "_MANY_RANKS", 0)
    first = later.make_picture(frame)
    assert later.is_busy
    assert first.metric is metric
    assert np.isnan(first.values).all()
    later.finish_work()
    result = later.make_picture(frame)
    assert not later.is_busy
    assert np.array_equal(result.values, expected.values, equal_nan=True)
    assert result.order.tolist() == expected.order.tolist()
    assert later.make_picture(frame) is result


async def test_a_metric_is_named_before_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path, 70, 9)
    monkeypatch.setattr(ranking_module, "_MANY_RANKS", 0)
    gate, read_metric = threading.Event(), RankSamples.read_metric

    def read_slowly(samples: RankSamples, metric: RankMetric, matrix: RankMatrix) -> Matrix:
        assert gate.wait(PATIENCE_S)
        return read_metric(samples, metric, matrix)

    monkeypatch.setattr(RankSamples, "read_metric", read_slowly)
    app = ZerotopApp(RecordingSource(read_recording(tmp_path)), title="ranks", glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("5")
        screen = app.screen
        assert isinstance(screen, RanksScreen)
        for _ in range(2):
            app.simulate_key("m")
        await wait_while_busy(lambda: "peak" in read_screen(app).split("Ranks: ")[1].split("─")[0])
        picture = screen.ranking.last_picture
        assert picture is not None
        assert picture.metric is RankMetric.PEAK
        assert np.isnan(picture.values).all()
        gate.set()
        await pilot.pause()
        assert screen.ranking.last_picture is not picture
        assert screen.ranking.last_picture is not None
        assert not np.isnan(screen.ranking.last_picture.values).all()


async def test_a_screen_that_comes_back_is_painted_in_the_theme_of_now() -> None:
    def read_painted(app: ZerotopApp) -> list[list[tuple[str, str]]]:
        strips = app.screen._compositor.render_strips()
        return [[(segment.text, str(segment.style)) for segment in strip] for strip in strips]

    seen = []
    for theme in (DARK_NAME, LIGHT_NAME):
        app = ZerotopApp(PlayedSource("story", lambda: 65.0), title="themes", glyphs=BLOCKS, clock=lambda: 0.0)
        async with app.run_test(size=(120, 40)) as pilot:
            app.theme = theme
            while "fp16 stopped skipping" not in read_screen(app):  # the search of findings is not over
                await pilot.pause(0.05)
            seen.append(read_painted(app))
            await pilot.press("2")
            app.theme = LIGHT_NAME
            await pilot.press("1")
            await pilot.pause()
            seen.append(read_painted(app))
    assert seen[0] != seen[1]
    assert seen[1] == seen[2] == seen[3]
