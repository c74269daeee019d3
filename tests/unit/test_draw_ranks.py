"""The ranks screen as strings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recordings import open_recording, open_searched
from small_recording import read_recording
from uneven_ranks import GIB, write_ranks
from zerotop.analysis.live_view import JobState
from zerotop.analysis.ranks.delays import RankDelay
from zerotop.analysis.ranks.matrix import RankMatrices, RankMetric
from zerotop.analysis.ranks.outliers import Skew, find_skew
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.playhead import Playhead
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.drawing.formatting import format_duration
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.ranks.heatmap import MapRows, draw_map, max_shown_steps
from zerotop.ui.ranks.iteration_bars import draw_iteration_bars
from zerotop.ui.ranks.labels import describe_alike, describe_skew
from zerotop.ui.ranks.lines import plan_lines
from zerotop.ui.ranks.model import METRICS, Ranking, RankPicture, describe_empty
from zerotop.ui.ranks.section import choose_heat_range
from zerotop.ui.ranks.table import draw_table


def make_picture(
    folder: Path,
    metric: RankMetric = RankMetric.ITERATION,
    *,
    by_number: bool = False,
    rank: int | None = None,
    by_node: bool | None = None,
    opened: str = "",
) -> RankPicture:
    source = RecordingSource(read_recording(folder))
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    viewer.playhead = Playhead(lambda: 0.0)
    if rank is not None:
        viewer.make_frame()
        viewer.set_rank(rank)
    ranking.choose_metric(metric)
    ranking.by_number, ranking.by_node, ranking.opened = by_number, by_node, opened
    return ranking.make_picture(viewer.make_frame(), 60)


def read_map(drawn: MapRows) -> list[str]:
    return [row_text(row).rstrip() for row in drawn.rows]


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    write_ranks(folder, 3, 6, late_s={1: 0.1}, more_bytes={2: 4 * GIB})
    return folder


def test_the_map_and_other_metrics_in_the_spare_room(three_ranks: Path) -> None:
    assert read_map(draw_map(make_picture(three_ranks), 60, 14, ASCII)) == [
        "Ranks: iteration s  outliers first ---- 0.95 .:-=+*oO#@ 1.25",
        " Rank 1 delays the others by 93.4 ms (9 %) for its data.",
        ">1 ::::::::::::::::::::::::::::::::::::::::::::::::::   1.00",
        " 0 ::::::::::::::::::::::::::::::::::::::::::::::::::   1.00",
        " 2 ::::::::::::::::::::::::::::::::::::::::::::::::::   1.00",
        "data ms ----------------------------------- 0 .:-=+*oO#@ 110",
        ">1 @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@    103",
        " 0 ..................................................      9",
        " 2 ..................................................      9",
        "delays others ms -------------------------- 0 .:-=+*oO#@ 100",
        ">1 @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@     93",
        " 0 ..................................................      0",
        " 2 ..................................................      0",
        "  +0-------1--------2-------3-------4--------5-------",
    ]


def test_it_opens_on_the_rank_that_delays_the_others(three_ranks: Path) -> None:
    source = RecordingSource(read_recording(three_ranks))
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    picture = ranking.make_picture(viewer.make_frame(), 60)
    assert (picture.metric, picture.chosen) == (RankMetric.WAIT, 1)
    assert picture.other_metrics[0] is RankMetric.DATA  # in which it does so
    assert picture.table_rows[0].metric is RankMetric.WAIT
    viewer.set_rank(2)
    assert ranking.make_picture(viewer.make_frame(), 60).chosen == 2


def test_a_delay_is_counted_from_where_it_began() -> None:
    skew = find_skew(
        RankMatrices().matrix_at(
            RecordingSource(open_recording("cpu-straggler")).rank_steps, 2**62, 64, meets_in_forward=False
        )
    )
    assert skew is not None
    assert skew.delays_others
    assert skew.since_step == 15


def test_by_number_and_by_another_metric(three_ranks: Path) -> None:
    assert read_map(draw_map(make_picture(three_ranks, RankMetric.PEAK, by_number=True, rank=2), 60, 6, ASCII)) == [
        "Ranks: peak allocated GiB  by number -- 28.0 .:-=+*oO#@ 37.0",
        " Rank 1 delays the others by 93.4 ms (9 %) for its data.",
        " 0 --------------------------------------------------   30.0",
        " 1 --------------------------------------------------   30.0",
        ">2 oooooooooooooooooooooooooooooooooooooooooooooooooo   34.0",
        "  +0-------1--------2-------3-------4--------5-------",
    ]


def test_the_colours_of_free_memory_rise_with_it_as_in_all_maps(three_ranks: Path) -> None:
    rows = read_map(draw_map(make_picture(three_ranks, RankMetric.FREE), 60, 6, ASCII))
    assert rows[0] == "Ranks: least free GiB  outliers first ---- 85 .:-=+*oO#@ 110"
    assert [row[8] for row in rows[2:5]] == ["-", ":", ":"]
    assert [row[-2:] for row in rows[2:5]] == ["90", "89", "88"]


def test_the_table(three_ranks: Path) -> None:
    rows = draw_table(make_picture(three_ranks, rank=1), 46, 13, BLOCKS)
    assert [row_text(row).rstrip() for row in rows] == [
        "Rank 1 node000 ──────── rank ── others ── diff",
        "  delays others     93.4 ms    0.0 ms     more",
        "  iteration         1.00 s    1.00 s       0 %",
        "■ data               103 ms      9 ms      ×11",
        "■ forward            187 ms    187 ms      0 %",
        "■ backward          0.47 s    0.56 s     −17 %",
        "■ step               233 ms    233 ms      0 %",
        "■ between phases    10.0 ms   10.0 ms      0 %",
        "  peak allocated    30.0 GiB  30.0 GiB     0 %",
        "  least free        89.0 GiB  89.0 GiB     0 %",
        "  CPU cores         2.00      2.00         0 %",
        "  steps 1–5: mean times, median cores",
        "",
    ]
    styles = {row_text(row)[:12].strip(): row[-1][1] for row in rows}
    assert styles["■ data"] == "warn"  # metrics that differ are highlighted
    assert styles["■ forward"] == "muted"


def test_more_ranks_than_rows_share_them(tmp_path: Path) -> None:
    write_ranks(tmp_path, 40, 6, late_s={9: 0.1}, sampled=False)
    drawn = draw_map(make_picture(tmp_path, RankMetric.WAIT), 60, 26, BLOCKS)
    rows = read_map(drawn)[4:]
    assert [row[:4] for row in rows[:4]] == ["› 9 ", "  1 ", "  3 ", "  5 "]  # the upper rank of two, or the chosen one
    assert rows[0][6] == "▀"  # rank 9, and rank 0 under it
    assert drawn.ranks[4] == 9
    rows = read_map(draw_map(make_picture(tmp_path, RankMetric.WAIT, rank=0), 60, 12, BLOCKS))
    assert [row[:9].strip("› ") for row in rows[2:9]] == ["9", "0", "node000", "node001", "node002", "node003", "node004"]


def test_a_thousand_ranks_are_grouped(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1024, 3, late_s={700: 0.2, 3: 0.1}, sampled=False)
    plan = plan_lines(make_picture(tmp_path, RankMetric.WAIT, rank=0, by_node=False), 40, BLOCKS)
    assert [line.label for line in plan.lines[:5]] == ["700", "3", "0", "0-31", "32-63"]
    assert plan.height <= 40
    assert sorted(row for line in plan.lines for row in line.matrix_rows) == list(range(1024))  # each rank has one line


@pytest.mark.parametrize("glyphs", [BLOCKS, TEXTURES, ASCII], ids=lambda glyphs: glyphs.name)
@pytest.mark.parametrize("ranks", [0, 1, 2, 9, 70])
def test_every_size_is_drawn(tmp_path: Path, glyphs: Glyphs, ranks: int) -> None:
    write_ranks(tmp_path, ranks, 4, late_s={1: 0.1}, sampled=ranks != 9)
    for metric in METRICS:
        picture = make_picture(tmp_path, metric)
        for width, height in ((1, 1), (8, 3), (20, 5), (40, 12), (80, 24), (300, 90)):
            drawn = draw_map(picture, width, height, glyphs)
            table = draw_table(picture, width, height, glyphs)
            for rows in (drawn.rows, table):
                assert [row_width(row) for row in rows] == [width] * height
                assert glyphs is not ASCII or all(row_text(row).isascii() for row in rows)
            assert all(0 <= row < height for row in drawn.ranks)
            assert max_shown_steps(width) >= 1


def test_an_empty_map_says_what_is_missing(tmp_path: Path) -> None:
    """These recordings have ended; the same function describes a running job without steps."""
    write_ranks(tmp_path, 0, 0)
    assert "No rank finished a step" in " ".join(read_map(draw_map(make_picture(tmp_path), 60, 6, BLOCKS)))
    recording = read_recording(tmp_path)
    assert describe_empty(recording, (), JobState.STARTING).startswith("No rank trains yet")
    write_ranks(tmp_path, 2, 0)
    assert "No rank finished a step" in " ".join(read_map(draw_map(make_picture(tmp_path), 60, 6, BLOCKS)))
    processes = RecordingSource(read_recording(tmp_path)).rank_steps
    assert describe_empty(recording, processes, JobState.RUNNING).startswith("No rank has finished a step yet")


def test_a_job_without_a_probe_is_recognized(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 4)
    for file in tmp_path.glob("spans-*"):
        file.unlink()
    assert "only watched from" in " ".join(read_map(draw_map(make_picture(tmp_path), 60, 6, BLOCKS)))
    assert "No rank trains yet" in describe_empty(read_recording(tmp_path), (), JobState.STARTING)


def test_sentences_about_skew() -> None:
    late = Skew(44, 20, 8, RankMetric.DATA, 3, 0.31, 0.02, 2.75, 0.31, 0.31, 44)
    assert describe_skew(late, 3, 8) == (
        "Rank 3 delays the others by 310 ms (11 % of an iteration) in each step since step 20:"
        " it averages 310 ms for its data, the others 20.0 ms.",
        "Rank 3 delays the others by 310 ms (11 %) for its data.",
        True,
    )
    assert describe_skew(Skew(1, None, 2, RankMetric.OTHER, 0, 1.5, 0.5, 4.0, 1.0, 1.0, 1), 0, 2)[0] == (
        "Rank 0 delays the other one by 1.00 s (25 % of an iteration) in the only step:"
        " it spends 1.50 s between the phases, the other one 500 ms."
    )
    few = replace(late, since_step=None, timed_steps=12)
    assert ", estimated from 12 of the last 44 steps: it averages" in describe_skew(few, 3, 8)[0]
    assert ", estimated from 12 of the 44 steps since step 20: " in describe_skew(replace(few, since_step=20), 3, 8)[0]
    assert describe_skew(replace(few, fewest_timed=5), 3, 8)[0] == (
        "Too few steps to compare phases: of the last 44 steps only 5 of a rank were recorded with phases."
    )
    assert describe_skew(late, 3, 8, names_iteration=True)[1] == (
        "Rank 3 delays the others by 310 ms (11 % of 2.75 s) for its data."
    )
    assert describe_skew(replace(late, is_clear=False), 3, 8)[1] == "No rank is clearly slower."
    assert describe_alike([RankMetric.DATA, RankMetric.CORES], 0.00207) == (
        "less than 2.07 ms apart: data; alike on all ranks: CPU cores"
    )
    early = replace(late, delay_s=0.01)  # it makes up for its data in another phase: nobody waits for it
    assert describe_skew(early, 3, 8)[0].startswith(
        "Rank 3 takes 310 ms for its data in each step since step 20, the others"
    )
    for own in (0.55, 0.95):  # ranks wait for one another in step(), however long: the one that waits is not to blame
        text, _, is_warning = describe_skew(Skew(9, None, 8, RankMetric.STEP, 0, own, 0.5, 1.0, 0.0, 0.02, 9), 0, 8)
        assert text.startswith("No rank delays the others by more than 2.0 % of an iteration. Rank 0 is in step for")
        assert not is_warning
    assert describe_skew(Skew(9, None, 8, RankMetric.STEP, 0, 0.95, 0.5, 1.0, 0.0, 0.2, 9), 0, 8)[2]  # somebody is late
    alike = describe_skew(Skew(9, None, 8, RankMetric.STEP, 0, 0.505, 0.5, 1.0, 0.0, 0.0, 9), 0, 8)
    assert (
        alike[0]
        == "All 8 ranks take the same time: in the last 9 steps no phase differs by more than 0.5 % of an iteration."
    )
    assert describe_skew(None, None, 1)[0].startswith("One rank")
    assert describe_skew(None, None, 4)[0].startswith("Ranks are compared once two")
    assert Skew(9, None, 8, RankMetric.STEP, 0, math.nan, math.nan, 0.0, 0.0, 0.0, 9).iteration_share == 0.0


def test_with_much_room_lines_are_taller_and_maps_have_gaps(three_ranks: Path) -> None:
    rows = read_map(draw_map(make_picture(three_ranks), 160, 100, ASCII))
    titles = [place for place, row in enumerate(rows) if row.endswith(tuple("0123456789")) and "@ " in row and ".:-" in row]
    assert len(titles) == 1 + len(make_picture(three_ranks).other_metrics)
    assert len([row for row in rows[: titles[1]] if row.lstrip(" >").startswith(("0 ", "1 ", "2 "))]) == 3
    assert titles[1] == 2 + 3 * 6 + 1
    assert all(not rows[title - 1] for title in titles[1:])
    assert rows[2].count(":") == 6 * 24


def test_figures_are_of_the_steps_since_a_rank_began_to_delay_the_other() -> None:
    """The sentence, the chosen rank, the table and the values beside the map agree with the finding under the header."""
    source = open_searched("cpu-straggler")
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    viewer.go_to_step(24)  # 10 of its 25 steps are slow: means of all of them show less
    frame = viewer.make_frame()
    assert {finding.step for finding in frame.findings if finding.name == "straggler"} == {15}
    picture = ranking.make_picture(frame, 60)
    assert (picture.chosen, picture.metric) == (1, RankMetric.WAIT)
    assert picture.skew is not None
    assert picture.skew.since_step == 15
    rows = draw_table(picture, 46, 13, BLOCKS)
    assert any("steps 15–24: mean times" in row_text(row) for row in rows)
    (delay,) = (row for row in picture.table_rows if row.metric is RankMetric.WAIT)
    assert delay.own > 0.04
    assert delay.usual == 0
    viewer.go_to_step(14)
    rows = draw_table(ranking.make_picture(viewer.make_frame(), 60), 46, 13, BLOCKS)
    assert any("steps 1–14" in row_text(row) for row in rows)


def test_a_finding_about_a_late_rank_is_of_the_steps_that_figures_are_of() -> None:
    """Its first five steps showed 119 ms, or 49 % of an iteration; means of those since then are 121 ms and 56 %."""
    source = open_searched("held-straggler")
    frame = Viewer(source, None, lambda: 0.0).make_frame()
    (late,) = (finding for finding in frame.findings if finding.name == "straggler")
    assert late.details.startswith("In steps 12 to 33 ")
    skew = Ranking(source).make_picture(frame, 60).skew
    assert skew is not None
    assert skew.since_step == late.step
    assert late.evidence["late_s"] == pytest.approx(skew.delay_s, abs=0.0015)
    assert late.cost == pytest.approx(skew.delay_share, abs=0.025)
    assert late.headline == "Rank 0 delays each iteration by 120 ms (54 %) from step 12 on"
    long, short, _ = describe_skew(skew, 0, 2)
    assert long.startswith(
        "Rank 0 delays the other one by 120 ms (54 % of an iteration) from step 12 on: it averages 121 ms "
    )
    assert short == "Rank 0 delays the other one by 120 ms (54 %) between the phases."


def test_a_delay_that_differs_from_the_told_one_has_its_own_number(three_ranks: Path) -> None:
    processes = RecordingSource(read_recording(three_ranks)).rank_steps
    for late_s, said in ((0.1, "by 100 ms (11 %"), (0.4, "by 93.4 ms (9 %"), (math.nan, "by 93.4 ms (9 %")):
        delays = (RankDelay(1, 0, 0, late_s, 0.11),)
        skew = find_skew(RankMatrices().matrix_at(processes, 2**62, 64, meets_in_forward=False, delays=delays))
        assert said in describe_skew(skew, 1, 3)[0]


def test_sentence_table_and_map_are_of_the_same_steps() -> None:
    """A pause in every fourth step, seen in 19 of 64: a median or the last step would hide it, and a sum of parts differ."""
    source = RecordingSource(open_recording("hand-rank0"))
    picture = Ranking(source).make_picture(Viewer(source, None, lambda: 0.0).make_frame(), 60)
    assert picture.skew is not None
    drawn = draw_map(picture, 90, 40, ASCII)
    assert drawn.sections
    for _, section in drawn.sections:
        (row,) = (row for row in picture.table_rows if row.metric is section.metric)
        lines = {
            int(line.matrix_rows[0]): float(value)
            for line, value in zip(section.plan.lines, section.usual_values, strict=True)
        }
        assert [lines[picture.skew.row], lines[1 - picture.skew.row]] == pytest.approx([row.own, row.usual])
    (delay,) = (row for row in picture.table_rows if row.metric is RankMetric.WAIT)
    late = f"Rank {picture.skew.row} delays the other one by {format_duration(delay.own)} "
    assert late in " ".join(read_map(drawn))
    timed, steps = picture.matrix.figured_steps, picture.matrix.recent_count
    assert timed < steps
    assert f"estimated from {timed} of the last {steps} steps" in " ".join(" ".join(read_map(drawn)).split())
    assert any(f"≈ estimated from {timed} of them" in row_text(row) for row in draw_table(picture, 46, 13, BLOCKS))
    titles = [row for row in read_map(drawn) if "delays others ms" in row]
    assert all(title.endswith("+") for title in titles)  # the pauses are beyond the colours, which would hide all else


def test_a_delay_that_is_over_does_not_cut_the_figures(tmp_path: Path) -> None:
    write_ranks(tmp_path, 2, 12, sampled=False)
    source = RecordingSource(read_recording(tmp_path))
    begin_ns = int(source.rank_steps[1].step_rows["begin_unix_ns"][4])
    matrix = RankMatrices().matrix_at(
        source.rank_steps, 2**62, 64, meets_in_forward=False, delays=(RankDelay(rank=1, begin_ns=begin_ns),)
    )
    assert matrix.recent_steps.tolist() == list(range(1, 12))
    assert not matrix.is_delayed


def test_where_no_rank_is_late_the_sentence_has_the_figures_of_the_table() -> None:
    source = RecordingSource(open_recording("story"))
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    for step in range(source.last_step or 0):
        viewer.go_to_step(step)
        picture = ranking.make_picture(viewer.make_frame(), 60)
        if picture.skew is not None and picture.skew.is_effect and not picture.skew.is_alike:
            (row,) = (row for row in picture.table_rows if row.metric is picture.skew.metric)
            assert (picture.skew.own_s, picture.skew.usual_s) == pytest.approx((row.own, row.usual))
            return
    pytest.fail("no step has ranks that wait for one another")


def test_the_bars_of_phases_end_where_the_axis_has_the_sum() -> None:
    """In any height, also where the ticks leave rows above them."""
    source = RecordingSource(open_recording("hand-rank0"))
    picture = Ranking(source).make_picture(Viewer(source, None, lambda: 0.0).make_frame(), 60)
    (whole,) = (row.own for row in picture.table_rows if row.metric is RankMetric.ITERATION)
    for height in range(12, 24):
        rows = [row_text(row) for row in draw_iteration_bars(picture, "other", 46, height, BLOCKS)]
        axis = next(place for place, row in enumerate(rows) if "└" in row)
        ticks = {place: float(row.split("┤")[0]) / 1e3 for place, row in enumerate(rows) if "┤" in row}
        place, value = max(ticks.items())
        row_value = value / (axis - place)  # of a row, by the lowest tick
        top = next(place for place, row in enumerate(rows) if row[10:11].strip("▔│ ") and place > 1)
        assert (axis - top) * row_value == pytest.approx(whole, abs=1.1 * row_value), height


def test_the_table_always_says_which_steps_it_is_of() -> None:
    source = RecordingSource(open_recording("hand-rank0"))
    picture = Ranking(source).make_picture(Viewer(source, None, lambda: 0.0).make_frame(), 60)
    for width, height in ((80, 5), (80, 30), (46, 5), (46, 30)):
        rows = [row_text(row) for row in draw_table(picture, width, height, BLOCKS)]
        assert any("steps 236–299" in row for row in rows)
        assert any("≈ estimated from 19 of" in row for row in rows)


@pytest.mark.parametrize(
    ("unread", "note"), [(4, "peak: of 1 of them, the last 5"), (3, "peak: of 2 of them, the last 5"), (2, "")]
)
def test_the_table_says_that_the_peak_is_of_few_steps(three_ranks: Path, unread: int, note: str) -> None:
    picture = make_picture(three_ranks, rank=1)
    values = picture.find_values(RankMetric.PEAK).copy()
    values[:, 1 : 1 + unread] = np.nan  # of steps 1 to 5
    rows = draw_table(replace(picture, metric=RankMetric.PEAK, values=values), 46, 20, BLOCKS)
    notes = [row_text(row).strip() for row in rows if "peak: of" in row_text(row)]
    assert len(notes) == bool(note)
    assert all(one == note for one in notes)


@pytest.mark.parametrize(("name", "is_estimate"), [("hand-rank0", True), ("hand-threads", True), ("held-straggler", False)])
def test_estimated_figures_are_marked_in_the_table_and_beside_the_map(name: str, is_estimate: bool) -> None:
    source = RecordingSource(open_recording(name))
    picture = Ranking(source).make_picture(Viewer(source, None, lambda: 0.0).make_frame(), 60)
    rows = [row_text(row) for row in draw_table(picture, 46, 30, BLOCKS)]
    for label, is_marked in (("between phases", is_estimate), ("iteration", False), ("CPU cores", False)):
        (row,) = (row for row in rows if label in row)
        assert ("≈" in row) is is_marked
    assert any("mean times, median cores" in row for row in rows)
    drawn = draw_map(picture, 90, 40, ASCII)
    (section,) = (section for _, section in drawn.sections if section.metric is RankMetric.OTHER)
    assert any("~" in row_text(row) for row in section.draw_rows()) is is_estimate


def test_colours_of_a_time_that_few_steps_have_reach_up_to_it() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, 40] = 0.3
    low, high = choose_heat_range(values, RankMetric.APART, {})
    assert (low, high) == (0, pytest.approx(0.3))


@pytest.mark.parametrize("name", ["unseen-clean", "held-crowded", "x4-z3", "cpu-stuck"])
def test_no_rank_stands_out_in_a_phase_where_the_sentence_says_that_they_take_the_same_time(name: str) -> None:
    source = open_searched(name)
    last = max(int(process.step_rows["step"][-1]) for process in source.rank_steps)
    viewer, ranking = Viewer(source, None, lambda: 0.0), Ranking(source)
    for step in (last, last // 2):
        viewer.go_to_step(step)
        picture = ranking.make_picture(viewer.make_frame(), 60)
        assert picture.skew is not None
        odd = {metric for metric in picture.matrix.times if picture.find_deviation(metric).any()}
        text = describe_skew(picture.skew, 0, picture.skew.ranks)[0]
        assert not odd or "take the same time" not in text
        told = {row.metric for row in picture.table_rows if not row.is_alike}
        assert not told & set(picture.alike_metrics)


def test_a_metric_of_which_no_value_is_known_is_not_drawn(three_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = make_picture(three_ranks)
    assert RankMetric.PEAK in {*picture.other_metrics, *picture.alike_metrics}
    read = RankPicture.find_values

    def find_no_peak(picture: RankPicture, metric: RankMetric) -> np.ndarray:
        values = read(picture, metric)
        return np.full_like(values, np.nan) if metric is RankMetric.PEAK else values

    monkeypatch.setattr(RankPicture, "find_values", find_no_peak)
    picture = make_picture(three_ranks)
    assert RankMetric.PEAK not in {*picture.other_metrics, *picture.alike_metrics}
