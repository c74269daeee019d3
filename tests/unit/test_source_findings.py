"""When findings are searched for: when something has changed, and seldom."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import recordings
from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, Severity, detect_findings
from zerotop.analysis.findings.support import detection
from zerotop.analysis.findings.support.evidence import Evidence
from zerotop.analysis.views import finding_search as module
from zerotop.analysis.views.finding_search import Findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import HOSTS, SPANS


def test_findings_are_searched_for_apart_from_reading(tmp_path: Path) -> None:
    recording = Recording.open(recordings.unpack_to_folder("gpu-leak", tmp_path))
    source = RecordingSource(recording)
    source.refresh()
    source.view_at(None)
    assert source.findings_at(None) == ()
    expected = detect_findings(recording, recording.end_ns)
    assert expected
    while (result := source.search_findings()).is_behind:
        assert source.findings_at(None) != expected or not result.has_new
    assert source.findings_at(None) == expected
    assert source.search_findings()[:2] == (False, False)
    last = expected[-1]
    assert last not in source.findings_at(last.known_ns - 1)
    assert last in source.findings_at(last.known_ns)


class Clock:
    """Seconds that pass when told to, and how often somebody looked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now


def is_searched(findings: Findings, clock: Clock) -> bool:
    """A search looks at the clock at its end, too."""
    before = clock.looks
    findings.search_piece()
    return clock.looks == before + 2


def test_nothing_is_searched_for_without_a_change_or_too_soon(tmp_path: Path) -> None:
    writer = write_table(tmp_path, HOSTS, make_identity(-1), make_record(HOSTS, time_ns=S))
    recording, clock = read_recording(tmp_path), Clock()
    findings = Findings(recording, clock)
    assert is_searched(findings, clock)
    clock.now = 100.0
    assert not is_searched(findings, clock), "nothing was written since, however late it is"
    writer.write(*make_record(HOSTS, time_ns=2 * S))
    recording.refresh()
    assert is_searched(findings, clock)
    writer.write(*make_record(HOSTS, time_ns=3 * S))
    recording.refresh()
    clock.now += module._MIN_PAUSE_S / 2
    assert not is_searched(findings, clock), "too soon"
    clock.now += module._MIN_PAUSE_S
    assert is_searched(findings, clock)
    writer.close()


def test_a_long_search_is_rested_from(tmp_path: Path) -> None:
    writer = write_table(tmp_path, HOSTS, make_identity(-1), make_record(HOSTS, time_ns=S))
    recording = read_recording(tmp_path)
    times = [0.0, 0.5, 10.0, 10.6, 10.7]  # the first search takes half a second: ten seconds of rest
    findings = Findings(recording, lambda: times.pop(0))
    findings.search_piece()
    writer.write(*make_record(HOSTS, time_ns=2 * S))
    recording.refresh()
    findings.search_piece()
    assert len(times) == 2
    findings.search_piece()
    assert not times
    writer.close()


def test_a_search_ends_though_the_recording_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_PIECE", 1)
    monkeypatch.setattr(detection, "_PIECE_OF_RANK", 1)
    spans = [make_span(second, second + 0.5, "forward", second) for second in range(1, 20)]
    writer = write_table(tmp_path, SPANS, make_identity(0), *spans)
    recording = read_recording(tmp_path)
    findings, pieces = Findings(recording), 1
    while findings.search_piece().is_behind:
        pieces += 1
        assert pieces < 500, "new records are for the next search, after a rest"
        writer.write(*make_span(20 + pieces, 20.5 + pieces, "forward", 20 + pieces))
        recording.refresh()
    writer.close()
    assert pieces > 2


def test_a_search_of_many_ranks_rests_between_detectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found counts when all have looked: a later detector's finding may take the place of an earlier one's."""
    write_table(tmp_path, HOSTS, make_identity(-1), make_record(HOSTS, time_ns=S)).close()
    recording = read_recording(tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(detection, "time", SimpleNamespace(monotonic=lambda: 0.01 * len(asked)))  # each takes so long

    def look(number: int, evidence: Evidence) -> Iterable[Finding]:
        asked.append(number)
        yield Finding("seen", number, number, number, None, (), Severity.WARNING, 1.0, f"{number}")

    searching = detection.Detection(recording, [partial(look, number) for number in range(3)])
    told = []
    for _ in range(3):
        assert searching.is_behind
        told.append(searching.search_piece(recording.last_written_ns, 0.001))
    assert (asked, told, searching.is_behind) == ([0, 1, 2], [False, False, True], False)
    assert [finding.headline for finding in searching.ordered_findings] == ["0", "1", "2"]
    assert not searching.update()
    assert len(asked) == 3
