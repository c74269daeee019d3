"""Windows in which detectors look: what is new, how far back they look, and which findings are news."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

import recordings
from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.annotator import Annotator
from zerotop.analysis.annotations.support.evidence import Process
from zerotop.analysis.annotations.support.window import SearchWindow, in_each_rank
from zerotop.session.reader import Session

_KIND = FindingKind(name="long_step", severity=Severity.INFO, confidence=1.0, headline="Step {step} took long")
_PIECES = 9


@pytest.fixture
def session() -> Session:
    return recordings.open_recording("story")


def search_in_pieces(session: Session, detect: object) -> Annotator:
    annotator = Annotator(session, [detect])  # type: ignore[list-item]
    begin_ns = session.begin_ns
    for piece in range(1, _PIECES + 1):
        annotator.update(begin_ns + (session.end_ns - begin_ns) * piece // _PIECES)
    return annotator


def test_each_step_is_shown_once_as_new_with_so_many_before_it(session: Session) -> None:
    shown: dict[int, list[slice]] = {}

    @in_each_rank(kinds=None)
    def detect(window: SearchWindow[Process]) -> Iterator[Annotation]:
        fresh = window.steps(window.subject.steps, 2)
        if fresh.start < fresh.stop:
            shown.setdefault(window.subject.rank, []).append(fresh)
        yield from ()

    search_in_pieces(session, detect)
    assert sorted(shown) == [0, 1, 2, 3]
    for slices in shown.values():
        assert len(slices) > 2
        assert slices[0].start == 0
        assert all(after.start == max(0, before.stop - 2) for before, after in pairwise(slices))


def test_records_are_shown_with_those_of_a_time_before(session: Session) -> None:
    times: list[np.ndarray] = []

    @in_each_rank(kinds=None)
    def detect(window: SearchWindow[Process]) -> Iterator[Annotation]:
        if window.subject.rank == 0:
            times.append(window.records(window.subject.host_samples, 10**9).times)
        yield from ()

    search_in_pieces(session, detect)
    shown = [one for one in times if len(one)]
    assert len(shown) > 2
    for before, after in pairwise(shown):
        new = after[after > before[-1]]
        assert new[0] - 10**9 < after[0] <= before[-1] < new[0]


@pytest.mark.parametrize(("kinds", "most"), [(1, 1), (None, 100)])
def test_a_finding_that_is_found_again_is_no_news(session: Session, kinds: int | None, most: int) -> None:
    @in_each_rank(kinds)
    def detect(window: SearchWindow[Process]) -> Iterator[Annotation]:
        steps = window.subject.steps
        for row in range(min(20, len(steps))):
            yield _KIND.at_steps(window.subject, steps[row : row + 1], {})

    found = search_in_pieces(session, detect).findings_at(session.end_ns)
    steps = [(finding.ranks, finding.step) for finding in found]
    assert len(steps) == len(set(steps))
    each = [sum(ranks == (rank,) for ranks, _ in steps) for rank in range(4)]
    assert each == [min(most, 20, each[0])] * 4
