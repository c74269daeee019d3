"""The timeline as the strings it draws."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from recordings import list_recordings, open_searched
from small_recording import make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.live_view import JobState
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.drawing.formatting import format_time_span
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES, Glyphs
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.timeline.drawing import chart_begin, chart_cells, draw_empty, draw_timeline
from zerotop.ui.timeline.labels import find_cursor_value, format_moment
from zerotop.ui.timeline.lanes import LANES, LANES_BY_NAME, MARKS, RIBBONS, SUMMARY, TIME, count_ribbons, layout_lanes
from zerotop.ui.timeline.model import PictureBuilder
from zerotop.ui.timeline.picture import Picture
from zerotop.ui.timeline.window import TimelineView
from zerotop_probe.recording.tables import BOUNDARY, LOGGED, LOGGED_BITS, PROCESSES, SPANS

S = 10**9
EVERYTHING = {metric.name for lane in LANES for metric in lane.metrics}

open_once = lru_cache(open_searched)


class Look:
    """A timeline at a moment of a recording, drawn without a terminal."""

    def __init__(self, name: str, step: int | None = None, *, rank: int = 0) -> None:
        self.viewer = Viewer(open_once(name), None, lambda: 0.0)
        self.view = TimelineView()
        self.pictures = PictureBuilder(self.viewer.source, self.view)
        self.viewer.make_frame()
        if rank:
            self.viewer.choose_rank(rank)
        if step is not None:
            self.viewer.go_to_step(step)

    def build_picture(self, width: int, height: int) -> Picture:
        frame = self.viewer.make_frame()
        picture = self.pictures.build_picture(frame, chart_cells(width), height)
        while not picture.timeline.is_complete:
            picture = self.pictures.build_picture(frame, chart_cells(width), height)
        return picture

    def draw_rows(self, width: int, height: int, glyphs: Glyphs = BLOCKS) -> list[str]:
        drawn = draw_timeline(self.build_picture(width, height), width, height, glyphs)
        assert [row_width(row) for row in drawn] == [width] * height
        return [row_text(row) for row in drawn]


def test_the_double_spike_is_seen_at_a_glance() -> None:
    """While the optimizer runs on the CPU the GPU stands still, and the other way round."""
    look = Look("story", 13)
    look.view.set_column_ns(50_000_000)
    rows = look.draw_rows(80, 18, ASCII)
    ribbon = next(row for row in rows if row.startswith("rank 0"))[chart_begin(80) :]
    gpu, cores = (next(row for row in rows if row.startswith(name))[chart_begin(80) :] for name in ("GPU 0", "+cores"))
    optimizing, computing = ([at for at, cell in enumerate(ribbon) if cell == letter] for letter in "Sb")
    assert len(optimizing) > 10
    assert len(computing) > 3
    assert sum(gpu[at] in "#" for at in optimizing) < 0.3 * len(optimizing)
    assert sum(gpu[at] in "#" for at in computing) > 0.5 * len(computing)
    assert sum(cores[at] in "#+" for at in optimizing) > 0.8 * len(optimizing)
    assert sum(cores[at] in "#+" for at in computing) < 0.5 * len(computing)


def test_words_beside_the_lanes() -> None:
    look = Look("story", 12)
    rows = look.draw_rows(80, 20)
    lefts = [row[: chart_begin(80)].rstrip() for row in rows]
    assert lefts[0] == "2 findings here"
    assert lefts[1].split() == ["rank", "0", "■", "outside"]  # as on Live, though the column shows the end of the step
    begins = [left.split()[0] for left in lefts[1:]]
    assert begins[:4] == ["rank"] * 4
    for name in ("GPU", "■cores", "■allocated", "■PCIe", "iteration", "loss", "step"):
        assert name in begins
    picture = look.build_picture(80, 20)
    used = find_cursor_value(picture, ["utilization"]) * 100
    assert next(left for left in lefts if left.startswith("GPU 0 %")).split()[3] in f"{used:.1f} {used:.2f}"


def test_figures_are_of_the_cursor_also_where_a_column_lasts_many_steps() -> None:
    look = Look("story", 12)
    near = {name: find_cursor_value(look.build_picture(80, 20), [name]) for name in ("loss", "allocated")}
    look.view.set_column_ns(16 * 10**9)
    picture = look.build_picture(36, 20)
    assert picture.timeline.window.column_ns > 2 * 10**9
    then = {name: find_cursor_value(picture, [name]) for name in near}
    assert then == pytest.approx(near, rel=0.05)
    loss = picture.find_values("loss")
    assert loss is not None
    assert loss.mean[picture.pointed // picture.timeline.window.column_ns - picture.timeline.window.first] != then["loss"]


def test_narrow_terminals_abbreviate_words() -> None:
    look = Look("story", 12)
    lefts = [row[: chart_begin(60)] for row in look.draw_rows(60, 12)]
    for words in ("■rank cores", "■alloc GiB", "■reserved", "iter"):
        assert any(left.startswith(words) for left in lefts), lefts
    assert not any("coresof" in left for left in lefts)


def test_hardware_faults_have_a_lane_where_there_are_some() -> None:
    look = Look("hardware-bus", 31)
    rows = look.draw_rows(110, 26)
    assert rows[1].startswith("GPU faults")
    assert "Xid 79 on GPU 1" in rows[1]
    assert not any(row.startswith("GPU faults") for row in Look("hardware-clean", 31).draw_rows(110, 26))


def test_a_change_too_slow_for_the_window_is_named_above_it() -> None:
    look = Look("gpu-leak", 37)
    marks = look.draw_rows(120, 30)[0]
    assert marks.startswith("no findings here")
    assert "◂ step 16: memory creep: GPU memory grows 32.0 MiB a step" in marks
    picture = look.build_picture(120, 30)
    assert picture.find_mark(5) == picture.hidden_headline
    look.view.toggle_whole()
    assert "◂" not in look.draw_rows(120, 30)[0]


@pytest.mark.parametrize("glyphs", [BLOCKS, TEXTURES, ASCII], ids=lambda glyphs: glyphs.name)
def test_one_cursor_through_all_lanes(glyphs: Glyphs) -> None:
    look = Look("story", 12)
    rows = look.draw_rows(120, 40, glyphs)
    x = chart_begin(120) + look.build_picture(120, 40).find_cell(look.build_picture(120, 40).cursor)
    crossed = [row[x] for row in rows[1:-3]]
    assert crossed[:4] == [glyphs.line] * 4  # the ribbons
    assert crossed.count(glyphs.line) > 20 if glyphs is BLOCKS else crossed == [glyphs.line] * 36
    steps, times = rows[-3:-1]
    assert (steps[x : x + 2], times[x]) == ("13", glyphs.line)  # numbers of the axes stay whole
    assert rows[0][x] != glyphs.line  # over it are the marks


def test_a_lane_is_as_high_as_its_scale_says() -> None:
    """The busiest moment of the GPU, 100 %, fills the lane up to its first row, where the axis says so."""
    look = Look("story", 9)
    for height in range(12, 50):
        rows = look.draw_rows(120, height)
        top = next(row for row in rows if row.startswith("GPU 0 %"))
        assert "100┤" in top
        assert "█" in top[chart_begin(120) :]


def test_the_scale_of_cores_is_the_same_wherever_the_cursor_is() -> None:
    look = Look("story", 12)
    look.view.toggle_whole()
    for seconds in (0.0, 1.0, 60.0, 75.0):
        look.viewer.go_to_seconds(seconds)
        rows = look.draw_rows(120, 40)
        assert "64┤" in next(row for row in rows if row.startswith(("■cores", "■rank 0 ")))


def test_steps_and_time_below() -> None:
    rows = Look("story", 12).draw_rows(120, 30)
    assert rows[-3].startswith("step 13")
    assert "─11──" in rows[-3]
    assert rows[-2].startswith("1:0")
    assert "─1:00─" in rows[-2]


def test_a_mark_where_something_was_found() -> None:
    look = Look("story", 12)
    row = look.draw_rows(200, 40)[0]
    picture = look.build_picture(200, 40)
    seen = [mark for mark in picture.marks if 0 <= picture.find_cell(mark.at_ns) < picture.cell_count]
    assert len(seen) == 2
    for mark in seen:
        assert row[chart_begin(200) + picture.find_cell(mark.at_ns)] == "◆"
    assert "skipping ended: Iterations take" in row


def test_a_range_says_what_it_holds() -> None:
    look = Look("story", 13)
    look.build_picture(200, 40)
    look.view.select_range(57 * S, 62 * S)
    last = look.draw_rows(200, 40)[-1]
    assert last.startswith("[ 5.00 s ]  2 steps")
    for word in ("cpu optim", "backward", "GPU ", "cores ", "allocated ", " max "):
        assert word in last
    narrow = look.draw_rows(80, 18)[-1]
    assert narrow.startswith("[ 5.00 s ]  2 steps")


def test_small_figures_of_a_range_keep_their_decimals() -> None:
    look = Look("held-clean-z0")
    picture = look.build_picture(200, 40)
    look.view.select_range(0, picture.cell_count * picture.cell_ns)
    last = look.draw_rows(200, 40)[-1]
    assert re.search(r"cores \d\.\d\d max \d\.\d\d  iteration \d\d\.\d max \d+\.\d ms  RSS 0\.\d\d max 0\.\d\d GiB", last), (
        last
    )


@pytest.mark.parametrize(
    ("state", "why"), [(JobState.STARTING, "before the training"), (JobState.RUNNING, "no probe in any rank")]
)
def test_an_empty_timeline_says_why_it_has_no_phases(state: JobState, why: str, tmp_path: Path) -> None:
    sampled = make_record(PROCESSES, time_ns=S, rank=0, pid=100, cores_used=1.0, rss_bytes=1)
    write_table(tmp_path, PROCESSES, make_identity(-1), sampled).close()
    watched = RecordingSource(read_recording(tmp_path))
    watched.refresh()
    frame = Viewer(watched, None, lambda: 0.0).make_frame()
    frame = replace(frame, view=replace(frame.view, job=replace(frame.view.job, state=state)))
    (missing_notes,) = PictureBuilder(watched, TimelineView()).build_picture(frame, 40, 20).missing_notes
    assert missing_notes.startswith(f"Not recorded: phases ({why}), GPU")


def test_without_a_gpu() -> None:
    rows = Look("cpu-clean", 30).draw_rows(120, 30)
    assert rows[-1].endswith("Not recorded: GPU".ljust(len(rows[-1]) - rows[-1].index("Not")))
    begins = [row[:9] for row in rows]
    assert "■RAM rank" in begins  # host memory
    assert not any(begin.startswith("GPU") for begin in begins)
    assert not any("PCIe" in row for row in rows)


def test_the_chosen_rank_comes_first() -> None:
    rows = Look("story", 13, rank=2).draw_rows(80, 20)
    assert [row[:6] for row in rows[1:5]] == ["rank 2", "rank 3", "rank 0", "rank 1"]
    assert any(row.startswith("GPU 2 %") for row in rows)


@pytest.mark.parametrize(
    "name", [name for name in list_recordings() if name in ("story", "cpu-dead", "z2-oom", "x4-z3", "cpu-hang")]
)
def test_any_size(name: str) -> None:
    look = Look(name, 5)
    for width, height in ((30, 1), (31, 4), (40, 7), (60, 10), (80, 18), (120, 33), (200, 44), (300, 84)):
        for glyphs in (BLOCKS, TEXTURES, ASCII):
            rows = look.draw_rows(width, height, glyphs)
            if glyphs is ASCII:
                assert all(row.isascii() for row in rows)


def test_any_zoom() -> None:
    look = Look("z2-offload", 20)
    for _ in range(40):
        look.draw_rows(100, 24)
        look.view.zoom_window(1)
    for _ in range(60):
        look.draw_rows(100, 24)
        look.view.zoom_window(-1)
        look.view.pan_share(-0.1)


@pytest.mark.parametrize("ranks", [0, 1, 2, 8, 1024])
@pytest.mark.parametrize(
    "recorded", [EVERYTHING, {"cores", "all_cores", "rss", "host_memory", "iteration"}, {"utilization"}, set()]
)
def test_rows_of_lanes(ranks: int, recorded: set[str]) -> None:
    for height in range(1, 120):
        for marks in (False, True):
            places = layout_lanes(height, recorded, ranks, marks=marks)
            at = 0
            for place in places:
                assert place.top >= at
                at = place.top + place.height
            assert at <= height
            if recorded and height > 3:
                assert at == height
            shown = count_ribbons(places)
            assert shown <= ranks
            assert (shown > 0) == (ranks > 0)
            assert all(place.height >= LANES_BY_NAME[place.name].min_rows for place in places if place.name in LANES_BY_NAME)
    assert {place.name for place in layout_lanes(60, EVERYTHING, 4, marks=True)} >= {
        *LANES_BY_NAME,
        MARKS,
        RIBBONS,
        TIME,
        SUMMARY,
    }


def test_the_most_important_lanes_stay_where_there_is_little_room() -> None:
    assert [place.name for place in layout_lanes(5, EVERYTHING, 4, marks=True)][:3] == [RIBBONS, "utilization", "cores"]


def test_nothing_to_show(tmp_path: Path) -> None:
    empty = RecordingSource(read_recording(tmp_path))
    viewer = Viewer(empty, None, lambda: 0.0)
    assert not PictureBuilder(empty, TimelineView()).has_data(viewer.make_frame())
    rows = [row_text(row) for row in draw_empty(80, 18, BLOCKS)]
    assert "Nothing recorded up to this time." in "".join(rows)
    assert {len(row) for row in rows} == {80}
    assert "Too narrow" in "".join(row_text(row) for row in draw_empty(20, 5, BLOCKS))
    assert draw_empty(0, 0, BLOCKS) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (lambda: format_moment(62_345_678_901, 50_000_000), "1:02.34"),
        (lambda: format_moment(62_345_678_901, 2_000_000_000), "1:02"),
        (lambda: format_moment(3_723_000_000_001, 1_000), "1:02:03.000000"),
        (lambda: format_time_span(12.345e-6), "12.3 µs"),
        (lambda: format_time_span(0.25), "250 ms"),
        (lambda: format_time_span(2.75), "2.75 s"),
        (lambda: format_time_span(754), "12:34"),
    ],
)
def test_times(words: Callable[[], str], expected: str) -> None:
    assert words() == expected


def test_values_under_the_cursor_keep_their_height() -> None:
    """The cursor changes no block of a value lane that does not fill its cell."""
    picture = Look("story", 12).build_picture(120, 40)
    moved = replace(picture, cursor=picture.cursor + 20 * picture.cell_ns)
    x = chart_begin(120) + picture.find_cell(picture.cursor)
    with_cursor, without = ([row_text(row) for row in draw_timeline(one, 120, 40, BLOCKS)] for one in (picture, moved))
    lanes = [place for place in picture.boxes if place.name in ("iteration", "host memory", "cores", "power")]
    rows = [place.top + row for place in lanes for row in range(place.height)]
    partial = [row for row in rows if without[row][x] in "▁▂▃▄▅▆▇"]
    assert len(partial) >= 3
    assert [with_cursor[row][x] for row in partial] == [without[row][x] for row in partial]


@pytest.mark.parametrize(
    ("losses", "shown"), [((2.5, math.nan), "NaN"), ((math.nan, math.nan), "NaN"), ((2.5, math.inf), "inf"), ((), "")]
)
def test_a_logged_value_that_is_not_finite_is_named_as_on_live(
    losses: tuple[float, ...], shown: str, tmp_path: Path
) -> None:
    spans = [make_span(step, step + 0.5, "step", step, BOUNDARY) for step in range(40)]
    write_table(tmp_path, SPANS, make_identity(0), *spans).close()
    known = LOGGED_BITS["loss"]
    logged = [make_record(LOGGED, time_ns=int((at + 1.2) * S), known=known, loss=loss) for at, loss in enumerate(losses)]
    write_table(tmp_path, LOGGED, make_identity(0), *logged).close()
    watched = RecordingSource(read_recording(tmp_path))
    watched.refresh()
    frame = Viewer(watched, None, lambda: 0.0).make_frame()
    for column_ns in (S // 10, 8 * S):
        view = TimelineView()
        view.set_column_ns(column_ns)
        rows = draw_timeline(PictureBuilder(watched, view).build_picture(frame, 40, 20), 66, 20, BLOCKS)
        left = next((row_text(row)[: chart_begin(66)] for row in rows if row_text(row).startswith("loss")), "")
        assert (shown in left.split()) == bool(left)
        assert left.startswith(f"loss at {len(losses)} " if shown else ""), left
        assert any(style == "alert" and text.strip() == shown for row in rows for text, style in row) == bool(shown)
