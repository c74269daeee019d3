"""The memory screen over real recordings: what its keys do, and what it says when there is nothing to show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import recordings
from microscope_recording import record_trace
from screens import Shown
from small_recording import BEGIN_NS, S
from story_app import FakeJob
from waiting import wait_until
from zerotop.analysis.reports.memory import read_report
from zerotop.analysis.views.memory_view import read_memory_view
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.charts import AXIS_WIDTH
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, Glyphs
from zerotop.ui.drawing.layout import Box
from zerotop.ui.drawing.rows import row_text
from zerotop.ui.memory.layout import layout_memory
from zerotop.ui.memory.memory_history import describe_history, draw_history
from zerotop.ui.memory.screen import MemoryLedger, MemoryScreen, PhasePeaks, TraceCurve


@asynccontextmanager
async def open_memory(
    recording: Recording,
    at_s: float | None = None,
    size: tuple[int, int] = (120, 40),
    *,
    job: FakeJob | None = None,
    glyphs: Glyphs = BLOCKS,
) -> AsyncIterator[Shown[MemoryScreen]]:
    app = ZerotopApp(RecordingSource(recording), job, title=recording.name, glyphs=glyphs)
    async with app.run_test(size=size) as pilot:
        if at_s is not None:
            app.viewer.go_to_seconds(at_s)
        app.action_switch("memory")
        await pilot.pause()
        app.draw_frame()
        await pilot.pause()
        yield Shown(app, pilot, MemoryScreen)


async def test_a_panel_without_room_is_named_and_a_key_shows_it() -> None:
    async with open_memory(recordings.open_recording("z2"), size=(80, 24)) as seen:
        assert "b peaks" in seen.read_text()
        assert "Peak by phase" not in seen.read_text()
        await seen.press_keys("b")
        await wait_until(
            seen.pilot, lambda: "Peak by phase" in seen.read_text() and "DeepSpeed's estimates" in seen.read_text()
        )
        assert "b ledger" in seen.read_text()
        await seen.press_keys("b")
        await wait_until(seen.pilot, lambda: "Peak by phase" not in seen.read_text())


async def test_the_ledger_of_a_gpu() -> None:
    async with open_memory(recordings.open_recording("z2"), 45) as screen:
        text = screen.read_text()
        for words in ("parameters", "0.92", "at peak", "Peak: backward, 12.65 GiB in step 1", "Peak by phase"):
            assert words in text
        assert "allocator  0 cache flushes" in text
        assert "No trace of every allocation" in text


@pytest.mark.parametrize("name", ["cpu-straggler", "gpu-leak"])
async def test_a_short_recording_fills_the_chart_of_its_memory(name: str) -> None:
    async with open_memory(recordings.open_recording(name), size=(200, 50)) as screen:
        await screen.press_keys("end")
        view = screen.app.viewer.make_frame().view
        gpu = view.gpus[0] if view.gpus else None
        for width in (40, 98, 196):
            rows = [row_text(row) for row in draw_history(view, "it", gpu, width, 12, BLOCKS)]
            drawn = rows[-2][AXIS_WIDTH:].replace("▔", " ").rstrip()
            assert len(drawn) - len(drawn.lstrip()) < width / 4 + 1
            assert describe_history(view, gpu, width, width // 2 + 6)


async def test_h_shows_host_memory_and_the_gpu_again() -> None:
    async with open_memory(recordings.open_recording("z2-offload"), 50) as screen:
        assert "Host memory of rank 0" in await screen.press_keys("H")
        assert "pinned" in screen.read_text()
        assert "Host memory of rank 0" not in await screen.press_keys("H")


async def test_up_and_down_choose_the_rank_and_its_gpu() -> None:
    async with open_memory(recordings.open_recording("x4-z3"), 55) as screen:
        assert "GPU 0, rank 0, GiB" in screen.read_text()
        assert "GPU 2, rank 2, GiB" in await screen.press_keys("down", "down")
        assert "GPU 1, rank 1, GiB" in await screen.press_keys("up")
        await screen.press_keys("1", "4")
        assert "GPU 1, rank 1, GiB" in await screen.press_keys("up", "down")


async def test_a_click_on_a_bar_chooses_its_rank() -> None:
    async with open_memory(recordings.open_recording("x4-z3"), 55) as screen:
        names = next(line for line in screen.read_text().splitlines() if line.split()[:4] == ["└", "0", "1", "2"])
        await screen.pilot.click("#bars", offset=(names.index("2") - 1, 5))
        await screen.pilot.pause()
        assert "GPU 2, rank 2, GiB" in screen.read_text()
        await screen.press_keys("H")
        await screen.pilot.click("#bars", offset=(7, 5))
        await screen.pilot.pause()
        assert "Host memory of rank 0" in screen.read_text()


async def test_y_copies_bytes() -> None:
    async with open_memory(recordings.open_recording("z2"), 45) as screen:
        ledger, peaks, curve = (screen.screen.query_one(f"#{name}") for name in ("ledger", "peaks", "curve"))
        assert isinstance(ledger, MemoryLedger)
        assert isinstance(peaks, PhasePeaks)
        assert isinstance(curve, TraceCurve)
        rows = [line.split("\t") for line in ledger.copy_text().splitlines()]
        assert rows[0] == ["row", "now_bytes", "peak_bytes", "expected_bytes", "difference_bytes", "pinned_bytes"]
        assert rows[-1][:2] == ["total", "150754820096"]
        assert peaks.copy_text().splitlines()[1].split("\t")[:2] == ["backward", "13582294528"]
        assert curve.copy_text() == ""
        await screen.press_keys("y")
        assert screen.app.clipboard == ledger.copy_text()
        await screen.press_keys("H")
        assert peaks.copy_text().startswith("Resident memory of all ranks, GiB")  # which is what it shows now


async def test_the_choice_stays_when_screens_are_switched() -> None:
    async with open_memory(recordings.open_recording("z2-offload"), 50) as screen:
        await screen.press_keys("H", "1")
        screen.app.action_switch("memory")
        await screen.pilot.pause()
        assert "Host memory of rank 0" in screen.read_text()


async def test_without_a_gpu_host_memory_comes_first() -> None:
    async with open_memory(recordings.open_recording("cpu-clean"), 36) as screen:
        text = screen.read_text()
        assert "Host memory of rank 0, MiB" in text
        assert "master weights" in text
        assert " h " not in text.splitlines()[-1]
        assert "No GPU found" in await screen.press_keys("H")


async def test_z_enlarges_the_ledger() -> None:
    async with open_memory(recordings.open_recording("z2"), 45) as screen:
        before = screen.app.screen.query_one("#ledger").size
        await screen.press_keys("z")
        assert screen.app.screen.query_one("#ledger").size.width > before.width
        await screen.press_keys("escape")
        assert screen.app.screen.query_one("#ledger").size == before


async def test_m_is_not_there_in_a_replay() -> None:
    async with open_memory(recordings.open_recording("z2"), 45) as screen:
        assert screen.app.check_action("look", ()) is False
        await screen.press_keys("x")
        assert "Requested" not in screen.read_text()
        assert "microscope" not in screen.read_text().splitlines()[-1]


class Running(RecordingSource):
    """A recording whose job goes on."""

    @property
    def is_live(self) -> bool:
        return True

    seconds = 29.0

    @property
    def end_ns(self) -> int:
        return BEGIN_NS + int(self.seconds * S)


async def test_x_asks_for_a_look_and_its_result_is_drawn_when_it_arrives(tmp_path: Path) -> None:
    recording, job = record_trace(tmp_path).open_recording(), FakeJob()
    source = Running(recording)
    app = ZerotopApp(source, job, title="x")
    async with app.run_test(size=(150, 46)) as pilot:
        app.action_switch("memory")
        await pilot.pause()
        app.draw_frame()
        await pilot.pause()
        screen = Shown(app, pilot, MemoryScreen)
        assert "x traces the next step" in screen.read_text()
        assert "x microscope" in screen.read_text().splitlines()[-1]
        assert "Requested: the step after" in await screen.press_keys("x")
        assert job.looks == [(1, False)]
        # The look of this recording is known from second 29.1 on.
        source.seconds = 29.2
        app.draw_frame()
        await wait_until(pilot, lambda: "Requested" not in screen.read_text())
        text = screen.read_text()
        assert "Microscope, step 1 of rank 0, GiB" in text
        assert "19.25 GiB in backward" in text
        job.trouble = OSError("No space left on device")
        await screen.press_keys("x")
        assert any("Cannot request a trace" in str(note.message) for note in app._notifications)


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (300, 90), (20, 6)])
@pytest.mark.parametrize("name", ["z2-oom", "cpu-dead", "story", "x4-z3"])
async def test_any_size(name: str, size: tuple[int, int]) -> None:
    async with open_memory(recordings.open_recording(name), 0.0, size, glyphs=ASCII if size[0] == 80 else BLOCKS) as screen:
        for key in ("z", "end"):  # at the begin and at the end
            lines = screen.read_text().splitlines()
            assert len(lines) == size[1]
            assert screen.read_text().isascii() or size[0] != 80
            await screen.press_keys("H", "down", "z", "H", key)
        assert len(screen.read_text().splitlines()) == size[1]


async def test_after_the_end_the_screen_has_the_figures_of_the_command() -> None:
    """The last step's gradients are still there in both, though Python frees them before the rank exits."""
    recording = recordings.open_recording("hand-clean2")
    report = read_report(recording)
    assert report is not None
    assert report.view.moment_text == "at the end of step 399"
    async with open_memory(recording) as screen:
        text = screen.read_text()
        assert "step 399" in next(line for line in text.splitlines() if "at peak" in line)
        assert "State at the end of step 399" in " ".join(text.split())
        view = screen.screen.query_one(MemoryLedger).memory_view
        assert view is not None
        sizes, printed = ({line.key: line.now_bytes for line in lines} for lines in (view.lines, report.view.lines))
        assert sizes == printed
        assert sizes["gradients"] > 0.26 * 2**30


