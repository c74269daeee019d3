"""Which piece of time the timeline shows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zerotop.ui.timeline.window import LEVELS_NS, WHEEL_ZOOM, PlaybackState, TimelineView

S = 10**9
HOUR = 3600 * S


def make_state(
    cursor_s: float, end_s: float = 3600.0, *, following: bool = False, playing: bool = False, idle: int = 0
) -> PlaybackState:
    return PlaybackState(int(cursor_s * S), int(end_s * S), following, playing, idle)


def make_live_state(end_s: float) -> PlaybackState:
    return make_state(end_s, end_s, following=True)


def test_levels_are_made_of_whole_seconds_and_tens_of_them() -> None:
    assert all(one < other <= 2 * one for one, other in pairwise(LEVELS_NS[:-3]))
    assert all(level % S == 0 for level in LEVELS_NS if level >= 2 * S)
    assert all(level % (10 * S) == 0 for level in LEVELS_NS if level >= 60 * S)
    assert LEVELS_NS[0] == 1000
    assert LEVELS_NS[-1] == 24 * HOUR


def test_at_first_six_iterations_and_the_end_are_seen() -> None:
    view = TimelineView()
    window = view.choose_window(make_live_state(3600), 200, 2.5)
    assert window.column_ns * 200 == 16 * S
    assert window.first * window.column_ns <= 3600 * S < (window.first + 200) * window.column_ns
    assert window.first % 2 == 0


def test_at_first_the_last_steps_of_a_recording_that_has_ended_are_seen() -> None:
    window = TimelineView().choose_window(make_state(3600, following=True, idle=30 * S), 200, 2.5)
    assert window.first * window.column_ns <= (3600 - 30 - 15) * S


def test_before_there_is_an_iteration() -> None:
    window = TimelineView().choose_window(make_live_state(2.0), 100, float("nan"))
    assert (window.first, window.column_ns) == (0, 25_000_000)


def test_a_window_grows_with_the_recording_until_it_shows_what_it_should() -> None:
    view = TimelineView()
    lengths = [
        view.choose_window(make_live_state(end), 100, float("nan")).column_ns * 100 for end in (1.0, 10.0, 30.0, 300.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 60 * S
    assert view.choose_window(make_live_state(301), 100, 0.5).column_ns * 100 == 3 * S
    assert view.choose_window(make_live_state(302), 100, 0.7).column_ns * 100 == 3 * S  # nothing jumps
    assert view.choose_window(make_live_state(303), 100, 5.0).column_ns * 100 == 30 * S


def test_following_moves_by_whole_cells() -> None:
    view = TimelineView()
    seen = [view.choose_window(make_live_state(100 + tick / 10), 200, 2.5) for tick in range(30)]
    for window in seen:
        assert window.first % 2 == 0
    assert {b.first - a.first for a, b in pairwise(seen)} <= {0, 2}
    assert seen[-1].first > seen[0].first


def test_a_cursor_in_sight_moves_nothing() -> None:
    view = TimelineView()
    first = view.choose_window(make_live_state(3600), 200, 2.5).first
    for cursor in (3599.0, 3590.0, 3597.0):
        assert view.choose_window(make_state(cursor), 200, 2.5).first == first


def test_a_cursor_out_of_sight_is_brought_into_sight() -> None:
    view = TimelineView()
    view.choose_window(make_live_state(3600), 200, 2.5)
    for cursor in (1000.0, 1017.0, 900.0, 0.0, 3600.0):
        window = view.choose_window(make_state(cursor), 200, 2.5)
        assert window.first <= cursor * S // window.column_ns < window.first + 200


def test_a_playing_cursor_stays_before_the_end_of_the_window() -> None:
    view = TimelineView()
    view.choose_window(make_state(100.0), 200, 2.5)
    for tick in range(300):
        window = view.choose_window(make_state(100 + tick / 4, playing=True), 200, 2.5)
        place = (100 + tick / 4) * S // window.column_ns - window.first
        assert 0 <= place <= 162


def test_zooming_keeps_the_cursor_where_it_is() -> None:
    view = TimelineView()
    view.choose_window(make_state(1800.0), 200, 2.5)
    view.choose_window(make_state(1795.0), 200, 2.5)
    before = view.choose_window(make_state(1795.0), 200, 2.5)
    share = (1795 * S / before.column_ns - before.first) / 200
    for direction, least, most in ((1, 0.4, 0.6), (1, 0.2, 0.3), (-1, 0.4, 0.6), (-1, 0.8, 1.3), (-1, 1.6, 2.5)):
        view.zoom_window(direction)
        window = view.choose_window(make_state(1795.0), 200, 2.5)
        assert least <= window.column_ns / before.column_ns <= most
        assert (1795 * S / window.column_ns - window.first) / 200 == pytest.approx(share, abs=0.02)


def test_from_all_of_a_day_to_a_microsecond_and_back() -> None:
    view, day = TimelineView(), make_state(40_000.0, 86400.0)
    view.choose_window(day, 200, 2.5)
    for _ in range(20):
        view.zoom_window(-1)
        window = view.choose_window(day, 200, 2.5)
    assert window.first == 0
    assert window.column_ns * 200 >= 86400 * S > window.column_ns * 100
    for _ in range(60):
        view.zoom_window(1)
        window = view.choose_window(day, 200, 2.5)
    assert window.column_ns == 1000
    assert window.first <= 40_000 * S // 1000 < window.first + 200


def test_the_wheel_zooms_around_the_mouse_and_the_cursor_may_leave() -> None:
    view = TimelineView()
    view.choose_window(make_live_state(3600), 200, 2.5)
    for _ in range(12):
        view.zoom_window(1, 3586 * S, WHEEL_ZOOM)
        window = view.choose_window(make_live_state(3600), 200, 2.5)
    assert window.first * window.column_ns < 3586 * S < (window.first + 200) * window.column_ns
    assert view.is_detached
    assert (window.first + 200) * window.column_ns < 3600 * S


def test_panning_leaves_the_cursor_until_it_moves() -> None:
    view = TimelineView()
    first = view.choose_window(make_live_state(3600), 200, 2.5).first
    view.pan_share(-0.25)
    assert view.choose_window(make_live_state(3601), 200, 2.5).first == first - 50
    assert view.choose_window(make_live_state(3602), 200, 2.5).first == first - 50
    # A step back from there: the cursor is looked at again.
    assert view.choose_window(make_state(1000.0), 200, 2.5).first != first - 50
    assert not view.is_detached


def test_coming_back_to_the_end() -> None:
    view = TimelineView()
    view.choose_window(make_live_state(3600), 200, 2.5)
    view.pan_share(-3)
    held = view.choose_window(make_live_state(3600), 200, 2.5)
    view.return_to_cursor()
    window = view.choose_window(make_live_state(3600), 200, 2.5)
    assert window.first > held.first
    assert (window.first + 200) * window.column_ns > 3600 * S


def test_panning_stays_with_the_recording() -> None:
    view = TimelineView()
    view.choose_window(make_state(1800.0), 200, 2.5)
    for _ in range(2000):
        view.pan_share(-1)
    assert view.choose_window(make_state(1800.0), 200, 2.5).first == 0
    for _ in range(2000):
        view.pan_share(1)
        window = view.choose_window(make_state(1800.0), 200, 2.5)
    assert window.first * window.column_ns < 3600 * S


def test_the_whole_recording_is_toggled() -> None:
    view = TimelineView()
    near = view.choose_window(make_live_state(3600), 200, 2.5)
    view.toggle_whole()
    assert view.choose_window(make_live_state(3600), 200, 2.5).first == 0
    view.toggle_whole()
    assert view.choose_window(make_live_state(3600), 200, 2.5) == near


def test_the_whole_recording_stays_shown_while_it_grows() -> None:
    for view in (TimelineView(), other := TimelineView()):
        view.choose_window(make_live_state(100), 200, 2.5)
        if view is other:
            for _ in range(9):
                view.zoom_window(-1)
        else:
            view.toggle_whole()
        for end in (100, 150, 1000, 9000):
            window = view.choose_window(make_live_state(end), 200, 2.5)
            assert window.first == 0
            assert window.column_ns * 200 > end * S
        view.zoom_window(1)
        assert view.choose_window(make_live_state(20000), 200, 2.5).first > 0


def test_another_width() -> None:
    view = TimelineView()
    for columns in (200, 60, 380, 2):
        window = view.choose_window(make_live_state(3600), columns, 2.5)
        assert window.columns == columns
        assert window.first <= 3600 * S // window.column_ns < window.first + columns + 2


def test_a_range_has_a_begin_and_an_end() -> None:
    view = TimelineView()
    assert view.get_range() is None
    view.choose_window(make_state(100.0), 200, 2.5)
    view.set_range_begin(90 * S)
    assert view.get_range() == (90 * S, 100 * S)  # up to the cursor
    view.set_range_end(95 * S)
    assert view.get_range() == (90 * S, 95 * S)
    view.set_range_begin(97 * S)  # after its end
    assert view.get_range() == (97 * S, 100 * S)
    view.set_range_end(96 * S)
    assert view.get_range() == (96 * S, 100 * S)  # to the cursor, on whichever side it is
    view.set_range_end(100 * S)
    assert view.get_range() is None
    assert view.has_range
    view.select_range(7 * S, 3 * S)
    assert view.get_range() == (3 * S, 7 * S)
    view.clear_range()
    assert view.get_range() is None
    assert not view.has_range


def test_nothing_to_zoom_before_the_first_picture() -> None:
    view = TimelineView()
    view.zoom_window(1)
    view.toggle_whole()
    view.pan_share(1)
    assert view.choose_window(make_live_state(10), 100, 1.0).columns == 100
