"""Which phase a rank was in, against the plain reading of the same recording: one moment at a time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotop.analysis.processes.phases import find_current, find_innermost, find_phase_name
from zerotop.recording.reader import Recording, Source
from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import BEGINS, BOUNDARY, COUNTED, PHASE_CODE, PHASES, SPANS
from zerotop_probe.recording.writer import Identity, RecordWriter

Phase = tuple[str, int, int, int]  # name, depth, begin, end (ns since the test's own begin)


class Rank:
    """A rank that records phases at chosen times; those whose end lies after ``until`` are still in progress."""

    def __init__(self, folder: Path, phases: list[Phase], until: int) -> None:
        path = directory.create_recording(["train.py"], path=str(folder / "recording"))
        identity = Identity.for_this_process("rank", 0)
        self.begin = time.monotonic_ns()
        begins, spans = RecordWriter(path, BEGINS, identity), RecordWriter(path, SPANS, identity)
        for what, depth, begin, _ in sorted(phases, key=lambda phase: (phase[2], phase[1])):
            if begin <= until:
                begins.write(self.begin + begin, 3, 0, PHASE_CODE[what], depth, 0, 0)
        for what, depth, begin, end in sorted(phases, key=lambda phase: (phase[3], -phase[1])):
            if end <= until:
                at = self.begin + begin, self.begin + end
                spans.write(*at, -1, 3, 0, -1, -1, PHASE_CODE[what], 0, depth, 0, 0)
        recording = Recording.open(Path(path))
        (self.begins,) = recording.sources["begins"]
        self.spans: Source | None = next(iter(recording.sources["spans"]), None)

    def moment_to_unix_ns(self, moment: int) -> int:
        """Unix time of a moment of the test."""
        return self.begin + moment + self.begins.offset_ns


def find_phase_at(phases: list[Phase], moment: int) -> str:
    """The innermost phase at a moment."""
    if moment < min((begin for _, _, begin, _ in phases), default=1 << 60):
        return ""
    inside = [(depth, what) for what, depth, begin, end in phases if begin <= moment < end]
    return max(inside)[1] if inside else "other"


@st.composite
def draw_nested_phases(draw: st.DrawFn, depth: int = 0, begin: int = 0, end: int = 400) -> list[Phase]:
    """Phases one after the other between two moments, some with others within them."""
    found: list[Phase] = []
    times = sorted(draw(st.sets(st.integers(begin + 1, end - 1), max_size=6))) if end - begin > 1 else []
    for opened, closed in zip(times[::2], times[1::2], strict=False):
        what = draw(st.sampled_from(PHASES[1:]))
        found.append((what, depth, opened, closed))
        if depth < 2:
            found += draw(draw_nested_phases(depth + 1, opened, closed))
    return found


@settings(deadline=None, max_examples=60)
@given(draw_nested_phases(), st.integers(0, 400))
def test_every_moment_as_it_was_known(phases: list[Phase], until: int) -> None:
    begun = [phase for phase in phases if phase[2] <= until]
    if not begun:
        return
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(Path(folder), phases, until)
        moments = np.arange(0, until + 1)
        known = [(what, depth, begin, end if end <= until else 1 << 60) for what, depth, begin, end in begun]
        codes = find_innermost(rank.begins, rank.spans, rank.moment_to_unix_ns(0) + moments, rank.moment_to_unix_ns(until))
        assert ["" if code < 0 else PHASES[code] for code in codes] == [
            find_phase_at(known, int(moment)) for moment in moments
        ]
        assert find_current(rank.begins, rank.spans, rank.moment_to_unix_ns(until))[0] == find_phase_at(known, until)


def test_the_current_phase_has_its_begin(tmp_path: Path) -> None:
    phases = [("step", 0, 1_000, 9_000_000_000), ("optimizer", 1, 2_000, 3_000)]
    rank = Rank(tmp_path, phases, 1_000_000_000)
    assert find_current(rank.begins, rank.spans, rank.moment_to_unix_ns(2_500))[0] == "optimizer"
    what, since, step = find_current(rank.begins, rank.spans, rank.moment_to_unix_ns(1_000_001_000))
    assert (what, since, step) == ("step", pytest.approx(1.0), 3)
    ended = Rank(tmp_path / "ended", [("forward", 0, 0, 1_000)], 5_000)
    assert find_current(ended.begins, ended.spans, ended.moment_to_unix_ns(500_001_000)) == ("other", pytest.approx(0.5), 3)


def test_a_long_evaluation_is_not_forgotten_for_all_that_is_within(tmp_path: Path) -> None:
    within: list[Phase] = [("forward", 1, 1_000 + 10 * number, 1_005 + 10 * number) for number in range(1000)]
    rank = Rank(tmp_path, [("eval", 0, 500, 1 << 40), *within], 1_000_000)
    assert find_current(rank.begins, rank.spans, rank.moment_to_unix_ns(900_000))[0] == "eval"
    assert (
        PHASES[
            find_innermost(
                rank.begins, rank.spans, np.array([rank.moment_to_unix_ns(800)]), rank.moment_to_unix_ns(900_000)
            )[0]
        ]
        == "eval"
    )


def test_a_phase_of_a_newer_version_is_some_other() -> None:
    assert find_phase_name(len(PHASES) + 3) == "other"


def test_in_counted_steps_the_phase_is_unknown(tmp_path: Path) -> None:
    """Between two counted steps there is an evaluation; after them comes a step with phases."""
    path = directory.create_recording(["train.py"], path=str(tmp_path / "recording"))
    identity = Identity.for_this_process("rank", 0)
    begins, spans = RecordWriter(path, BEGINS, identity), RecordWriter(path, SPANS, identity)
    at = time.monotonic_ns()
    for name, begin, end, flags in (
        ("forward", 0, 10, 0),
        ("step", 10, 20, BOUNDARY),
        ("step", 40, 45, BOUNDARY | COUNTED),
        ("eval", 50, 60, 0),
        ("step", 70, 75, BOUNDARY | COUNTED),
        ("forward", 80, 85, 0),
        ("step", 90, 95, BOUNDARY),
    ):
        if not flags & COUNTED:
            begins.write(at + begin, 3, 0, PHASE_CODE[name], 0, 0, 0)
        spans.write(at + begin, at + end, -1, 3, 0, -1, -1, PHASE_CODE[name], flags, 0, 0, 0)
    recording = Recording.open(Path(path))
    (read,), (ended,) = recording.sources["begins"], recording.sources["spans"]
    now = at + read.offset_ns
    moments = np.array([5, 15, 30, 42, 47, 55, 65, 72, 78, 82, 88, 92, 98]) + now
    codes = find_innermost(read, ended, moments, now + 100).tolist()
    expected = ["forward", "step", *["unknown"] * 3, "eval", *["unknown"] * 2, "other", "forward", "other", "step", "other"]
    assert [find_phase_name(code) for code in codes] == expected
    assert [find_current(read, ended, now + moment)[0] for moment in (5, 48, 55, 76, 82, 97)] == [
        *("forward", "unknown", "eval", "unknown", "forward", "other"),
    ]
