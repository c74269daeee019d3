"""Writes a recording as a trace that ui.perfetto.dev opens: https://perfetto.dev/docs/reference/synthetic-track-event.

Times in the trace are nanoseconds since the recording was made.

Phases of a rank as begins and ends that nest, in the order in which a trace needs them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, TracePacket, TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from zerotop.analysis.findings import Finding
from zerotop.analysis.trace.counters import Counter, Owner, read_counters
from zerotop.analysis.views.finding_search import list_findings
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Ints, Rows
from zerotop.recording.steps.step_table import StepTable
from zerotop_probe.recording.metrics import BYTES
from zerotop_probe.recording.tables import PHASES


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Begins and ends of slices by time; all arrays have shape (n,)."""

    times_ns: Ints
    phases: Ints  # index into PHASES; of an end that of its begin
    is_begin: np.ndarray[tuple[int], np.dtype[np.bool_]]


def build_edges(spans: Rows) -> Edges:
    """Return the edges of spans (SPANS): every slice is within the one around it, and none is empty.

    Spans of one depth that overlap are cut at the begin of the later one, and inner ones at the end of the outer one.
    """
    parts = [_cut_overlaps(spans[spans["depth"] == depth], depth) for depth in np.unique(spans["depth"]).tolist()]
    kept: list[_Slices] = []
    for part in parts:
        kept.append(_cut_at_parent(part, kept[-1]) if kept else part)
    begins, ends, phases, depths = (
        np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in kept)])
        for name in ("begins", "ends", "phases", "depths")
    )
    times = np.concatenate([begins, ends])
    is_begin = np.repeat([True, False], [len(begins), len(ends)])
    # At one moment inner slices end before outer ones, then outer ones begin before inner ones.
    level = np.concatenate([depths, -depths])
    order = np.lexsort((level, is_begin, times))
    return Edges(times[order], np.concatenate([phases, phases])[order], is_begin[order])


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    begins: Ints
    ends: Ints
    phases: Ints
    depths: Ints


def _cut_overlaps(spans: Rows, depth: int) -> _Slices:
    order = np.argsort(spans["begin_ns"], kind="stable")
    begins = spans["begin_ns"][order].astype(np.int64)
    ends = np.minimum(spans["end_ns"][order], np.append(begins[1:], np.iinfo(np.int64).max)).astype(np.int64)
    return _drop_empty(begins, ends, spans["phase"][order].astype(np.int64), depth)


def _cut_at_parent(inner: _Slices, outer: _Slices) -> _Slices:
    """Cut slices at the end of the outer slice in which they begin; slices without an outer one are unchanged."""
    if not len(outer.begins):
        return inner
    index = np.searchsorted(outer.begins, inner.begins, "right") - 1
    is_inside = (index >= 0) & (inner.begins < outer.ends[index])
    # One that begins outside may not reach into the next outer one.
    after = np.append(outer.begins, np.iinfo(np.int64).max)[index + 1]
    ends = np.minimum(inner.ends, np.where(is_inside, outer.ends[index], after))
    return _drop_empty(inner.begins, ends, inner.phases, int(inner.depths[0]) if len(inner.depths) else 0)


def _drop_empty(begins: Ints, ends: Ints, phases: Ints, depth: int) -> _Slices:
    kept = ends > begins
    return _Slices(begins[kept], ends[kept], phases[kept], np.full(int(kept.sum()), depth, np.int64))


# All packets are of one writer, whose names are interned: a name costs a number in each event.
_SEQUENCE = 1
_FIRST_NAME = 1


def write_trace(recording: Recording, stream: IO[bytes]) -> int:
    """Write the trace; return the number of packets. Raises OSError."""
    return _TraceWriter(recording, stream).write()


