"""The iteration screen over real recordings: what it says, what its keys do, and what where there is nothing to fold."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

import recordings
import screens
from small_recording import BEGIN_NS, S, make_identity, make_record, write_table
from story_app import Watch
from waiting import PATIENCE_S, wait_until
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.waveform import fold_cache
from zerotop.analysis.waveform.fold import fold_iterations
from zerotop.analysis.waveform.fold_cache import WaveformCache
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.charts import GrowingScales
from zerotop.ui.drawing.formatting import format_duration
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.drawing.theme import STYLES
from zerotop.ui.iteration.clipboard import format_phases, format_waveform
from zerotop.ui.iteration.drawing import ShownWaveform, draw_waveform, layout_heights
from zerotop.ui.iteration.labels import describe_bottleneck, describe_left_out, describe_pace
from zerotop.ui.iteration.model import FoldModel
from zerotop.ui.iteration.overlay_dialog import OverlayDialog
from zerotop.ui.iteration.screen import IterationScreen
from zerotop.ui.iteration.table import PhaseLine, build_lines, choose_lines, draw_phases
from zerotop_probe.recording.tables import PROCESSES


class Seen(screens.Shown[IterationScreen]):
    """The app with its iteration screen."""

    async def press_keys(self, *keys: str) -> str:
        for key in keys:
            await super().press_keys(key)
        return self.read_text()

    async def wait_until_settled(self) -> None:
        """Waits until nothing is being folded."""
        await self.pilot.pause()
        while isinstance(self.app.screen, IterationScreen) and self.screen.folding.is_busy:
            await self.pilot.pause(0.01)
        await self.pilot.pause()


@asynccontextmanager
async def open_app(
    recording: Recording, *, step: int | None = None, size: tuple[int, int] = (120, 40), glyphs: Glyphs = BLOCKS
) -> AsyncIterator[Seen]:
    app = ZerotopApp(RecordingSource(recording), None, title=recording.name, glyphs=glyphs)
    async with app.run_test(size=size) as pilot:
        if step is not None:
            app.viewer.go_to_step(step)
        app.action_switch("iteration")
        await pilot.pause()
        app.draw_frame()
        found = Seen(app, pilot, IterationScreen)
        await found.wait_until_settled()
        yield found


def fold_of(name: str, **how: Any) -> Any:
    recording = recordings.open_recording(name)
    fold = WaveformCache(recording).fold_at(recording.last_written_ns, **how)
    assert fold is not None
    return fold


async def test_the_story_in_one_sentence() -> None:
    async with open_app(recordings.open_recording("story")) as screen:
        text = screen.read_text()
        assert "Iteration 2.68 s · mean of 3, steps 11–13 · 4 ranks" in text
        assert re.search(r"GPUs idle 1\.[67]\d s of 2\.68 s, 1\.[67]\d s of it while 62 cores run the optimizer", text)
        for words in ("backward", "cpu optim", "next iteration", "GPU %", "CPU/64", "power W", "Phases ms"):
            assert words in text, words


@pytest.mark.parametrize(
    ("name", "words", "style"),
    [
        ("z2-offload", "while 16 cores run the optimizer", "warn"),
        ("x4-z3", "cores run the optimizer", "warn"),
        ("z2-oom", "of 486 ms; backward takes 86 %", "value"),
        ("gpu-clean", "NVML's means of 200 ms do not show when", "value"),
        ("cpu-clean", "backward takes 20.8 ms of 35.2 ms; 2 ranks use 1.68 of 2 cores", "value"),
        ("hand-rank0", "50 iterations take 328 ms, 58 % of the time: code outside the phases 251 ms longer", "warn"),
        ("cpu-slow", "code outside the phases takes 51.3 ms of 111 ms", "value"),
    ],
)
def test_the_verdict_follows_the_evidence(name: str, words: str, style: str) -> None:
    text, how = describe_bottleneck(fold_of(name), BLOCKS)
    assert words in text
    assert how == style


@pytest.mark.parametrize("name", ["story", "z2-offload", "hand-threads"])
def test_the_idle_time_in_the_verdict_is_the_tables_total(name: str) -> None:
    fold = fold_of(name)
    whole = build_lines(fold, None)[-1]
    assert f"{format_duration(whole.idle_s)} of {format_duration(fold.iteration_s)}" in describe_bottleneck(fold, BLOCKS)[0]


def test_long_iterations_that_differ_are_reported_by_their_mean() -> None:
    fold = fold_of("hand-rank0")
    assert fold.long is not None
    assert fold.long.mean_s == pytest.approx(fold.long.iteration_s, rel=0.2)
    unlike = dataclasses.replace(fold, long=dataclasses.replace(fold.long, iteration_s=0.02))
    text = f"50 iterations take {format_duration(fold.long.mean_s)} on average, {fold.long.share * 100:.0f} % of the time"
    assert describe_bottleneck(unlike, BLOCKS) == (text, "warn")


def test_excluded_iterations_are_counted_by_reason() -> None:
    assert describe_left_out(fold_of("z2-offload")) == "excluded: 2 with evaluation, 1 outlier"
    assert describe_left_out(fold_of("story")) == ""
    assert describe_left_out(fold_of("hand-rank0")) == "excluded: 101 only counted, 50 outliers"


def test_excluded_iterations_are_named_where_the_row_has_no_room_for_them() -> None:
    fold = fold_of("hand-rank0")
    shown = ShownWaveform(fold, delay="Rank 1 delays the other one by 24.8 ms (21 % of 116 ms) in forward.")
    rows = [row_text(row) for row in draw_waveform(shown, 80, 20, BLOCKS, GrowingScales())]
    assert len(rows) == 20
    assert sum(row.strip() == describe_left_out(fold) for row in rows) == 1


async def test_a_pinned_fold_is_behind_later_ones_and_survives_other_screens() -> None:
    async with open_app(recordings.open_recording("story"), step=8) as screen:
        assert "skipped steps 1–8" in screen.read_text()
        await screen.press_keys("c", "end")
        text = screen.read_text()
        assert "pinned: 926 ms, mean of 8, skipped steps 1–8" in text
        assert "change" in text
        assert "+1749" in text
        await screen.press_keys("1")
        assert not isinstance(screen.app.screen, IterationScreen)
        screen.app.action_switch("iteration")
        await screen.wait_until_settled()
        assert "pinned: 926 ms" in screen.read_text()
        assert "pinned" not in await screen.press_keys("c")


async def test_another_recordings_fold_can_be_pinned() -> None:
    async with open_app(recordings.open_recording("z2-offload"), size=(160, 50)) as screen:
        screen.screen.pin_fold(fold_of("z3-offload-all"), "z3")
        await screen.wait_until_settled()
        assert "z3: 458 ms, mean of 11" in screen.read_text()
        screen.screen.pin_fold(None)
        await screen.wait_until_settled()
        assert "z3:" not in screen.read_text()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """A recording, with another one beside it, one that nothing put a probe into, and what is none."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("z2-offload", "z3-offload-all"):
        shutil.copy(recordings.find_packed_file(name), tmp_path)
    recordings.open_without_probe("cpu-clean", tmp_path)
    (tmp_path / "torn.zerotop").write_bytes(b"torn")
    return Recording.open(tmp_path / "z2-offload.zerotop")


