"""The threads screen in a terminal that is not there: its keys, its mouse, sizes, what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from recordings import open_recording
from screens import read_rows
from small_recording import make_identity, make_record, read_recording, write_table
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.threads.drawing import measure_history
from zerotop.ui.threads.screen import RankList, ThreadList, ThreadsScreen
from zerotop_probe.recording import tables

S = 10**9


def app_of(recording: Recording, glyphs: Glyphs = BLOCKS) -> ZerotopApp:
    return ZerotopApp(RecordingSource(recording), title="threads", glyphs=glyphs)


async def open_threads(app: ZerotopApp, pilot: Pilot[Leaving], share: float = 0.9) -> ThreadsScreen:
    await pilot.pause()
    app.action_switch("threads")
    app.viewer.go_to_share(share)
    app.draw_frame()
    await pilot.pause()
    assert isinstance(app.screen, ThreadsScreen)
    return app.screen


def read_title(app: ZerotopApp) -> str:
    """The rank that it is about."""
    return next(line for line in read_rows(app) if " cores used, " in line)


async def test_up_and_down_choose_a_rank() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_threads(app, pilot)
        assert "Rank 0" in read_title(app)
        await pilot.press("down", "down")
        assert "Rank 2" in read_title(app)
        await pilot.press("up")
        assert "Rank 1" in read_title(app)
        region = app.screen.query_one(RankList).region
        await pilot.click(offset=(region.x + 3, region.y + 4))
        await pilot.pause()
        assert "Rank 3" in read_title(app)
        assert any(line.lstrip().startswith("›   3") for line in read_rows(app))


async def test_it_opens_on_the_rank_that_the_others_wait_for() -> None:
    app = app_of(open_recording("cpu-straggler"))
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_threads(app, pilot, 1.0)
        assert "Rank 1" in read_title(app)
        assert any(line.lstrip().startswith("›   1") for line in read_rows(app))
        await screen.action_rank(-1)
        await screen.action_rank(-1)  # before a frame shows the first choice
        await pilot.pause()
        assert "Rank 0" in read_title(app)
        await pilot.press("down")
        assert "Rank 1" in read_title(app)


async def test_threads_of_a_name_are_opened_and_closed() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_threads(app, pilot)
        (group,) = [line for line in read_rows(app) if "× pool worker" in line]
        assert "▸" in group
        await pilot.press("enter")
        assert sum("    python3 " in line for line in read_rows(app)) > 5
        assert any("▾" in line for line in read_rows(app))
        first = next(line for line in read_rows(app) if "    python3 " in line)
        await pilot.press("pagedown")
        assert first not in read_rows(app)
        await pilot.press("pageup", "pageup")
        assert first in read_rows(app)
        await pilot.press("enter")
        assert not any("    python3 " in line for line in read_rows(app))


async def test_whoever_scrolled_beyond_the_last_thread_is_back_with_the_first_turn_of_the_wheel() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_threads(app, pilot)
        await pilot.press("enter")
        panel = screen.query_one(ThreadList)
        for _ in range(100):
            panel.scroll_rows(3)
        await pilot.pause()
        last = panel.plain_text()
        panel.scroll_rows(3)
        await pilot.pause()
        assert panel.plain_text() == last
        panel.scroll_rows(-3)
        await pilot.pause()
        assert panel.plain_text() != last


async def test_with_room_to_spare_the_busiest_threads_of_a_name_are_shown_unasked() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(200, 70)) as pilot:
        await open_threads(app, pilot)
        seen = sum("    python3 " in line for line in read_rows(app))
        assert 10 < seen < 60
        assert not any("more rows" in line for line in read_rows(app))
        await pilot.press("enter")
        assert any("more rows below" in line for line in read_rows(app))
        await pilot.press("enter")
        assert not any("    python3 " in line for line in read_rows(app))


async def test_a_recording_shorter_than_what_is_usually_seen_has_the_width_to_itself() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(300, 70)) as pilot:
        await open_threads(app, pilot, 1.0)
        (axis,) = [line for line in read_rows(app) if "30 s" in line and "40 s" in line]
        assert axis.index("10 s") < 0.4 * 300
        # Without the first 3 s, before the process began, and what came after the last step.
        last = next(line for line in read_rows(app) if "chart: last " in line).split(" last ")[1].split()
        assert 50 < int(last[0]) < 72


async def test_the_chart_begins_where_the_process_was_sampled_first() -> None:
    app = app_of(open_recording("cpu-straggler"))
    async with app.run_test(size=(200, 50)) as pilot:
        await open_threads(app, pilot, 0.6)
        panel = app.screen.query_one(ThreadList)
        threads = panel.shown_threads
        assert threads is not None
        assert 0 <= threads.time_s[0] - threads.begin_s < 0.1 * (threads.end_s - threads.begin_s)


async def test_cores_and_runnable_threads_of_each_phase_are_beside_the_chart() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_threads(app, pilot)
        (line,) = [line for line in read_rows(app) if line.rstrip().endswith("■ cpu optim")]
        used, runnable = map(float, line.split("■")[0].split()[-2:])
        assert 10 < used < 20  # of 64 cores, which 4 ranks share
        assert used + 20 < runnable  # the others wait


async def test_the_means_of_phases_are_the_same_at_every_width() -> None:
    seen = set()
    for size in ((120, 40), (160, 40), (200, 50)):
        app = app_of(open_recording("story"))
        async with app.run_test(size=size) as pilot:
            await open_threads(app, pilot)
            rows = [line.rstrip() for line in read_rows(app)]
            seen.add(next(tuple(row.split()[-5:-3]) for row in rows if row.endswith("■ cpu optim")))
    assert len(seen) == 1


async def test_time_in_counted_steps_is_explained_beside_the_chart() -> None:
    for name, is_explained in (("hand-threads", True), ("story", False)):
        app = app_of(open_recording(name))
        async with app.run_test(size=(120, 40)) as pilot:
            await open_threads(app, pilot)
            rows = read_rows(app)
            assert any(row.rstrip().endswith("■ counted") for row in rows) is is_explained
            assert any("counted: of most short steps" in row for row in rows) is is_explained


async def test_the_end_shows_the_last_step_and_a_moment_after_it_processes_that_have_ended() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_threads(app, pilot, 1.0)
        assert any("Ranks at step 13" in line for line in read_rows(app))
        assert float(read_title(app).split("Rank 0 ")[1].split()[0]) > 10
        await open_threads(app, pilot, 0.999)
        assert not any(" cores used, " in line for line in read_rows(app))
        assert any(line.lstrip().startswith("Rank 0 ended") for line in read_rows(app))


def test_at_80_columns_the_charts_keep_a_third_of_the_width() -> None:
    for nodes in (1, 2):
        assert measure_history(80, 60 * 10**9, nodes=nodes, bound=True)[0] >= 28


async def test_the_numbers_are_copied() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_threads(app, pilot)
        await pilot.press("y")
        heading, *rows = app.clipboard.split("\n")
        assert heading.split("\t")[:4] == ["rank", "tid", "kind", "name"]
        told = screen.query_one(ThreadList).shown_threads
        assert told is not None
        assert len(rows) == sum(len(group.threads) for group in told.groups) > 10
        assert all(row.startswith("0\t") for row in rows)


@pytest.mark.parametrize(("glyphs", "samples"), [(BLOCKS, "■■"), (TEXTURES, "▓█"), (ASCII, "bS")])
async def test_the_charts_phases_are_distinguished_without_colours(glyphs: Glyphs, samples: str) -> None:
    app = app_of(open_recording("x4-attached"), glyphs)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_threads(app, pilot)
        rows = read_rows(app)
    for sample, phase in zip(samples, ("backward", "cpu optim"), strict=True):
        assert any(f" {sample} {phase} " in line for line in rows), phase


async def test_crowded_cores_are_announced() -> None:
    app = app_of(open_recording("story"))
    async with app.run_test(size=(120, 40)) as pilot:
        await open_threads(app, pilot, 0.8)
        assert any("threads compete for 64 cores" in line for line in read_rows(app))


@pytest.mark.parametrize(
    ("name", "size", "glyphs"),
    [
        ("story", (40, 12), BLOCKS),
        ("cpu-dead", (80, 24), ASCII),
        ("x4-z3", (200, 50), TEXTURES),
        ("cpu-clean", (300, 90), BLOCKS),
    ],
)
async def test_every_size_of_real_recordings(name: str, size: tuple[int, int], glyphs: Glyphs) -> None:
    app = app_of(open_recording(name), glyphs)
    async with app.run_test(size=size) as pilot:
        for share in (0.0, 0.3, 0.7, 1.0):
            await open_threads(app, pilot, share)
            assert len({len(line) for line in read_rows(app)}) == 1
            await pilot.press("enter", "pagedown")
        assert glyphs is not ASCII or all(line.isascii() for line in read_rows(app))


async def test_a_process_that_nobody_numbered_is_the_job_and_all_its_threads_are_in_the_table(tmp_path: Path) -> None:
    fields = {"rank": -1, "pid": 100, "rss_bytes": 1, "cores_used": 1.0, "busy_threads": 1, "thread_count": 1}
    write_table(
        tmp_path, tables.PROCESSES, make_identity(-1), make_record(tables.PROCESSES, time_ns=S, waiting_cores=0.0, **fields)
    ).close()
    thread = {"pid": 100, "tid": 100, "name": b"main", "cores_used": 1.0, "processor": 0}
    write_table(tmp_path, tables.THREADS, make_identity(-1), make_record(tables.THREADS, time_ns=S, **thread)).close()
    app = app_of(read_recording(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_threads(app, pilot, 1.0)
        text = "\n".join(read_rows(app))
        assert "Process 100 1.0 cores used, 1.0 runnable, 1 thread" in text
        assert "› job " in text
        assert "-1" not in text
        assert "others" not in text


async def test_no_rank_and_no_threads_are_reported(tmp_path: Path) -> None:
    write_table(tmp_path, tables.HOSTS, make_identity(-1), make_record(tables.HOSTS, time_ns=S, cores=4)).close()
    app = app_of(read_recording(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_threads(app, pilot, 1.0)
        assert any(
            "Waiting for ranks" in line or "No samples of the ranks' processes were recorded" in line
            for line in read_rows(app)
        )
        await pilot.press("up", "down", "enter", "pagedown", "y")
    fields = {"rank": 0, "pid": 100, "rss_bytes": 1, "cores_used": 1.0, "busy_threads": 1, "thread_count": 3}
    write_table(
        tmp_path, tables.PROCESSES, make_identity(-1), make_record(tables.PROCESSES, time_ns=S, waiting_cores=0.0, **fields)
    ).close()
    app = app_of(read_recording(tmp_path))
    async with app.run_test(size=(80, 24)) as pilot:
        await open_threads(app, pilot, 1.0)
        assert any("No threads recorded" in line for line in read_rows(app))