class _TraceWriter:
    def __init__(self, recording: Recording, stream: IO[bytes]) -> None:
        self._recording = recording
        self._builder = StreamingTraceProtoBuilder(stream)
        self._count = 0
        self._tracks: dict[tuple[str, ...], int] = {}

    def write(self) -> int:
        self._intern_names()
        self._write_findings(list_findings(self._recording))
        steps = StepTable(self._recording, memory=False)
        steps.update()
        for process in steps.rank_steps:
            source = process.source
            self._write_steps(source.rank, source.host, process.step_rows)
            self._write_phases(source.rank, source.host, source.array, source.offset_ns)
            source.release_memory()
        for counter in read_counters(self._recording):
            self._write_counter(counter)
        return self._count

    def _write(self, packet: TracePacket) -> None:
        self._builder.write_packet(packet)
        self._count += 1

    def _intern_names(self) -> None:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        for number, name in enumerate((*PHASES, "phase of a newer version"), _FIRST_NAME):
            packet.interned_data.event_names.add(iid=number, name=name)
        self._write(packet)

    def _define_track(self, *path: str, unit: str | None = None) -> int:
        """Return the track with this name under the tracks with the names before it."""
        if path not in self._tracks:
            packet = self._builder.create_packet()
            track = packet.track_descriptor
            # The same names give the same tracks in every export, so that traces can be compared.
            track.uuid = self._tracks[path] = zlib.crc32("\0".join(path).encode(errors="replace")) + 1
            track.name = path[-1].encode(errors="replace").decode()
            if len(path) > 1:
                track.parent_uuid = self._define_track(*path[:-1])
            if unit is not None:
                track.counter.unit_name = unit
                if unit == BYTES:
                    track.counter.unit = CounterDescriptor.UNIT_SIZE_BYTES
            self._write(packet)
        return self._tracks[path]

    def _make_event(self, track: int, kind: Any) -> TracePacket:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.track_event.track_uuid = track
        packet.track_event.type = kind
        return packet

    def _write_steps(self, rank: int, host: str, rows: Rows) -> None:
        track = self._define_track(_name_rank(rank, host), "steps")
        begin, end = (self._make_event(track, kind) for kind in (TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END))
        origin_ns = self._recording.begin_ns
        names = ("step", "steps", "begin_unix_ns", "end_unix_ns", "counted")
        for number, count, begin_ns, end_ns, counted in zip(*(rows[name].tolist() for name in names), strict=True):
            if end_ns <= begin_ns or begin_ns < origin_ns:
                continue
            begin.timestamp, end.timestamp = begin_ns - origin_ns, end_ns - origin_ns
            name = f"step {number}" if count == 1 else f"steps {number - count + 1} to {number}"
            begin.track_event.name = f"{name} (counted)" if counted else name
            self._write(begin)
            self._write(end)

    def _write_phases(self, rank: int, host: str, spans: Rows, offset_ns: int) -> None:
        track = self._define_track(_name_rank(rank, host), "phases")
        edges = build_edges(spans)
        begin, end = (self._make_event(track, kind) for kind in (TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END))
        times = (edges.times_ns + (offset_ns - self._recording.begin_ns)).clip(0).tolist()
        names = (edges.phases.clip(0, len(PHASES)) + _FIRST_NAME).tolist()
        for time_ns, name, is_begin in zip(times, names, edges.is_begin.tolist(), strict=True):
            packet = begin if is_begin else end
            packet.timestamp = time_ns
            if is_begin:
                packet.track_event.name_iid = name
            self._write(packet)

    def _write_counter(self, counter: Counter) -> None:
        track = self._define_track(_name_owner(counter.owner), counter.name, unit=counter.unit)
        packet = self._make_event(track, TrackEvent.TYPE_COUNTER)
        times = (counter.times_ns - self._recording.begin_ns).clip(0).tolist()
        event = packet.track_event
        for time_ns, value in zip(times, counter.values.tolist(), strict=True):
            packet.timestamp = time_ns
            event.double_counter_value = value
            self._write(packet)

    def _write_findings(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            packet = self._make_event(self._define_track("findings"), TrackEvent.TYPE_INSTANT)
            packet.timestamp = max(0, finding.begin_ns - self._recording.begin_ns)
            event = packet.track_event
            event.name = finding.name.replace("_", " ")
            texts = {
                "headline": finding.headline,
                "details": finding.details,
                "advice": finding.advice,
                "fix": finding.fix,
                "severity": finding.severity.value,
            }
            for name, text in texts.items():
                event.debug_annotations.add(name=name, string_value=text.encode(errors="replace").decode())
            if finding.step is not None:
                event.debug_annotations.add(name="step", int_value=finding.step)
            event.debug_annotations.add(name="ranks", string_value=" ".join(map(str, finding.ranks)))
            self._write(packet)


def _name_rank(rank: int, host: str) -> str:
    return f"rank {rank} on {host}"


def _name_owner(owner: Owner) -> str:
    if owner.rank is not None:
        return _name_rank(owner.rank, owner.host)
    return f"GPU {owner.gpu} of {owner.host}" if owner.gpu is not None else f"host {owner.host}"