async def test_another_recordings_iteration_is_chosen_from_a_list(own_folder: Recording) -> None:
    async with open_app(own_folder, size=(160, 50)) as screen:
        await screen.press_keys("v")
        assert isinstance(screen.app.screen, OverlayDialog)
        listed = screen.app.screen.query_one(OptionList)
        await wait_until(screen.pilot, lambda: "enter draws its last iterations" in screen.read_text())
        assert listed.option_count == 1
        # The list is painted a little after its options change.
        await wait_until(screen.pilot, lambda: "z3-offload-all.zerotop" in screen.read_text())
        await screen.press_keys(*"zzz")
        await wait_until(screen.pilot, lambda: "No matches for “zzz”." in screen.read_text())
        await screen.press_keys("backspace", "backspace", "3", "down", "up")
        await wait_until(screen.pilot, lambda: "z3-offload-all.zerotop" in screen.read_text())
        await screen.press_keys("enter")
        await wait_until(screen.pilot, lambda: "z3-offload-all: 458 ms, mean of 11" in screen.read_text())
        assert "z3-offload-all" not in await screen.press_keys("c")
        await screen.press_keys("v")
        dialog = screen.app.screen
        assert isinstance(dialog, OverlayDialog)
        await screen.press_keys("escape")
        assert isinstance(screen.app.screen, IterationScreen)
        dialog._finish_reading()  # as its thread does a little late


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("cpu-clean", "cpu-clean has no finished iteration."),
        ("torn.zerotop", "torn.zerotop"),
        ("nowhere", "There is no recording"),
    ],
)
async def test_a_recording_that_cannot_be_overlaid_is_refused_with_the_reason(
    own_folder: Recording, typed: str, said: str
) -> None:
    async with open_app(own_folder) as screen:
        await screen.press_keys("v")
        await wait_until(screen.pilot, lambda: "Reading" not in screen.read_text())
        words = screen.app.screen.query_one(Input)
        words.value = typed if typed == "nowhere" else str(own_folder.path.parent / typed)
        await screen.press_keys("enter")

        def read_texts() -> list[str]:
            return [screen.read_text(), *(notice.message for notice in screen.app._notifications)]

        await wait_until(screen.pilot, lambda: any(said in text for text in read_texts()))


