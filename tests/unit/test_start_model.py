"""The start screen's list without a screen: order, filter, marks, and a cursor that stays on its item."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from zerotop.analysis.reports.recording_index import ListedRecording
from zerotop.analysis.reports.recording_summary import Overview
from zerotop.recording.quick_read import Stamp
from zerotop.ui.base.start_interfaces import RunningJob
from zerotop.ui.drawing.glyphs import ASCII, BLOCKS, TEXTURES
from zerotop.ui.drawing.rows import row_text, row_width
from zerotop.ui.start.columns import ListLine, describe_state, draw_sparkline
from zerotop.ui.start.drawing import DETAIL_ROWS, draw_detail, draw_list
from zerotop.ui.start.model import ORDERS, StartModel

S = 10**9
JOB = RunningJob(4711, "torchrun", 4, ("0", "1"), 3723.0, 3, "train.py")


def make_recording(name: str, begin_s: int, **facts: object) -> ListedRecording:
    live, size = bool(facts.pop("live", False)), int(str(facts.pop("size", 1000)))
    known = {"model": "Qwen2ForCausalLM", "parameters": 494_032_768, "zero_stage": 2, "exit_code": 0, **facts}
    about = Overview(name, begin_ns=begin_s * S, over=not live, **known)  # type: ignore[arg-type]
    return ListedRecording(Path("/somewhere", name), Stamp(size, 1, begin_s * S), live, about)


OLD = make_recording("a-old", 100, iteration_s=9.0, seconds=5.0, peak_bytes=1 << 30, size=9_000_000)
FAILED = make_recording(
    "b-failed", 200, exit_code=1, why="OOM (GPU)", iteration_s=1.0, seconds=50.0, offload_optimizer="cpu"
)
NEW = make_recording("c-new", 300, iteration_s=math.nan, seconds=1.0, peak_bytes=40 << 30)
LIVE = make_recording("d-live", 150, live=True, exit_code=None, seconds=500.0)
ALL = (NEW, FAILED, LIVE, OLD)


def list_names(model: StartModel) -> list[str]:
    return [row.script if isinstance(row, RunningJob) else row.name for row in model.rows]


@pytest.fixture
def start_model() -> StartModel:
    made = StartModel()
    made.update_items(ALL, (JOB,))
    return made


def test_newest_come_first_after_what_runs_unrecorded(start_model: StartModel) -> None:
    assert list_names(start_model) == ["train.py", "c-new", "b-failed", "d-live", "a-old"]


def test_each_order_puts_its_own_first(start_model: StartModel) -> None:
    first = {}
    for _ in ORDERS:
        start_model.choose_next_order()
        first[start_model.order] = list_names(start_model)[1]
    assert first == {
        "newest": "c-new",
        "by state": "d-live",
        "by name": "a-old",
        "slowest": "a-old",
        "fullest": "c-new",
        "longest": "d-live",
        "largest": "a-old",
    }
    assert StartModel("no such order").order == "newest"


def test_unknown_values_are_sorted_last(start_model: StartModel) -> None:
    while start_model.order != "slowest":
        start_model.choose_next_order()
    assert list_names(start_model)[1:] == ["a-old", "b-failed", "c-new", "d-live"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fail", ["b-failed"]),
        ("LIVE", ["d-live"]),
        ("oom gpu", ["b-failed"]),
        ("zero-2 cpu", ["b-failed"]),
        ("qwen2 new", ["c-new"]),
        ("torchrun", ["train.py"]),
        ("4711", ["train.py"]),
        ("nothing like it", []),
        ("", ["train.py", "c-new", "b-failed", "d-live", "a-old"]),
    ],
)
def test_a_filter_takes_what_holds_all_words(start_model: StartModel, words: str, found: list[str]) -> None:
    start_model.set_filter(words)
    assert list_names(start_model) == found


def test_the_cursor_stays_on_its_recording_while_the_list_changes(start_model: StartModel) -> None:
    start_model.go_to_row(2)
    assert start_model.chosen_item is FAILED
    start_model.update_items((make_recording("e-newer", 400), *ALL), ())
    assert start_model.chosen_item is FAILED
    start_model.set_filter("fail")
    assert start_model.chosen_item is FAILED
    start_model.set_filter("")
    start_model.update_items((NEW, LIVE, OLD), ())
    assert start_model.chosen_item in (NEW, LIVE, OLD)
    start_model.update_items((), ())
    assert start_model.chosen_item is None
    start_model.move_cursor(5)
    start_model.update_items(ALL, ())
    assert start_model.chosen_item is NEW


def test_the_cursor_stays_on_the_first_row_until_it_is_moved(start_model: StartModel) -> None:
    start_model.update_items((OLD, FAILED), ())
    assert start_model.chosen_item is FAILED
    start_model.update_items(ALL, ())
    assert start_model.chosen_item is NEW


def test_marks_are_kept_and_compared(start_model: StartModel) -> None:
    assert start_model.choose_compared() == ()
    start_model.toggle_mark()  # an unrecorded job cannot be
    assert start_model.marked_recordings == ()
    start_model.go_to_row(1)
    start_model.toggle_mark()
    assert start_model.marked_recordings == (NEW,)
    assert start_model.choose_compared() == (NEW, FAILED)  # with the chosen one
    start_model.go_to_row(4)
    start_model.toggle_mark()
    assert start_model.choose_compared() == (NEW, OLD)
    start_model.set_filter("fail")
    assert start_model.marked_recordings == (NEW, OLD)
    start_model.update_items((NEW, FAILED), ())
    assert start_model.marked_recordings == (NEW,)
    start_model.clear_marks()
    assert start_model.marked_recordings == ()


def test_the_visible_rows_follow_the_cursor() -> None:
    model = StartModel()
    model.update_items(tuple(make_recording(f"r{number:03}", number) for number in range(200)), ())
    for place, top in ((0, 0), (9, 0), (10, 1), (199, 190), (195, 190), (100, 100), (0, 0)):
        model.go_to_row(place)
        model.scroll_to_cursor(10)
        assert model.top_row == top
    model.scroll_to_cursor(500)
    assert model.top_row == 0


@pytest.mark.parametrize("glyphs", [BLOCKS, TEXTURES, ASCII], ids=lambda glyphs: glyphs.name)
@pytest.mark.parametrize("width", [10, 40, 60, 80, 100, 120, 200, 300])
def test_every_row_has_the_width_asked_for(width: int, glyphs: object) -> None:
    damaged = make_recording("broken", 1, problem="It is damaged: é\x1b[2J.")
    odd = make_recording(
        "\x1b]0;x\x07name-日本語-" * 9, 2, iterations=(1.0, 0.0, math.nan, 5.0), peak_bytes=1, total_steps=10**9
    )
    unread = ListedRecording(Path("/x"), Stamp(0, 1, 0), False, None)
    items: tuple[ListedRecording | RunningJob, ...] = (*ALL, JOB, damaged, odd, unread)
    lines = [ListLine(item, place == 1, place == 2, 10**18) for place, item in enumerate(items)]
    drawn = draw_list(lines, (("newest", "title"),), width, 12, glyphs)  # type: ignore[arg-type]
    assert len(drawn) == 12
    assert {row_width(row) for row in drawn} == {width}
    for item in items:
        rows = draw_detail(item, width, glyphs)  # type: ignore[arg-type]
        assert [row_width(row) for row in rows] == [width] * DETAIL_ROWS
    assert "\x1b" not in "".join(row_text(row) for row in drawn)
    if glyphs is ASCII:
        # Names are the filter's of the whole screen to replace, what we draw ourselves is ours.
        assert all(row_text(row).isascii() for row in drawn[:4])


def test_the_most_important_columns_fit_into_80() -> None:
    (_, row) = draw_list([ListLine(FAILED, True, False, 200 * S + 3600 * S)], (), 80, 2, BLOCKS)
    text = row_text(row)
    assert text.startswith("›  b-failed")
    assert "OOM (GPU)" in text
    assert "1.00" in text
    assert "60 min" in text


def test_states_of_recordings_are_words() -> None:
    words = {item.name: describe_state(item, BLOCKS)[0] for item in ALL}
    assert words == {"c-new": "exit 0", "b-failed": "OOM (GPU)", "d-live": "● live", "a-old": "exit 0"}
    assert describe_state(make_recording("x", 1, exit_code=None), BLOCKS)[0] == "end unseen"
    assert describe_state(make_recording("x", 1, exit_code=137, why="SIGKILL"), BLOCKS) == ("SIGKILL", "alert")
    assert describe_state(make_recording("x", 1, exit_code=None, problem="Damaged."), BLOCKS) == ("damaged", "alert")
    assert describe_state(make_recording("x", 1, exit_code=None, why="detached"), BLOCKS) == ("detached", "text")
    assert describe_state(JOB, BLOCKS)[0] == "unrecorded"


def test_a_long_first_iteration_hides_no_shift() -> None:
    row = draw_sparkline((50.0, 1.0, 1.0, 2.0), 4, BLOCKS)
    assert row_text(row) == "▇▄▄▇"
    assert row[0][1].startswith("muted")
    assert row_text(draw_sparkline((), 4, BLOCKS)).strip() == ""
