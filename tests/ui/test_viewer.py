"""Moving through time, without a terminal."""

from __future__ import annotations

import pytest

from played_source import PlayedSource
from recordings import open_recording
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.playhead import SPEEDS, Playhead
from zerotop.ui.app.viewer import Viewer
from zerotop.ui.dialogs.go_to_dialog import parse_destination


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fake_clock() -> Clock:
    return Clock()


def make_viewer(clock: Clock, *, live: bool = True, name: str = "gpu-offload-110") -> Viewer:
    begun = clock.now
    if live:
        return Viewer(PlayedSource(name, lambda: 60.0 + clock.now - begun), None, clock)
    return Viewer(RecordingSource(open_recording("cpu-clean")), None, clock)


def read_step(viewer: Viewer) -> int | None:
    return viewer.make_frame().view.progress.step


def test_playing_never_drifts(fake_clock: Clock) -> None:
    head = Playhead(fake_clock)
    head.speed = 4.0
    head.play(10**9)
    for _ in range(10_000):
        fake_clock.now += 0.001
        head.compute_cursor(0, 10**12)
    fake_clock.now = 1010.0
    assert head.compute_cursor(0, 10**12) == 41 * 10**9


def test_the_cursor_stays_in_the_recording(fake_clock: Clock) -> None:
    head = Playhead(fake_clock)
    head.play(50)
    fake_clock.now += 1000
    assert head.compute_cursor(0, 100) == 100
    head.seek(-5)
    assert head.compute_cursor(0, 100) == 0


def test_speeds_end_at_both_ends_and_keep_the_place(fake_clock: Clock) -> None:
    head = Playhead(fake_clock)
    head.play(0)
    fake_clock.now += 10
    place = head.compute_cursor(0, 10**15)
    for _ in SPEEDS:
        head.change_speed(1, head.compute_cursor(0, 10**15))
    assert (head.speed, head.compute_cursor(0, 10**15)) == (1000.0, place)
    for _ in range(20):
        head.change_speed(-1, head.compute_cursor(0, 10**15))
    assert head.speed == 0.25


def test_live_follows_until_someone_looks_back(fake_clock: Clock) -> None:
    watched = make_viewer(fake_clock)
    assert read_step(watched) == 14
    fake_clock.now += 5
    assert watched.poll()
    assert read_step(watched) == 27
    watched.toggle_play()
    fake_clock.now += 5
    frame = watched.make_frame()
    assert frame.view.progress.step == 27
    assert frame.moment.end_s - frame.moment.cursor_s == pytest.approx(5)
    watched.playhead.follow_end()
    assert read_step(watched) == 39


def test_steps_back_and_on(fake_clock: Clock) -> None:
    watched = make_viewer(fake_clock)
    watched.make_frame()
    watched.seek_steps(-1)
    assert read_step(watched) == 13
    watched.seek_steps(-10)
    assert read_step(watched) == 3
    watched.seek_steps(1)
    assert read_step(watched) == 4
    watched.seek_steps(-10)
    assert read_step(watched) is None
    watched.seek_steps(1)
    assert read_step(watched) == 0
    watched.seek_steps(1000)
    assert watched.playhead.following


def test_every_step_can_be_gone_to(fake_clock: Clock) -> None:
    watched = make_viewer(fake_clock, live=False)
    for number in range(40):
        watched.go_to_step(number)
        assert read_step(watched) == number


def test_a_replay_plays_to_its_end_and_again_from_its_begin(fake_clock: Clock) -> None:
    watched = make_viewer(fake_clock, live=False)
    watched.toggle_play()
    assert watched.playhead.playing
    assert read_step(watched) is None
    fake_clock.now += 0.4
    assert watched.poll()
    assert read_step(watched) == 8
    fake_clock.now += 1000.0
    assert watched.poll()
    assert watched.playhead.following
    assert read_step(watched) == 39
    assert not watched.poll()


def test_the_cursor_moves_by_seconds(fake_clock: Clock) -> None:
    watched = make_viewer(fake_clock)
    begin_ns = watched.source.begin_ns
    watched.go_to_seconds(50)
    assert watched.make_frame().view.cursor_ns == begin_ns + 50 * 10**9
    watched.seek_seconds(-10)
    assert watched.make_frame().view.cursor_ns == begin_ns + 40 * 10**9
    watched.seek_seconds(-1000)
    assert watched.make_frame().view.cursor_ns == begin_ns
    watched.go_to_share(0.5)
    assert watched.make_frame().view.cursor_ns == pytest.approx(begin_ns + 30 * 10**9, abs=2)
    watched.go_to_share(1.0)
    assert watched.playhead.following


def test_a_chosen_rank_stays_where_no_ranks_are_known_yet(fake_clock: Clock) -> None:
    watched = make_viewer(fake_clock, name="story")
    watched.make_frame()
    watched.set_rank(2)
    watched.go_to_share(0.0)
    assert not watched.make_frame().view.ranks
    watched.choose_rank(1)
    assert watched.make_frame().rank == 2
    watched.follow_end()
    watched.make_frame()
    watched.choose_rank(1)
    assert watched.make_frame().rank == 3


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("13", ("step", 13)),
        (" 0 ", ("step", 0)),
        ("Step 12", ("step", 12)),
        ("end", ("end", 0)),
        ("begin", ("time", 0)),
        ("1:30", ("time", 90)),
        ("1:02:03", ("time", 3723)),
        ("90s", ("time", 90)),
        ("5 m", ("time", 300)),
        ("2H", ("time", 7200)),
        ("", None),
        ("-1", None),
        ("x", None),
        ("step", None),
        ("1:2:3:4", None),
        ("9" * 400, None),
    ],
)
def test_destinations_are_parsed(text: str, place: tuple[str, int] | None) -> None:
    assert parse_destination(text) == place