def test_places_do_not_overlap_and_stay_in_the_room() -> None:
    for name in ("z2", "cpu-clean", "x4-z3"):
        recording = recordings.open_recording(name)
        view = read_memory_view(recording.at(recording.last_written_ns))
        for width in (20, 60, 80, 118, 198, 298):
            for height in (1, 4, 9, 15, 22, 44, 84):
                for host in (False, True):
                    room = Box(1, 3, width, height)
                    taken: set[tuple[int, int]] = set()
                    for box in layout_memory(room, view, host=host).values():
                        cells = {(x, y) for x in range(box.x, box.x + box.width) for y in range(box.y, box.y + box.height)}
                        assert not cells & taken
                        taken |= cells
                    assert all(1 <= x < 1 + width and 3 <= y < 3 + height for x, y in taken)


@pytest.mark.parametrize(
    ("name", "what"), [("z2-oom", "Rank 0 ran out of GPU memory"), ("cpu-dead", "was killed by SIGKILL")]
)
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_death_is_shown_on_every_screen(name: str, what: str, size: tuple[int, int]) -> None:
    recording = recordings.open_recording(name)
    app = ZerotopApp(RecordingSource(recording), None, title=name)
    async with app.run_test(size=size) as pilot:
        screen = Shown(app, pilot, MemoryScreen)
        for number in "145":
            text = await screen.press_keys(number)
            assert what in text
            # The post-mortem is on Live, and on Memory where memory was short; others have a line.
            is_whole = number == "1" or (number == "4" and name == "z2-oom")
            titles = [line for line in text.splitlines() if line.strip().startswith(("Out of memory", "Killed"))]
            assert bool(titles) == is_whole
        app.viewer.go_to_seconds(2)
        app.draw_frame()
        await pilot.pause()
        assert what not in screen.read_text()