async def test_more_and_fewer_iterations_and_all_of_the_level() -> None:
    async with open_app(recordings.open_recording("z2-offload")) as screen:
        assert "mean of 21, steps 1–23" in screen.read_text()
        assert "mean of 20, steps 2–23" in await screen.press_keys("minus")
        assert "mean of 10, steps 13–23" in await screen.press_keys("minus")
        assert "mean of 20" in await screen.press_keys("plus")
        assert "mean of 21" in await screen.press_keys("L")


async def test_other_signals_come_first_where_not_all_have_room() -> None:
    async with open_app(recordings.open_recording("story"), size=(80, 24)) as screen:
        first = screen.read_text()
        assert "GPU %" in first
        assert "power W" not in first
        second = await screen.press_keys("m", "m")
        assert "power W" in second
        assert "GPU %" not in second
        assert "GPU %" in await screen.press_keys("m", "m", "m")


async def test_a_long_header_leaves_the_table_its_rows() -> None:
    """One curve is there, and what the phases take in all."""
    async with open_app(recordings.open_recording("hardware-bus"), size=(80, 24)) as screen:
        text = screen.read_text()
        assert {"waves", "phases"} == set(screen.app.shown_screen.own_boxes)
        assert "CPU/2" in text
        assert "RSS GiB" not in text
        assert any(line.split()[:2] == ["iteration", "87.7"] for line in text.splitlines())


async def test_one_rank_or_all() -> None:
    async with open_app(recordings.open_recording("story")) as screen:
        assert "4 ranks" in screen.read_text()
        assert "rank 0 " in await screen.press_keys("e")
        assert "rank 1 " in await screen.press_keys("down")
        assert "rank 0 " in await screen.press_keys("up")
        assert "4 ranks" in await screen.press_keys("e")
        assert "rank 0 " in await screen.press_keys("down")


async def test_every_key_is_explained_and_the_bottom_row_names_what_works() -> None:
    async with open_app(recordings.open_recording("story"), size=(160, 50)) as screen:
        for binding in IterationScreen.BINDINGS:
            assert binding.id  # type: ignore[union-attr]
            assert binding.tooltip  # type: ignore[union-attr]
        bottom = screen.read_text().splitlines()[-1]
        assert "c pin" in bottom
        assert "e one rank" in bottom
        assert "m next signal" not in bottom
        for _, means in IterationScreen.TERMS:
            assert len(means.splitlines()) <= 2


async def test_a_tall_screen_has_the_chart_of_steps_below_the_tables() -> None:
    async with open_app(recordings.open_recording("story"), step=12, size=(200, 50)) as screen:
        assert "Iteration s" in screen.read_text()
    async with open_app(recordings.open_recording("story"), step=12, size=(120, 40)) as screen:
        assert "Iteration s" not in screen.read_text()


