"""When a source looks for findings: after the first picture, when something has changed, and seldom."""

from pathlib import Path

import pytest

import recordings
from zerotop.analysis import findings as module
from zerotop.analysis.annotations import annotations
from zerotop.analysis.findings import Findings
from zerotop.analysis.source import RecordingSource
from zerotop.session.reader import Session


def test_the_first_picture_does_not_wait_for_findings(tmp_path: Path) -> None:
    session = Session.open(recordings.as_directory("gpu-leak", tmp_path))
    source = RecordingSource(session)
    source.refresh()
    assert source.findings(None) == ()
    source.view(None)
    assert source.refresh()
    expected = annotations(session, session.end_ns)
    assert expected
    while source.findings(None) != expected:  # a piece at each look
        source.refresh()
    assert not source.refresh()
    last = source.findings(None)[-1]
    assert last not in source.findings(last.known_ns - 1)
    assert last in source.findings(last.known_ns)


def test_nothing_is_searched_for_without_a_change_or_too_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_S", 10.0)  # all is searched in one go
    # The first search lasts half a second, so that ten seconds are rested for.
    times = [0.0, 0.5, 11.0, 10.4, 10.6, 10.7]
    found = Findings(Session.open(recordings.as_directory("gpu-leak", tmp_path)), lambda: times.pop(0))
    assert found.update(1, 1)
    assert not found.update(1, 1)
    assert len(times) == 3, "the same counts are nothing new, however late"
    assert not found.update(2, 1)
    assert len(times) == 2, "too soon: no search, which would look at the clock at its end too"
    assert not found.update(2, 1)
    assert not times, "it was searched, and the same was found"
