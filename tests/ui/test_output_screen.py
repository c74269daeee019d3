"""The output screen in a terminal that is not there: its keys, its mouse, sizes, jobs that print without end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from textual.pilot import Pilot

from printing import Printing, read_monotonic_ns
from recordings import open_recording
from screens import read_rows
from waiting import wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.output import blocks as output_blocks
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.output.screen import OutputPanel, OutputScreen
from zerotop.ui.output.search_bar import Find

SECOND = 10**9


def app_of(recording: Recording, glyphs: Glyphs = BLOCKS) -> ZerotopApp:
    return ZerotopApp(RecordingSource(recording), title="output", glyphs=glyphs)


def read_body(app: ZerotopApp) -> list[str]:
    """What is drawn of the lines, without the title and the bar at the right."""
    panel = app.screen.query_one(OutputPanel)
    region = panel.region
    rows = read_rows(app)[region.y + 1 : region.bottom]
    return [row[region.x : region.right - 1].rstrip() for row in rows]


async def open_output(app: ZerotopApp, pilot: Pilot[Leaving]) -> OutputScreen:
    await pilot.pause()
    app.action_switch("output")
    await pilot.pause()
    assert isinstance(app.screen, OutputScreen)
    return app.screen


@pytest.fixture
def long_output(tmp_path: Path) -> Printing:
    """A job that has printed a line a second for an hour, each 100th an error."""
    job = Printing(tmp_path)
    info = json.loads((job.path / "session.json").read_text())
    info["clock"] = {name: ns - 4000 * SECOND for name, ns in info["clock"].items()}
    (job.path / "session.json").write_text(json.dumps(info))
    begin = read_monotonic_ns() - 4000 * SECOND
    for second in range(3600):
        line = b"ValueError: number %d\n" % second if second % 100 == 0 else b"line %d\n" % second
        job.write_output(line, at_ns=begin + second * SECOND)
    return job


async def test_at_the_end_the_last_lines_are_seen(long_output: Printing) -> None:
    app = app_of(Recording.open(long_output.path))
    async with app.run_test(size=(100, 30)) as pilot:
        await open_output(app, pilot)
        assert read_body(app)[-1].endswith("line 3599")
        assert not any("▶" in line for line in read_body(app))


async def test_keys_and_wheel_scroll_and_a_seek_leads_back(long_output: Printing) -> None:
    app = app_of(Recording.open(long_output.path))
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await open_output(app, pilot)
        await pilot.press("up", "up", "up")
        assert read_body(app)[-1].endswith("line 3596")
        assert any(re.search(r"Output at \d+ %, newer lines below", line) for line in read_rows(app))
        await pilot.press("down")
        assert read_body(app)[-1].endswith("line 3597")
        room = len(read_body(app))
        await pilot.press("pageup")
        assert read_body(app)[-1].endswith(f"line {3597 - room + 1}")
        lines = screen.query_one(OutputPanel)
        await pilot.mouse_down(lines, offset=(lines.size.width - 1, lines.size.height - room))
        await pilot.mouse_up(lines)
        await pilot.pause()
        assert read_body(app)[0].endswith("ValueError: number 0")
        await pilot.press("up")
        assert read_body(app)[0].endswith("ValueError: number 0")
        await pilot.press("end")
        assert read_body(app)[-1].endswith("line 3599")
        await pilot.press("pageup", "pagedown")
        assert screen.reading.build_page(room).follows_cursor


async def test_the_line_at_the_cursor_is_marked_and_later_ones_stand_below(long_output: Printing) -> None:
    recording = Recording.open(long_output.path)
    app = app_of(recording)
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await open_output(app, pilot)
        app.viewer.go_to_ns(recording.last_written_ns - 1799 * SECOND)
        app.draw_frame()
        await pilot.pause()
        (marked,) = [line for line in read_body(app) if "▶" in line]
        assert marked.endswith("ValueError: number 1800")
        page = screen.reading.build_page(len(read_body(app)))
        assert [line.is_later for line in page.lines] == sorted(line.is_later for line in page.lines)
        assert page.lines[-1].is_later
        # A click on a line goes to its moment.
        region = screen.query_one(OutputPanel).region
        await pilot.click(offset=(region.x + 20, region.y + 1))
        await pilot.pause()
        (marked,) = [line for line in read_body(app) if "▶" in line]
        assert marked.endswith(page.lines[0].text)


async def test_searching(long_output: Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_blocks, "BLOCK", 2000)
    app = app_of(Recording.open(long_output.path))
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await open_output(app, pilot)
        app.action_begin()
        await pilot.press("slash", *"valueE", "backspace", *"error")
        await wait_until(pilot, lambda: not screen.reading.is_busy)
        assert any("1 of 36 lines" in line for line in read_rows(app))
        assert "number 0" in next(line for line in read_body(app) if "ValueError" in line)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.viewer.make_frame().moment.cursor_s < 5)
        assert app.focused is None
        for number, key in ((100, "enter"), (200, "n"), (300, "n")):
            await pilot.press(key)
            await wait_until(pilot, lambda: not screen.reading.is_busy)
            await pilot.pause()
            (marked,) = [line for line in read_body(app) if "▶" in line]
            assert marked.endswith(f"number {number}")
        await pilot.press("N")
        await wait_until(pilot, lambda: not screen.reading.is_busy)
        await pilot.pause()
        assert next(line for line in read_body(app) if "▶" in line).endswith("number 200")
        assert any("3 of 36 lines" in line for line in read_rows(app))
        await pilot.press("escape")
        assert not screen.query_one(Find).display
        assert screen.reading.search is None


async def test_searching_for_absent_text_finds_nothing(long_output: Printing) -> None:
    app = app_of(Recording.open(long_output.path))
    async with app.run_test(size=(100, 30)) as pilot:
        screen = await open_output(app, pilot)
        await pilot.press("slash", *"Line 7", "enter")
        await wait_until(pilot, lambda: not screen.reading.is_busy)
        assert any("no matches" in line for line in read_rows(app))
        assert read_body(app)[-1].endswith("line 3599")


async def test_long_lines_are_cut_or_wrapped(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output(b"first\n" + b"x" * 150 + b"\nlast\n")
    app = app_of(Recording.open(job.path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_output(app, pilot)
        assert sum("xxx" in line for line in read_body(app)) == 1
        await pilot.press("w")
        assert sum("xxx" in line for line in read_body(app)) == 3
        assert sum(line.count("x") for line in read_body(app)) == 150


async def test_the_lines_that_are_seen_are_copied_whole(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output(b"first\n" + b"x" * 150 + b"\nlast\n")
    app = app_of(Recording.open(job.path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_output(app, pilot)
        await pilot.press("w", "y")
        assert app.clipboard == "first\n" + "x" * 150 + "\nlast"


async def test_markup_that_the_job_prints_is_shown_literally(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output("[bold]no[/bold] \x1b[31mred\x1b[0m \u202eturned\x07\n".encode())
    app = app_of(Recording.open(job.path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_output(app, pilot)
        assert read_body(app)[0].endswith("[bold]no[/bold] red turned")


async def test_while_the_job_prints_it_goes_along_and_stands_still_once_scrolled(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    job.write_output(b"".join(b"line %d\n" % number for number in range(100)))
    app = app_of(Recording.open(job.path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_output(app, pilot)
        for number in (100, 101):
            job.write_output(b"line %d\n" % number)
            await wait_until(pilot, lambda number=number: read_body(app)[-1].endswith(f"line {number}"))  # type: ignore[misc]
        await pilot.press("up")
        job.write_output(b"line 102\n")
        await pilot.pause(0.6)
        assert read_body(app)[-1].endswith("line 100")
        await pilot.press("f")
        await wait_until(pilot, lambda: read_body(app)[-1].endswith("line 102"))


@pytest.mark.parametrize(
    ("name", "size", "glyphs"),
    [("story", (40, 12), BLOCKS), ("cpu-dead", (80, 24), ASCII), ("z2", (120, 40), TEXTURES), ("story", (300, 90), BLOCKS)],
)
async def test_every_size_of_real_recordings(name: str, size: tuple[int, int], glyphs: Glyphs) -> None:
    app = app_of(open_recording(name), glyphs)
    async with app.run_test(size=size) as pilot:
        await open_output(app, pilot)
        for share in (0.0, 0.5, 0.9):
            app.viewer.go_to_share(share)
            app.draw_frame()
            await pilot.pause()
            assert all(len(line) == len(read_rows(app)[0]) for line in read_rows(app))
        await pilot.press("slash", "a", "enter", "pageup", "w")
        assert glyphs is not ASCII or all(line.isascii() for line in read_rows(app))


async def test_nothing_printed_yet(tmp_path: Path) -> None:
    job = Printing(tmp_path)
    app = app_of(Recording.open(job.path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_output(app, pilot)
        assert "No output yet" in read_body(app)[0]
        await pilot.press("up", "pagedown", "slash", "x", "enter", "N", "escape", "y", "w")
        assert "No output yet" in read_body(app)[0]


async def test_lines_that_repeat_the_one_before_are_shown_once(tmp_path: Path) -> None:
    """Warnings of eight ranks and updates of a progress bar leave room for what came before; a search finds each."""
    job, begin = Printing(tmp_path), read_monotonic_ns() - 100 * SECOND
    lines = [f"begin {number}" for number in range(30)]
    lines += [f"[rank{rank}]: UserWarning: slow" for rank in range(8)]
    lines += [
        f"shards:  {part}%|{'#' * (part // 10)}| {part}/100 [00:{part:02d}<00:01, 1.{part}it/s]" for part in range(10, 60)
    ]
    lines += ["loss 2.5", "loss 2.4", "", "", "end"]
    for number, line in enumerate(lines):
        job.write_output(line.encode() + b"\n", at_ns=begin + number * SECOND // 10)
    app = app_of(Recording.open(job.path))
    async with app.run_test(size=(100, 24)) as pilot:
        screen = await open_output(app, pilot)
        body = [line[7:].strip() for line in read_body(app)]
        assert body[-7] == "[rank7]: UserWarning: slow ×8"
        assert body[-6].endswith("59/100 [00:59<00:01, 1.59it/s] ×50")
        assert body[-5:] == ["loss 2.5", "loss 2.4", "", "", "end"]
        assert body[:-7] == lines[30 - len(body) + 7 : 30]
        await pilot.press("up")
        assert [line[7:].strip() for line in read_body(app)][1:] == body[:-1]
        await pilot.press("down")
        assert [line[7:].strip() for line in read_body(app)] == body
        await pilot.press("slash", *"warning", "enter")
        await wait_until(pilot, lambda: screen.reading.search is not None and screen.reading.search.match_count == 8)
        await wait_until(pilot, lambda: sum("UserWarning" in line for line in read_body(app)) == 8)
