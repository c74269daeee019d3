"""The ranks screen in a terminal that is not there: its keys, its mouse, every recording, every size."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from recordings import open_recording, open_searched
from screens import read_rows
from small_recording import read_recording
from uneven_ranks import GIB, write_ranks
from waiting import wait_until
from zerotop.analysis.ranks.matrix import RankMetric
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.clipboard import collect_copy_text
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.dialogs.find_rank_dialog import FindRankDialog
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.ranks.screen import RankMap, RanksScreen, RankTable


def app_of(folder: Path, glyphs: Glyphs = BLOCKS) -> ZerotopApp:
    return ZerotopApp(RecordingSource(read_recording(folder)), title="ranks", glyphs=glyphs)


async def open_ranks(app: ZerotopApp, pilot: Pilot[Leaving]) -> RanksScreen:
    await pilot.pause()
    app.action_switch("ranks")
    await pilot.pause()
    assert isinstance(app.screen, RanksScreen)
    return app.screen


def rank_of(screen: RanksScreen) -> int | None:
    assert screen.frame is not None
    return screen.frame.rank


@pytest.fixture(scope="module")
def six_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("six")
    write_ranks(folder, 6, 12, late_s={4: 0.1}, more_bytes={2: 4 * GIB})
    return folder


async def test_the_different_rank_stands_first_and_is_named(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_ranks(app, pilot)
        lines = read_rows(app)
        first = next(place for place, line in enumerate(lines) if "Ranks: delays others ms" in line)
        assert "Rank 4 delays the others by 93.4 ms" in lines[first + 1]
        assert next(line for line in lines[first + 2 :] if line[:4].strip(" ›").isdigit())[:4].strip(" ›") == "4"
        assert any("Rank 4 node000" in line for line in lines)


async def test_keys_turn_to_other_metrics_and_back(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        assert screen.ranking.metric is RankMetric.WAIT  # a rank delays the others
        await pilot.press("m")
        assert screen.ranking.metric is RankMetric.PEAK
        assert any("Ranks: peak allocated GiB" in line for line in read_rows(app))
        await pilot.press("M", "M", "M")
        assert screen.ranking.metric is RankMetric.OTHER
        for _ in screen.ranking.recorded_metrics:
            await pilot.press("m")
        assert screen.ranking.metric is RankMetric.OTHER


async def test_metrics_that_were_not_recorded_are_skipped(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 4, sampled=False)
    app = app_of(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await open_ranks(app, pilot)
        await pilot.press("m", "m")
        assert screen.ranking.metric is RankMetric.DATA
        await pilot.press("down")
        assert rank_of(screen) == 1  # though no sampler saw the processes


async def test_up_and_down_follow_the_order_that_is_shown(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        chosen = []
        for key in ("up", "up", "down", "down", "down"):
            await pilot.press(key)
            chosen.append(rank_of(screen))
        assert chosen == [4, 4, 0, 1, 2]
        await pilot.press("o", "down", "down", "down", "down")
        assert rank_of(screen) == 5
        assert any("by number" in line for line in read_rows(app))


async def test_a_line_is_clicked(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        place = screen.query_one(RankMap)
        lines = read_rows(app)
        row = next(y for y, line in enumerate(lines) if line[:4].strip(" ›") == "3")
        await pilot.click(RankMap, offset=(10, row - place.region.y))
        assert rank_of(screen) == 3
        await pilot.click(RankMap, offset=(10, 0))  # the title is of no rank
        assert rank_of(screen) == 3


async def test_enter_goes_to_that_ranks_timeline(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_ranks(app, pilot)
        await pilot.press("up", "enter")
        await pilot.pause()
        assert app.screen.id == "timeline"
        assert app.viewer.make_frame().rank == 4
        app.action_switch("ranks")
        await pilot.pause()
        assert any("Rank 4 node000" in line for line in read_rows(app))


async def test_settings_stay_while_another_screen_is_shown(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        await pilot.press("m", "o")
        app.action_switch("live")
        await pilot.pause()
        assert await open_ranks(app, pilot) is screen
        assert (screen.ranking.metric, screen.ranking.by_number) == (RankMetric.PEAK, True)


async def test_the_map_goes_with_the_cursor(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        await pilot.press("home")
        assert any("No rank" in line for line in read_rows(app))
        app.viewer.go_to_step(4)
        app.draw_frame()
        await pilot.pause()
        assert screen.frame is not None
        assert screen.ranking.make_picture(screen.frame).matrix.steps.tolist() == [0, 1, 2, 3, 4]


async def test_the_numbers_can_be_copied(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        matrix = collect_copy_text(screen).split("\n")
        assert matrix[0].split("\t")[:2] == ["rank, wait_s", "step 0"]
        assert [line.split("\t")[0] for line in matrix[1:]] == ["4", "0", "1", "2", "3", "5"]
        screen.query_one(RankTable).focus()
        await pilot.pause()
        table: dict[str, str] = dict(line.split("\t", 2)[:2] for line in collect_copy_text(screen).split("\n"))
        assert table["figure"] == "rank 4"
        assert float(table["peak_bytes"]) == pytest.approx(30 * GIB, rel=1e-5)


async def test_terms_and_keys_are_explained(six_ranks: Path) -> None:
    app = app_of(six_ranks)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        bindings = [binding for _, binding, _, _ in screen.active_bindings.values()]
        own = [binding for binding in bindings if binding.id and binding.id.startswith("ranks.")]
        assert len(own) == len(RanksScreen.BINDINGS) - 2  # those of several nodes
        assert all(binding.tooltip and binding.description for binding in own)
        assert all(len(line) <= 120 for _, meaning in RanksScreen.TERMS for line in meaning.split("\n"))


@pytest.mark.parametrize(
    ("name", "glyphs", "size"),
    [
        ("cpu-straggler", ASCII, (80, 24)),
        ("cpu-dead", TEXTURES, (40, 12)),
        ("x4-z3", BLOCKS, (120, 40)),
        ("z2-oom", BLOCKS, (80, 24)),
        ("story", BLOCKS, (300, 90)),
    ],
)
async def test_real_recordings_have_their_ranks(name: str, glyphs: Glyphs, size: tuple[int, int]) -> None:
    app = ZerotopApp(RecordingSource(open_recording(name)), title=name, glyphs=glyphs)
    async with app.run_test(size=size) as pilot:
        screen = await open_ranks(app, pilot)
        for _ in screen.ranking.recorded_metrics:
            await pilot.press("m")
        lines = read_rows(app)
        assert all(len(line) == size[0] for line in lines)
        assert any("Ranks: " in line for line in lines)
        assert glyphs is not ASCII or all(line.isascii() for line in lines)


async def test_the_straggler_of_a_real_job_is_named() -> None:
    app = ZerotopApp(RecordingSource(open_recording("cpu-straggler")), title="straggler")
    async with app.run_test(size=(120, 40)) as pilot:
        await open_ranks(app, pilot)
        assert any("Rank 1 delays the other one by" in line for line in read_rows(app))


async def test_a_thousand_ranks(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1024, 3, late_s={700: 0.2}, sampled=False)
    app = app_of(tmp_path)
    async with app.run_test(size=(200, 50)) as pilot:
        screen = await open_ranks(app, pilot)
        assert any("Rank 700 delays the others by" in line for line in read_rows(app))
        await pilot.press("up")
        assert rank_of(screen) == 700


async def test_a_rank_alone_is_compared_with_nobody() -> None:
    app = ZerotopApp(RecordingSource(open_recording("gpu-leak")), title="alone", glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        await pilot.press("end")
        table = screen.query_one(RankTable)
        await wait_until(pilot, lambda: "iteration" in table.plain_text())
        for words in ("median", "diff", "delays others"):
            assert words not in table.plain_text().replace("median cores", "")


@pytest.mark.parametrize(
    ("name", "said", "later"),
    [
        ("cpu-hang", "The other rank waits for rank 1.", "In step 20 the other rank waited for rank 1."),
        ("cpu-stuck", "The others wait for rank 2.", "In step 60 the others waited for rank 2."),
    ],
)
async def test_a_hang_names_the_rank_that_the_others_wait_for(name: str, said: str, later: str) -> None:
    """Beneath a banner about a hang, "No rank delays the other one" would contradict it."""
    source = open_searched(name)
    over_ns = next(finding.end_ns for finding in source.findings_at(None) if finding.name == "hung_ranks")
    app = ZerotopApp(source, title=name, glyphs=BLOCKS)
    async with app.run_test(size=(120, 40)) as pilot:
        await open_ranks(app, pilot)
        await wait_until(pilot, lambda: any(later in line for line in read_rows(app)))
        app.viewer.go_to_ns(over_ns - 1)
        await wait_until(pilot, lambda: any(said in line for line in read_rows(app)))
        assert not any("No rank delays" in line for line in read_rows(app))
        assert any(f"Rank {said[-2]} vm" in line for line in read_rows(app))  # compared with the others


async def test_a_node_is_opened_closed_and_found(tmp_path: Path) -> None:
    write_ranks(tmp_path, 72, 4, late_s={43: 0.2}, sampled=False)
    app = app_of(tmp_path)

    def has_line(label: str) -> bool:
        return any(line.strip("› ").startswith(label) for line in read_rows(app))

    async with app.run_test(size=(120, 40)) as pilot:
        screen = await open_ranks(app, pilot)
        assert has_line("▸node005 40-47")
        await pilot.press("enter")
        await wait_until(pilot, lambda: has_line("▾node005 40-47") and has_line("43 "))
        assert app.screen is screen
        await pilot.press("escape")
        await wait_until(pilot, lambda: has_line("▸node005 40-47"))
        await pilot.press("slash", *"rank 30", "enter")
        await wait_until(pilot, lambda: has_line("▾node003 24-31") and rank_of(screen) == 30)
        await pilot.press("slash", *"5", "enter")
        await wait_until(pilot, lambda: has_line("▾node000 0-7") and rank_of(screen) == 5)
        await pilot.press("slash", *"node008", "enter")
        await wait_until(pilot, lambda: has_line("▸node008 64-71") and rank_of(screen) == 64)
        await pilot.press("slash", *"node", "enter")
        await pilot.pause()
        assert isinstance(app.screen, FindRankDialog)  # which of them?
        await pilot.press("escape", "N")
        await wait_until(pilot, lambda: not has_line("▸node008 64-71"))
        await pilot.press("N", "enter", "enter")
        await wait_until(pilot, lambda: app.screen.id == "timeline")  # of the rank of an open node