async def test_with_room_to_spare_memory_over_time_is_under_the_ledger() -> None:
    app = ZerotopApp(RecordingSource(recordings.open_recording("story")), None, title="story")
    async with app.run_test(size=(300, 90)) as pilot:
        screen = Shown(app, pilot, MemoryScreen)
        text = await screen.press_keys("end", "4")
        assert "Memory of GPU 0, GiB" in text
        assert "Resident memory of all ranks, GiB" in text
        text = await screen.press_keys("H")
        assert "Memory of GPU 0" not in text


async def test_without_a_probe_memory_over_time_is_what_there_is_to_show(tmp_path: Path) -> None:
    app = ZerotopApp(RecordingSource(recordings.open_without_probe("z2-offload", tmp_path)), None, title="outside")
    async with app.run_test(size=(80, 24)) as pilot:
        text = await Shown(app, pilot, MemoryScreen).press_keys("end", "4")
        assert "Memory of GPU 0, GiB" in text
        assert "Peaks by phase" not in text


async def test_live_copies_the_fix_that_it_shows_and_with_tab_a_panel() -> None:
    async with open_memory(recordings.open_recording("z2-offload"), 50) as screen:
        await screen.press_keys("1", "end", "y")
        assert screen.app.clipboard == '"offload_optimizer": {"device": "none"}'
        await screen.press_keys("tab", "y")
        assert "offload_optimizer" not in screen.app.clipboard