async def test_before_the_first_iteration_it_waits() -> None:
    recording = recordings.open_recording("z2-offload")
    async with open_app(recording) as screen:
        await screen.press_keys("home")
        assert (
            "Waiting for the training to begin" in screen.read_text()
            or "Waiting for the first iterations" in screen.read_text()
        )


async def test_entering_is_not_suggested_while_the_job_starts() -> None:
    async with open_app(recordings.open_recording("story")) as screen:
        await screen.press_keys("home", "full_stop")
        frame = screen.screen.frame
        assert frame is not None
        assert frame.view.ranks
        assert "Waiting for the training to begin" in screen.read_text()
        assert "--enter" not in screen.read_text()


async def test_a_panel_alone_gives_way_where_it_has_nothing_to_show() -> None:
    async with open_app(recordings.open_recording("z2-offload")) as screen:
        await screen.press_keys("tab", "tab", "z")
        assert screen.screen.zoomed == "phases"
        assert "GPU %" not in screen.read_text()
        assert "Waiting for the training to begin" in await screen.press_keys("home")
        assert "GPU %" not in await screen.press_keys("end")


async def test_without_a_probe_it_says_how_to_get_one(tmp_path: Path) -> None:
    rows = [
        make_record(PROCESSES, time_ns=int(now * S / 10), rss_bytes=10**9, cores_used=1.0, pid=4711, rank=0)
        for now in range(50)
    ]
    write_table(tmp_path, PROCESSES, make_identity(-1), *rows).close()
    recording = Recording(tmp_path, {"boot": "boot", "clock": {"unix_ns": BEGIN_NS, "monotonic_ns": 0}})
    async with open_app(recording) as screen:
        assert "zerotop attach 4711 --enter" in screen.read_text()


@pytest.mark.parametrize("glyphs", [BLOCKS, TEXTURES, ASCII], ids=lambda glyphs: glyphs.name)
async def test_any_size_and_any_characters(glyphs: Glyphs) -> None:
    async with open_app(recordings.open_recording("z2-offload"), size=(40, 12), glyphs=glyphs) as screen:
        for size in [(40, 12), (60, 16), (80, 24), (120, 40), (300, 90)]:
            await screens.resize(screen.pilot, size)
            for keys in ((), ("c", "minus", "m", "z"), ("c", "plus", "z")):
                text = await screen.press_keys(*keys)
                assert "Iteration" in text
                assert {len(line) for line in text.splitlines()} == {size[0]} or glyphs is ASCII
                assert glyphs is not ASCII or text.isascii()


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("story", 1.0), ("story", 40.0), ("cpu-clean", 30.0), ("blind-early-end", 60.0), ("host-killed", 900.0)],
)
async def test_jobs_without_steps_raise_nothing(name: str, seconds: float) -> None:
    watch = Watch(name, seconds)
    async with watch.app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        watch.app.action_switch("iteration")
        await pilot.pause()
        for key in ("c", "plus", "minus", "m", "e", "down", "L", "z"):
            await pilot.press(key)
        assert "Iteration" in watch.text()


@pytest.mark.parametrize("name", ["story", "z2-offload", "cpu-clean", "gpu-clean", "x4-z3"])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 4), (39, 7), (78, 14), (140, 44), (300, 80)])
def test_rows_fill_the_room_and_have_styles_that_exist(name: str, width: int, height: int) -> None:
    fold = fold_of(name)
    shown = ShownWaveform(fold, fold_of("z2-offload"), "other")
    rows = draw_waveform(shown, width, height, BLOCKS, GrowingScales()) + draw_phases(
        fold, shown.pinned, width, height, BLOCKS
    )
    assert len(rows) == 2 * height
    for row in rows:
        assert row_width(row) == width, row_text(row)
        for _, style in row:
            assert set(style.split("/")) <= set(STYLES), style


