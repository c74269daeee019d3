"""A node of a collected recording that falls silent, and one that comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.findings.support.finding import Finding, Severity
from zerotop.analysis.views import finding_search
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BEGINS, BOUNDARY, PHASE_CODE, SPANS
from zerotop_probe.recording.writer import EventWriter

HOSTS = ("node1", "node1", "node2", "node2")


def detect(folder: Path, *reports: tuple[float, type[events.Event], float], lost: str | None = "node2") -> list[Any]:
    write_ranks(folder)
    write_reports(folder, *reports, lost=lost)
    recording = read_recording(folder)
    return [one for one in detect_findings(recording, recording.last_written_ns) if one.name == "lost_node"]


def write_reports(folder: Path, *reports: tuple[float, type[events.Event], float], lost: str | None = "node2") -> None:
    clock = {"monotonic_ns": 0, "unix_ns": BEGIN_NS}
    writer = EventWriter(str(folder), make_identity(-1, host="watcher")._replace(role="control"), clock=clock)
    for second, kind, silent_s in reports:
        writer.write(int(second * S), kind, host=lost, seconds=silent_s)
    writer.close()


def write_ranks(folder: Path) -> None:
    for rank, host in enumerate(HOSTS):
        who = make_identity(rank, host=host)
        steps = range(10 if rank != 3 else 9)
        spans = [
            span
            for step in steps
            for span in (
                make_span(step, step + 0.5, "forward", step),
                make_span(step + 0.5, step + 0.9, "step", step, BOUNDARY),
            )
        ]
        begins = [
            make_record(BEGINS, time_ns=int((step + part) * S), step=step, micro_step=0, phase=PHASE_CODE[phase])
            for step in range(len(steps) + 1)
            for part, phase in ((0, "forward"), (0.5, "step"))
            if part == 0 or step < len(steps)
        ]
        write_table(folder, SPANS, who, *spans).close()
        write_table(folder, BEGINS, who, *begins).close()


def test_it_is_reported_with_its_ranks_and_their_last_phase(tmp_path: Path) -> None:
    (finding,) = detect(tmp_path, (16.0, events.NodeLost, 6.2))
    assert finding.headline == "Node node2 has sent nothing for 6.20 s: ranks 2 and 3"
    assert finding.details.startswith("Last seen in forward, step 9. The node, its network or zerotop there has failed")
    assert finding.severity is Severity.ERROR
    assert finding.ranks == (2, 3)
    assert finding.fix == "ping -c 3 node2"


def test_it_is_reported_when_it_is_back(tmp_path: Path) -> None:
    (finding,) = detect(tmp_path, (16.0, events.NodeLost, 6.2), (30.0, events.NodeReturned, 20.0))
    assert finding.headline == "Node node2 is back after 20 s: ranks 2 and 3"
    assert finding.severity is Severity.INFO


def test_the_line_that_was_sampled_last_is_reported(tmp_path: Path) -> None:
    """That of the rank that came least far, in its training thread, and not what came later."""
    clock = {"monotonic_ns": 0, "unix_ns": BEGIN_NS}
    frames = [
        {"file": "torch/nn/modules/module.py", "line": 9, "function": "Module.forward", "own": False},
        {"file": "train.py", "line": 31, "function": "run", "own": True},
        {"file": "other.py", "line": 5, "function": "load", "own": True},
    ]
    for rank, host in ((2, "node2"), (3, "node2")):
        writer = EventWriter(str(tmp_path), make_identity(rank, host=host), clock=clock)
        for second, numbers in ((4, [2]), (5, [0, 1] if rank == 3 else [2]), (17, [2])):
            stacks = [{"count": 1, "thread": "saver", "frames": [2]}, {"count": 1, "frames": numbers}]
            writer.write(int(second * S), events.TrainingStack, frames=frames, stacks=stacks)
        writer.close()
    (finding,) = detect(tmp_path, (16.0, events.NodeLost, 6.0))
    assert "The line last sampled there, 5.00 s before, is train.py:31 in run (calls torch.nn" in finding.details


def test_nothing_without_reports(tmp_path: Path) -> None:
    assert detect(tmp_path) == []


def test_a_lost_server_is_no_lost_node(tmp_path: Path) -> None:
    (finding,) = detect(tmp_path, (16.0, events.NodeLost, 7.0), lost=None)
    assert finding.headline == "No node has been heard for 7.00 s: the server cannot be reached"
    assert (finding.severity, finding.ranks, finding.fix) == (Severity.WARNING, (), "")


def test_a_server_that_is_back_is_reported(tmp_path: Path) -> None:
    (finding,) = detect(tmp_path, (16.0, events.NodeLost, 7.0), (30.0, events.NodeReturned, 21.0), lost=None)
    assert finding.headline == "The server is back after 21 s"


def test_a_node_is_reported_after_many_others(tmp_path: Path) -> None:
    write_ranks(tmp_path)
    for second in range(30):
        write_reports(tmp_path, (16.0 + second, events.NodeLost, 6.2), lost="node2")
    write_reports(tmp_path, (60.0, events.NodeLost, 6.2), lost="node1")
    recording = read_recording(tmp_path)
    found = [one for one in detect_findings(recording, recording.last_written_ns) if one.name == "lost_node"]
    assert found[-1].headline == "Node node1 has sent nothing for 6.20 s: ranks 0 and 1"


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_screen_is_notified_during_a_long_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reopened: bool
) -> None:
    """With hundreds of ranks a search takes seconds, and the next one waits for a quarter of a minute."""
    monkeypatch.setattr(finding_search, "_SLICE_S", 0.0)
    write_ranks(tmp_path)
    earlier = Finding("seen", BEGIN_NS, BEGIN_NS, BEGIN_NS, None, (), Severity.WARNING, 1.0, "earlier")
    source = RecordingSource(read_recording(tmp_path), findings=(earlier,) * is_reopened)
    assert source.search_findings().is_behind
    write_reports(tmp_path, (16.0, events.NodeLost, 6.2))
    source.refresh()
    *others, finding = source.findings_at(None)
    assert others == [earlier] * is_reopened
    assert finding.headline == "Node node2 has sent nothing for 6.20 s: ranks 2 and 3"
    monkeypatch.undo()
    while source.search_findings().is_behind:
        pass
    assert [one for one in source.findings_at(None) if one.name == "lost_node"] == [finding], "told once"
