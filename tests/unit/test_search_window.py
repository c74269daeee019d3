"""Windows in which detectors look: what is new, how far back they look, and which findings are news."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest

import recordings
from zerotop.analysis.findings.support.detection import Detection
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.window import SearchWindow, in_each_rank
from zerotop.recording.reader import Recording

_KIND = FindingKind(name="long_step", severity=Severity.INFO, confidence=1.0, headline="Step {step} took long")
_PIECES = 9


@pytest.fixture
def recording() -> Recording:
    return recordings.open_recording("story")


def search_in_pieces(recording: Recording, detect: object) -> Detection:
    detection = Detection(recording, [detect])  # type: ignore[list-item]
    begin_ns = recording.begin_ns
    for piece in range(1, _PIECES + 1):
        detection.update(begin_ns + (recording.end_ns - begin_ns) * piece // _PIECES)
    return detection


def test_each_step_is_shown_once_as_new_with_so_many_before_it(recording: Recording) -> None:
    shown: dict[int, list[slice]] = {}

    @in_each_rank(kinds=None)
    def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
        fresh = window.steps(window.subject.steps, 2)
        if fresh.start < fresh.stop:
            shown.setdefault(window.subject.rank, []).append(fresh)
        yield from ()

    search_in_pieces(recording, detect)
    assert sorted(shown) == [0, 1, 2, 3]
    for slices in shown.values():
        assert len(slices) > 2
        assert slices[0].start == 0
        assert all(after.start == max(0, before.stop - 2) for before, after in pairwise(slices))


def test_records_are_shown_with_those_of_a_time_before(recording: Recording) -> None:
    times: list[np.ndarray] = []

    @in_each_rank(kinds=None)
    def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
        if window.subject.rank == 0:
            times.append(window.records(window.subject.host_samples, 10**9).times)
        yield from ()

    search_in_pieces(recording, detect)
    shown = [one for one in times if len(one)]
    assert len(shown) > 2
    for before, after in pairwise(shown):
        new = after[after > before[-1]]
        assert new[0] - 10**9 < after[0] <= before[-1] < new[0]


@pytest.mark.parametrize(("kinds", "most"), [(1, 1), (None, 100)])
def test_a_finding_that_is_found_again_is_no_news(recording: Recording, kinds: int | None, most: int) -> None:
    @in_each_rank(kinds)
    def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
        steps = window.subject.steps
        for row in range(min(20, len(steps))):
            yield _KIND.at_steps(window.subject, steps[row : row + 1], {})

    found = search_in_pieces(recording, detect).findings_at(recording.end_ns)
    steps = [(finding.ranks, finding.step) for finding in found]
    assert len(steps) == len(set(steps))
    each = [sum(ranks == (rank,) for ranks, _ in steps) for rank in range(4)]
    assert each == [min(most, 20, each[0])] * 4


def test_only_an_event_that_was_reported_is_reported_again_after_many_others(recording: Recording) -> None:
    first_ns, again_ns = recording.begin_ns + 100, recording.begin_ns + 200

    @in_each_rank(kinds=None)
    def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
        for known_ns, step in product((first_ns, again_ns), range(40)):
            yield _KIND.at(window.subject, recording.begin_ns, known_ns, {}, step=step)

    for cursor_ns in (first_ns, again_ns):
        found = search_in_pieces(recording, detect).findings_at(cursor_ns)
        told = [finding.step for finding in found if finding.ranks == (0,) and finding.known_ns == cursor_ns]
        assert told == [*range(20), 31]