def test_curves_are_where_the_numbers_are() -> None:
    fold = fold_of("story", rank=0)
    rows = [row_text(row) for row in draw_waveform(ShownWaveform(fold), 114, 20, ASCII, GrowingScales())]
    lane = next(place for place, row in enumerate(rows) if row.startswith("GPU %"))
    left = len(rows[lane]) - 99
    columns = {second: left + round(second / (fold.iteration_s * 1.25) * 99) for second in (0.4, 1.7, 2.9)}
    depth = {second: next(row for row in range(5) if rows[lane + row][column] == "*") for second, column in columns.items()}
    assert depth[0.4] < depth[1.7] > depth[2.9]
    assert depth[1.7] == 4
    cores = next(place for place, row in enumerate(rows) if row.startswith("CPU/64"))
    assert rows[cores + 4][columns[0.4]] == "*"
    assert "*" in rows[cores + 1][columns[1.7]] + rows[cores + 2][columns[1.7]]


def test_lanes_share_the_room() -> None:
    assert layout_heights(20, 5) == [4, 4, 4, 4, 4]
    assert layout_heights(22, 5) == [5, 5, 4, 4, 4]
    assert layout_heights(9, 5) == [5, 4]
    assert layout_heights(3, 5) == [3]
    assert layout_heights(1, 5) == []
    assert layout_heights(91, 2) == [46, 45]


def test_small_changes_keep_their_decimals() -> None:
    one, other = fold_of("held-clean-z0"), fold_of("unseen-clean")
    assert one.iteration_s < 0.1  # so it is told to a tenth of a millisecond
    rows = [row_text(row) for row in draw_phases(one, other, 90, 8, BLOCKS)]
    heading = rows[0].index("change") + len("change")
    changes = [row[heading - 7 : heading].strip() for row in rows if row.startswith(("■", "iteration"))]
    assert changes
    assert all(re.fullmatch(r"[+−]?\d+\.\d|–", change) for change in changes), changes


def test_phases_within_others_give_way_first() -> None:
    def make_line(phase: str, depth: int, seconds: float) -> PhaseLine:
        return PhaseLine(phase, depth, seconds, None, None, None, 0.0, 0.0, 0.0)

    found = [
        make_line("forward", 0, 1.0),
        make_line("step", 0, 5.0),
        make_line("cpu_optimizer", 1, 4.0),
        make_line("iteration", 0, 6.0),
    ]
    assert [one.phase for one in choose_lines(found, 3)] == ["forward", "step", "iteration"]
    assert [one.phase for one in choose_lines(found, 2)] == ["step", "iteration"]
    assert [one.phase for one in choose_lines(found, 1)] == ["iteration"]
    assert choose_lines(found, 0) == []
    found[:0] = [make_line("data", 0, 0.5), make_line("backward", 0, 3.0)]
    shown = choose_lines(found, 4)
    assert [(one.phase, one.mean_s) for one in shown] == [
        ("backward", 3.0),
        ("step", 5.0),
        ("2 others", 1.5),
        ("iteration", 6.0),
    ]


def test_the_copied_text_has_all_numbers() -> None:
    fold = fold_of("z2-offload")
    heading, *rows = format_waveform(fold).splitlines()
    assert heading.split("\t")[:4] == ["position_s", "utilization", "utilization_p10", "utilization_p90"]
    assert len(rows) == 201
    assert all(len(row.split("\t")) == len(heading.split("\t")) for row in rows)
    phases = format_phases(fold, None).splitlines()
    assert phases[-1].startswith("iteration\t0\t0.32")
    assert len(phases) == len(fold.phases) + 2


