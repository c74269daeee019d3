"""``zerotop export --format perfetto``: the trace read back with Perfetto's own protobuf classes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, Trace, TrackEvent

import recordings
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.trace import counters
from zerotop.analysis.trace.perfetto import build_edges
from zerotop.cli import main
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import tables
from zerotop_probe.recording.metrics import PERCENT, Metric
from zerotop_probe.recording.tables import PHASE_CODE


@dataclass
class Slice:
    """One closed slice."""

    name: str
    begin_ns: int
    end_ns: int
    depth: int


@dataclass
class ReadTrace:
    """A trace as a viewer has it, by the path of each track's name."""

    slices: dict[tuple[str, ...], list[Slice]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[tuple[str, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    instants: list[Any] = field(default_factory=list)
    byte_counters: set[tuple[str, ...]] = field(default_factory=set)


def read_trace(path: Path) -> ReadTrace:
    """Read a trace as the trace processor does: events by time, ends close the innermost slice of their track."""
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    names: dict[int, str] = {}
    paths: dict[int, tuple[str, ...]] = {}
    found = ReadTrace()
    for packet in trace.packet:
        names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            parent = paths[track.parent_uuid] if track.parent_uuid else ()
            paths[track.uuid] = (*parent, track.name)
            if track.counter.unit == CounterDescriptor.UNIT_SIZE_BYTES:
                found.byte_counters.add(paths[track.uuid])
    open_slices: dict[int, list[tuple[str, int]]] = defaultdict(list)
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event = packet.track_event
        path_ = paths[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_slices[event.track_uuid].append((event.name or names[event.name_iid], packet.timestamp))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, begin_ns = open_slices[event.track_uuid].pop()
            found.slices[path_].append(Slice(name, begin_ns, packet.timestamp, len(open_slices[event.track_uuid])))
        elif event.type == TrackEvent.TYPE_COUNTER:
            found.counters[path_].append(event.double_counter_value)
        else:
            found.instants.append(packet)
    assert not any(open_slices.values())
    return found


@pytest.fixture(scope="module")
def story_trace(tmp_path_factory: pytest.TempPathFactory) -> ReadTrace:
    path = tmp_path_factory.mktemp("trace") / "story.pftrace"
    assert main(["export", str(recordings.find_packed_file("story")), "--format", "perfetto", "-o", str(path)]) == 0
    return read_trace(path)


def test_each_rank_has_its_phases_nested_as_recorded(story_trace: ReadTrace) -> None:
    recording = recordings.open_recording("story")
    for source in recording.sources["spans"]:
        phases = story_trace.slices[f"rank {source.rank} on vm", "phases"]
        spans = source.array
        assert len(phases) == len(spans)
        for name in ("forward", "backward", "cpu_optimizer"):
            recorded = spans[spans["phase"] == PHASE_CODE[name]]
            assert sum(one.end_ns - one.begin_ns for one in phases if one.name == name) == pytest.approx(
                int((recorded["end_ns"] - recorded["begin_ns"]).sum()), rel=1e-6
            )
            assert {one.depth for one in phases if one.name == name} <= {0, 1, 2}
        inside = [one for one in phases if one.name == "cpu_optimizer"]
        steps = [one for one in phases if one.name == "step"]
        assert inside
        assert all(any(step.begin_ns <= one.begin_ns < one.end_ns <= step.end_ns for step in steps) for one in inside)


def test_steps_counters_and_findings_are_there(story_trace: ReadTrace) -> None:
    recording = recordings.open_recording("story")
    rows = read_steps(recording)
    steps = story_trace.slices["rank 2 on vm", "steps"]
    assert [one.name for one in steps] == [f"step {number}" for number in rows["step"][rows["rank"] == 2]]
    reserved = story_trace.counters["rank 0 on vm", "reserved bytes"]
    rank_0 = next(source for source in recording.sources["allocator"] if source.rank == 0)
    assert max(reserved) == rank_0.array["reserved_bytes"].max()
    assert ("rank 0 on vm", "reserved bytes") in story_trace.byte_counters
    assert max(story_trace.counters["GPU 3 of vm", "utilization"]) == 100
    assert max(story_trace.counters["rank 1 on vm", "cores in use"]) > 10
    assert max(story_trace.counters["host vm", "cores in use"]) > 50
    findings = detect_findings(recording, recording.end_ns)
    assert [packet.track_event.name for packet in story_trace.instants] == [
        finding.name.replace("_", " ") for finding in sorted(findings, key=lambda finding: finding.begin_ns)
    ]
    texts = {note.name: note.string_value for note in story_trace.instants[0].track_event.debug_annotations}
    assert texts["headline"]
    assert texts["advice"]


@pytest.mark.parametrize("name", ["cpu-hang", "held-restart", "z2-oom", "gpu-z3-all"])
def test_traces_of_odd_jobs_close_every_slice(name: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.pftrace"
    assert main(["export", str(recordings.find_packed_file(name)), "--format", "perfetto", "-o", str(path)]) == 0
    trace = read_trace(path)
    for track in trace.slices.values():
        assert all(one.end_ns > one.begin_ns for one in track)


def test_spans_that_overlap_are_cut_so_that_they_nest() -> None:
    rows = np.zeros(5, np.dtype([tuple(entry) for entry in tables.SPANS.dtype]))
    rows["begin_ns"] = [0, 90, 10, 80, 300]
    rows["end_ns"] = [100, 200, 20, 120, 300]  # two overlap, an inner one ends after its outer one, one is empty
    rows["depth"] = [0, 0, 1, 1, 0]
    rows["phase"] = [3, 4, 5, 6, 7]
    edges = build_edges(rows)
    assert list(zip(edges.times_ns.tolist(), edges.phases.tolist(), edges.is_begin.tolist(), strict=True)) == [
        (0, 3, True),
        (10, 5, True),
        (20, 5, False),
        (80, 6, True),
        (90, 6, False),
        (90, 3, False),
        (90, 4, True),
        (200, 4, False),
    ]


def test_long_counters_keep_their_spikes() -> None:
    values = np.random.default_rng(0).integers(0, 100, 300_000).astype(np.float64)
    values[123_456] = 1000
    thinned = counters.thin_values(values)
    assert len(thinned) <= 40_000
    assert 123_456 in thinned
    assert (np.diff(thinned) > 0).all()
    assert counters.thin_values(np.array([5.0, 5.0, 5.0, 6.0, 6.0])).tolist() == [0, 3]


def test_wrong_uses_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    story = str(recordings.find_packed_file("story"))
    assert main(["export", story, "--format", "perfetto", "--table", "spans", "-o", str(tmp_path / "x")]) == 2
    assert "a trace has everything" in capfd.readouterr().err
    assert main(["export", story, "--format", "perfetto", "-o", str(tmp_path / "missing" / "x")]) == 1


def test_a_counter_that_the_recording_is_too_old_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = tables.GPUS._replace(metrics=(*tables.GPUS.metrics, Metric("fan", PERCENT, "fan_percent", trace="fan")))
    monkeypatch.setattr(counters, "TABLES", {**tables.TABLES, "gpus": newer})
    names = {counter.name for counter in counters.read_counters(recordings.open_recording("story"))}
    assert "power" in names
    assert "fan" not in names
