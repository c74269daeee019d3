"""The summary of a job that has ended, and where a replay starts."""

from __future__ import annotations

import pytest

from recordings import open_recording
from screens import read_rows
from waiting import wait_until
from zerotop import demo
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.drawing.glyphs import BLOCKS
from zerotop.ui.live.panels import Summary


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50), (300, 80)])
async def test_the_costliest_findings_come_first_at_the_end(size: tuple[int, int]) -> None:
    source = RecordingSource(Recording.open(demo.RECORDING_PATH))
    count = len(detect_findings(source.recording, source.recording.last_written_ns))
    app = ZerotopApp(source, glyphs=BLOCKS, title="story")
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: len(source.findings_at(None)) == count)
        panel = app.screen.query_one(Summary)
        await wait_until(pilot, lambda: "fp16 stopped skipping" in panel.plain_text())
        rows = panel.plain_text().split("\n")
        assert rows[0].startswith("Summary ")
        assert "fp16 stopped skipping" in rows[1]
        assert "44 %" in rows[1]  # its share of the training time
        assert any("GPUs idle" in row for row in rows[2:4])
        said = ["of the training time" in row for row in rows[:3]]
        assert said in ([True, False, False], [False, True, True])  # of what, once in the title or with each finding
        for words in ("An iteration takes", "GPU memory peaked at", "Watching cost"):
            assert any(words in row for row in rows), words
        assert "tokens per second on average." in " ".join(panel.plain_text().split())  # whole, also where it takes two rows
        await pilot.press("left")
        await wait_until(pilot, lambda: not panel.region.height)
        await pilot.press("end")
        await wait_until(pilot, lambda: panel.region.height)
        await pilot.click(panel, offset=(5, 1))
        await wait_until(pilot, lambda: not app.viewer.playhead.following)
        headline = app.viewer.make_frame().headline
        assert headline is not None
        assert headline.name == "skipping_ended"


async def test_a_healthy_job_has_lost_nothing() -> None:
    app = ZerotopApp(RecordingSource(open_recording("cpu-clean")), glyphs=BLOCKS, title="clean")
    async with app.run_test(size=(120, 40)) as pilot:
        panel = app.screen.query_one(Summary)
        await wait_until(pilot, lambda: "No finding has a cost in time or memory." in panel.plain_text())


def test_a_replay_starts_at_the_first_step() -> None:
    source = RecordingSource(Recording.open(demo.RECORDING_PATH))
    assert source.first_step_ns == int(source.job_steps["begin_unix_ns"][0]) > source.begin_ns
    viewer = Viewer(source, None, lambda: 0.0)
    viewer.toggle_play()  # at the end of a recording
    assert viewer.compute_cursor() == source.first_step_ns


async def test_memory_and_cores_are_those_of_the_last_step() -> None:
    recording = open_recording("z3-offload-all")
    app = ZerotopApp(RecordingSource(recording), None, title=recording.name, glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        text = "\n".join(read_rows(app))
        assert f"GPU memory GiB at step {app.viewer.source.last_step}" in text
        (row,) = (line for line in text.splitlines() if line.startswith(" GPU 0 ▕"))
        assert "–" not in row[:60]


async def test_a_difference_from_the_last_runs_is_reported_once_it_was_computed() -> None:
    asked: list[str] = []

    def compare_past(path: str) -> list[str]:
        asked.append(path)
        return ["8 % slower than your last three runs: forward."]

    source = RecordingSource(Recording.open(demo.RECORDING_PATH))
    app = ZerotopApp(source, glyphs=BLOCKS, title="story")
    app.compare_past = app.viewer.builder.compare_past = compare_past
    async with app.run_test(size=(120, 40)) as pilot:
        panel = app.screen.query_one(Summary)
        await wait_until(pilot, lambda: "8 % slower than your last three runs: forward." in panel.plain_text())
        assert "Watching cost" in panel.plain_text()
        assert asked == [str(demo.RECORDING_PATH)]


async def test_the_hang_because_of_which_a_job_was_stopped_is_reported_beside_its_end() -> None:
    app = ZerotopApp(RecordingSource(open_recording("x2-hang-collectives")), glyphs=BLOCKS, title="hang")
    async with app.run_test(size=(120, 40)) as pilot:
        panel = app.screen.query_one(Summary)
        await wait_until(pilot, lambda: "No progress for" in panel.plain_text())


async def test_the_error_of_the_post_mortem_is_reported_once() -> None:
    source = RecordingSource(open_recording("z2-oom"))
    app = ZerotopApp(source, glyphs=BLOCKS, title="oom")
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: any(one.name == "out_of_memory" for one in source.findings_at(None)))
        assert "out of GPU memory" not in app.screen.query_one(Summary).plain_text()