async def test_keys_are_answered_while_folding_and_the_fold_before_stays_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, fold = threading.Event(), fold_iterations

    def fold_slowly(*arguments: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return fold(*arguments)

    async with open_app(recordings.open_recording("story")) as screen:
        before = screen.screen.folding.find_shown(screen.app.viewer.make_frame())
        monkeypatch.setattr(fold_cache, "fold_iterations", fold_slowly)
        screen.app.simulate_key("e")
        await asyncio.sleep(0.05)
        screen.app.simulate_key("z")
        while not screen.screen.zoomed:
            await asyncio.sleep(0.005)
        assert "4 ranks" in screen.read_text()
        gate.set()
        await screen.wait_until_settled()
        after = screen.screen.folding.find_shown(screen.app.viewer.make_frame())
        assert before is not None
        assert after is not None
        assert (before.fold.rank, after.fold.rank) == (None, 0)
        assert "rank 0 " in screen.read_text()


async def test_a_frame_in_which_nothing_changed_folds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_app(recordings.open_recording("story")) as screen:
        before = screen.screen.folding.find_shown(screen.app.viewer.make_frame())

        def fail_if_called(*_: object) -> None:
            raise AssertionError("folded again")

        monkeypatch.setattr("zerotop.analysis.waveform.fold_cache.fold_iterations", fail_if_called)
        monkeypatch.setattr("zerotop.ui.iteration.panels.draw_waveform", fail_if_called)
        for _ in range(3):
            screen.app.draw_frame()
            await screen.pilot.pause()
        assert screen.screen.folding.find_shown(screen.app.viewer.make_frame()) is before


async def test_sensors_slower_than_an_iteration_are_a_line_and_leave_room_for_the_steps() -> None:
    async with open_app(recordings.open_recording("hand-clean2"), size=(120, 50)) as seen:
        text = seen.read_text()
        (means,) = (line for line in text.splitlines() if line.startswith(" means "))
        assert "GPU 36.5 %, CPU 1.00 of 64, power 241 W, D2H 17.7 MB/s, H2D 0.12 GB/s" in means
        assert "CPU/64" not in text
        assert {"waves", "steps", "phases"} <= set(seen.app.shown_screen.own_boxes)


async def test_a_narrow_screen_shows_whole_means_and_the_whole_sentence() -> None:
    async with open_app(recordings.open_recording("hand-clean2"), size=(80, 24)) as seen:
        text = seen.read_text()
        assert "The CPU sets the pace: its phases take 32.1 ms of 34.0 ms, kernels 12.4 ms" in text
        (means,) = (line for line in text.splitlines() if line.startswith("means "))
        assert means.rstrip().endswith("MB/s")


async def test_where_the_cpu_sets_the_pace_launches_are_beside_what_the_gpu_computes() -> None:
    async with open_app(recordings.open_recording("hand-clean2"), size=(120, 50)) as seen:
        text = seen.read_text()
        assert "The CPU sets the pace: its phases take 32.1 ms of 34.0 ms, kernels 12.4 ms" in text
        bars = {line.split()[0]: line.count("▇") for line in text.splitlines() if line.startswith((" CPU l", " GPU c"))}
        assert bars["CPU"] == pytest.approx(bars["GPU"] * 32.1 / 12.4, rel=0.1)
        assert "CUDA ms" not in text  # which would be the time of the launches again
    async with open_app(recordings.open_recording("hand-fp32"), size=(120, 50)) as seen:
        assert "CPU launches" not in seen.read_text()  # the GPU is busy
        assert "CUDA ms" in seen.read_text()


async def test_only_the_finding_decides_that_the_cpu_sets_the_pace() -> None:
    """Phases are long where ranks wait for one another, too."""
    async with open_app(recordings.open_recording("hand-clean2"), size=(120, 50)) as seen:
        frame, folding = seen.screen.frame, seen.screen.folding
        assert frame is not None
        shown = folding.find_shown(frame)
        assert shown is not None
        assert shown.launches is not None
        others = tuple(one for one in frame.findings if one.name != "launch_bound")
        shown = folding.find_shown(dataclasses.replace(frame, findings=others))
        assert shown is not None
        assert shown.launches is None


async def test_steps_that_were_only_counted_have_one_number() -> None:
    """Some of them are left out for another reason, too, and the chart may have more steps than are folded."""
    async with open_app(recordings.open_recording("gpu-counted-leak"), size=(120, 50)) as seen:
        text = seen.read_text()
        assert len(re.findall(r"\d counted| only counted", text)) <= 1
        assert "counted" in text


async def test_the_steps_left_out_are_told_once() -> None:
    async with open_app(recordings.open_recording("hand-rank0"), size=(200, 50)) as seen:
        assert seen.read_text().count("excluded: 101 only counted, 50 outliers") == 1
        assert "Samples" in seen.read_text()


async def test_a_gpu_that_a_thread_keeps_waiting_is_not_said_to_wait_for_launches() -> None:
    """It is busy for 0.03 % of the time, which NVML's whole per cent do not resolve."""
    async with open_app(recordings.open_recording("hand-threads"), size=(120, 50)) as seen:
        text = seen.read_text()
        assert "CPU launches" not in text
        assert "The GPU idles 19.3 s of 19.3 s, 14.3 s of it in forward" in text


async def test_a_change_that_only_counted_steps_tell_begins_another_fold() -> None:
    async with open_app(recordings.open_recording("gpu-counted-pause"), size=(120, 50)) as seen:
        assert "Iteration 144 ms · mean of 3, steps 27–49" in seen.read_text()


async def test_a_rank_that_pauses_every_few_steps_is_shown_first_too() -> None:
    async with open_app(recordings.open_recording("hand-rank0"), size=(120, 50)) as seen:
        text = seen.read_text()
        assert "Rank 0 delays the other one by ≈62.8 ms on average" in text
        assert "steps 102–296 · rank 0 ─" in text  # the pauses began in step 101


def test_the_rank_that_the_others_wait_for_is_shown_first_before_a_finding_tells_it() -> None:
    recording = recordings.open_recording("held-straggler")
    frame = Viewer(RecordingSource(recording), None, lambda: 0.0).make_frame()  # its findings are not searched yet
    assert not frame.findings
    folding = FoldModel(RecordingSource(recording))
    folding.find_shown(frame)
    folding.finish_work()
    shown = folding.find_shown(frame)
    assert shown is not None
    assert shown.fold.rank == 0
    assert shown.delay.startswith("Rank 0 delays the other one")


async def test_the_rank_that_the_others_wait_for_is_shown_first() -> None:
    async with open_app(recordings.open_recording("held-straggler"), size=(120, 50)) as seen:
        assert "steps 12–35 · rank 0 ─" in seen.read_text()
        await seen.pilot.press("e")
        await wait_until(seen.pilot, lambda: "· 2 ranks ─" in seen.read_text())


@pytest.mark.parametrize(("name", "step"), [("story", 2), ("story", 9), ("gpu-gpt2", 1), ("gpu-gpt2", 9), ("gpu-gpt2", 12)])
def test_neither_the_header_nor_the_folded_iteration_holds_the_first_step(name: str, step: int) -> None:
    source = RecordingSource(recordings.open_recording(name))
    viewer = Viewer(source, None, lambda: 0.0)
    viewer.make_frame()
    viewer.go_to_step(step)
    frame, folding = viewer.make_frame(), FoldModel(source)
    folding.find_shown(frame)
    folding.finish_work()
    shown = folding.find_shown(frame)
    assert shown is not None
    assert shown.fold.first_step > 0
    assert shown.pace == ""
    assert frame.view.progress.recent_iterations == min(10, step)
    assert frame.view.progress.iteration_s == pytest.approx(shown.fold.iteration_s, rel=0.05)


@pytest.mark.parametrize(
    ("pace_s", "recent", "is_over", "text"),
    [
        (2.5, 10, False, ""),
        (math.nan, 10, False, ""),
        (1.2, 10, False, "Phases: of steps 11 to 13, which took 2.68 s; the mean of the last 10 is 1.20 s"),
        (1.2, 3, False, "Phases: of steps 11 to 13, which took 2.68 s; the mean of the last 3 is 1.20 s"),
        (5.2, 1, False, "Phases: of steps 11 to 13, which took 2.68 s; the last took 5.20 s"),
        (4.0, 10, True, "Phases: of steps 11 to 13, which took 2.68 s; the median is 4.00 s"),
    ],
)
def test_figures_of_another_pace_than_the_headers_say_so(pace_s: float, recent: int, is_over: bool, text: str) -> None:
    fold = fold_of("story")
    assert describe_pace(fold, pace_s, recent, is_over=is_over) == text
    shown = ShownWaveform(fold, pace=text)
    rows = [row_text(row) for row in draw_waveform(shown, 114, 20, BLOCKS, GrowingScales())]
    assert len(rows) == 20
    assert (rows[1].rstrip() == text) == bool(text)
