"""Ranks that a signal stopped: told with its length, and no hanging rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memory_recording import PlantedRecording
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.tables import BOUNDARY


def record_job(folder: Path, steps: Sequence[float], *changes: tuple[float, int, type[events.RankEvent]]) -> Recording:
    """Two ranks whose steps end then, and (second, rank, event) of their processes."""
    recording = PlantedRecording(folder)
    recording.write_engine()
    for rank in (0, 1):
        spans = [
            make_span(begin, end, "step", step, BOUNDARY)
            for step, (begin, end) in enumerate(zip((0, *steps), steps, strict=False))
        ]
        recording.write_records(tables.SPANS, make_identity(rank), spans)
        recording.write_records(tables.BEGINS, make_identity(rank), [(row[0], row[3], 0, row[7], 0, 0, 0) for row in spans])
    for second, rank, kind in changes:
        recording.write_event(recording.node, second, kind, rank=rank, pid=make_identity(rank).pid)
    return recording.open_recording()


def find_stopped(recording: Recording, cursor_ns: int | None = None) -> list[Finding]:
    findings = detect_findings(recording, recording.end_ns if cursor_ns is None else cursor_ns)
    return [finding for finding in findings if finding.name in ("rank_stopped", "hung_ranks")]


def test_a_stop_has_its_length(tmp_path: Path) -> None:
    recording = record_job(tmp_path, (1, 2, 7, 8), (2.5, 1, events.RankStopped), (6.5, 1, events.RankContinued))
    (finding,) = find_stopped(recording)
    assert (finding.ranks, finding.step, finding.known_ns) == ((1,), 2, BEGIN_NS + int(6.5 * S))
    assert finding.headline == "A signal stopped rank 1 for 4.00 s"


def test_ranks_that_stop_together_are_one_finding_and_do_not_hang(tmp_path: Path) -> None:
    stops = [(2.5 + rank / 10, rank, events.RankStopped) for rank in (0, 1)]
    goes_on = [(200 + rank / 10, rank, events.RankContinued) for rank in (0, 1)]
    recording = record_job(tmp_path, (1, 2, 201, 202), *stops, *goes_on)
    (still,) = find_stopped(recording, BEGIN_NS + 13 * S)
    (continued,) = find_stopped(recording)  # in place of the first: it is the same event
    assert still.known_ns == BEGIN_NS + int(12.5 * S)
    assert (still.ranks, continued.ranks) == ((0, 1), (0, 1))
    assert still.fix == "kill -CONT 100"
    assert "for 198 s" in continued.headline


def test_short_stops_and_dead_ranks_are_none(tmp_path: Path) -> None:
    changes = [(1.2, 0, events.RankStopped), (1.9, 0, events.RankContinued)]
    changes += [(2.5, 1, events.RankStopped), (3, 1, events.RankGone)]
    recording = record_job(tmp_path, (1, 2, 3, 20), *changes)
    assert find_stopped(recording) == []
