"""When a source looks for findings: after the first picture, when something has changed, and seldom."""

from pathlib import Path

import pytest

import recordings
from small_recording import S, identity, read, record, write
from zerotop.analysis.annotations import find_annotations
from zerotop.analysis.views import annotation_runner as module
from zerotop.analysis.views.annotation_runner import Findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.session.reader import Session
from zerotop_probe.recording.tables import HOSTS


def test_the_first_picture_does_not_wait_for_findings(tmp_path: Path) -> None:
    session = Session.open(recordings.as_directory("gpu-leak", tmp_path))
    source = RecordingSource(session)
    source.refresh()
    assert source.findings_at(None) == ()
    source.view_at(None)
    assert source.refresh()
    expected = find_annotations(session, session.end_ns)
    assert expected
    while source.findings_at(None) != expected:  # a piece at each look
        source.refresh()
    assert not source.refresh()
    last = source.findings_at(None)[-1]
    assert last not in source.findings_at(last.known_ns - 1)
    assert last in source.findings_at(last.known_ns)


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


def test_a_search_ends_though_the_recording_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_S", 0.0)  # the least at each look
    now, looks = 0.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    def searches() -> bool:
        """Who searches looks at the clock at the end too."""
        before = looks
        found.update(session.last_written_ns)
        return looks == before + 2

    writer = write(tmp_path, HOSTS, identity(-1), record(HOSTS, time_ns=S))
    session = read(tmp_path)
    found = Findings(session, clock)
    second = 1
    while searches():
        second += 1
        assert second < 500, "what is new is for the next search, after a rest"
        writer.write(*record(HOSTS, time_ns=second * S))
        session.refresh()
    writer.close()
    assert second > 2
    now = 100.0
    assert searches(), "of what was written during the first one nothing was seen yet, though nothing came since"
