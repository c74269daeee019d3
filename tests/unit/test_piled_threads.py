"""Python threads of one function that are started again and again, and those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, detect_findings
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, HOSTS, SPANS, THREADS
from zerotop_probe.recording.writer import EventWriter

STEPS = 600


def write_job(folder: Path, lives: list[tuple[int, int]], slower: float = 0.5, kind: str = "one function") -> list[Finding]:
    """Write a rank whose threads compute from one step to another, each of which makes steps of 20 ms so much longer."""
    at, spans, ends = 0.0, [], []
    for step in range(STEPS):
        length = 0.02 * (1 + slower * sum(begin <= step < end for begin, end in lives))
        spans += [
            make_span(at, at + length / 2, "forward", step),
            make_span(at + length / 2, at + length, "step", step, BOUNDARY),
        ]
        at += length
        ends.append(at)
    write_table(folder, SPANS, make_identity(0), *spans).close()
    rows = [
        make_record(THREADS, time_ns=round(ends[step] * S), pid=100, tid=200 + number, cores_used=0.2, name=b"python")
        for step in range(0, STEPS, 4)
        for number, (begin, end) in enumerate(lives)
        if begin <= step < end and kind != "not sampled"
    ]
    write_table(folder, THREADS, make_identity(-1), *rows).close()
    write_table(folder, HOSTS, make_identity(-1), make_record(HOSTS, time_ns=round(at * S))).close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello)
    for number, (begin, _) in enumerate(lives):
        seen_ns = round(ends[begin + 10] * S)
        function = "fill" if kind != "several functions" else f"fill_{number}"
        frames = [{"file": "train.py", "line": 9, "function": function, "own": True}]
        frames += [{"file": "concurrent/futures/thread.py", "line": 5, "function": "_worker", "own": False}] * (
            kind == "pool"
        )
        facts = {"thread": f"Thread-{number}", "tid": 200 + number, "cores": 0.2, "lock_wait_s": 0.0001, "held_s": 0.0001}
        facts |= {"begin_ns": seen_ns - S, "busy_ns": seen_ns - S, "end_ns": seen_ns, "samples": 9}
        stacks = [{"count": 9, "seconds": 0.1, "frames": list(range(len(frames)))}]
        writer.write(seen_ns, events.BusyThread, **facts, frames=frames, stacks=stacks)
    writer.close()
    recording = read_recording(folder)
    return [one for one in detect_findings(recording, recording.end_ns) if one.name == "piled_threads"]


def test_threads_that_pile_up_are_told_with_their_function(tmp_path: Path) -> None:
    (piled,) = write_job(tmp_path, [(0, STEPS), (200, STEPS), (300, STEPS), (400, STEPS)])
    assert piled.headline == "4 threads run fill: more and more since about step 201"
    assert (piled.severity.value, piled.step, piled.fix) == ("warning", 201, "train.py:9")
    assert piled.evidence["cores"] == pytest.approx(0.8, rel=0.01)
    assert (piled.evidence["before_s"], piled.evidence["after_s"]) == pytest.approx((0.03, 0.06), rel=0.2)


def test_threads_that_cost_nothing_are_no_warning(tmp_path: Path) -> None:
    (piled,) = write_job(tmp_path, [(0, STEPS), (200, STEPS), (300, STEPS)], slower=0.0)
    assert (piled.severity.value, piled.cost, piled.advice) == ("info", 0.0, "")


@pytest.mark.parametrize(
    ("lives", "kind"),
    [
        pytest.param([(0, 200), (200, 400), (400, STEPS)], "one function", id="each ends before the next"),
        pytest.param([(one, one + 30) for one in range(0, STEPS, 30)], "one function", id="each short, and ends"),
        pytest.param([(200, STEPS)] * 4, "one function", id="begun together"),
        pytest.param([(0, STEPS), (200, STEPS)], "one function", id="two"),
        *(([(0, STEPS), (200, STEPS), (400, STEPS)], kind) for kind in ("several functions", "pool", "not sampled")),
    ],
)
def test_other_threads(tmp_path: Path, lives: list[tuple[int, int]], kind: str) -> None:
    assert not write_job(tmp_path, lives, kind=kind)
