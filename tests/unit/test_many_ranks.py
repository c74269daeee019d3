"""With very many ranks a view and a search cost a few looks at each table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings import begin_detection
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.recording.table_files import Source
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import Engine, Hello
from zerotop_probe.recording.tables import PHASE_CODE
from zerotop_probe.recording.writer import EventWriter

RANKS, NODE, STEPS = 160, 8, 12
TABLES = 4 * RANKS + 5 * RANKS // NODE


def write_ranks(folder: Path) -> None:
    """Ranks that train, eight on each node."""
    for rank in range(RANKS):
        who = make_identity(rank, host=f"node{rank // NODE}")
        events = EventWriter(str(folder), who)
        events.write(1, Hello, rank=rank)
        events.write(1, Engine, engine=0, devices=[{"ordinal": rank % NODE}], world_size=RANKS)
        events.close()
        spans = [
            make_span(step + begin, step + end, phase, step, flags)
            for step in range(STEPS)
            for phase, begin, end, flags in (("forward", 0.1, 0.4, 0), ("step", 0.4, 0.9, tables.BOUNDARY))
        ]
        begins = [
            make_record(tables.BEGINS, time_ns=int((step + 0.1) * S), phase=PHASE_CODE["forward"], depth=0, step=step)
            for step in range(STEPS)
        ]
        allocator = [
            make_record(tables.ALLOCATOR, time_ns=step * S, allocated_bytes=1, device=rank % NODE) for step in range(STEPS)
        ]
        probe = [make_record(tables.PROBE, time_ns=step * S, cost_ns=step, lost=0, errors=0) for step in range(STEPS)]
        of_rank = (tables.SPANS, spans), (tables.BEGINS, begins), (tables.ALLOCATOR, allocator), (tables.PROBE, probe)
        for table, records in of_rank:
            write_table(folder, table, who, *records).close()
    for node in range(RANKS // NODE):
        write_samples(folder, node)


def write_samples(folder: Path, node: int) -> None:
    """What a node's sampler sees."""
    who = make_identity(-1, host=f"node{node}")
    ranks = range(node * NODE, node * NODE + NODE)
    samples: dict[tables.Table, list[Any]] = {}
    for at in range(STEPS):
        now: dict[str, Any] = {"time_ns": at * S}
        samples.setdefault(tables.HOSTS, []).append(
            make_record(tables.HOSTS, **now, memory_total_bytes=9, cores=8, cores_used=1.0)
        )
        for rank in ranks:
            pid, gpu = {"pid": 100 + rank}, {"gpu": rank % NODE}
            samples.setdefault(tables.GPUS, []).append(make_record(tables.GPUS, **now, **gpu, used_bytes=5, total_bytes=9))
            samples.setdefault(tables.GPU_PROCESSES, []).append(
                make_record(tables.GPU_PROCESSES, **now, **gpu, **pid, used_bytes=3)
            )
            samples.setdefault(tables.PROCESSES, []).append(
                make_record(tables.PROCESSES, **now, **pid, rank=rank, rss_bytes=7)
            )
            samples.setdefault(tables.THREADS, []).append(
                make_record(tables.THREADS, **now, **pid, tid=pid["pid"], cores_used=0.5)
            )
    for table, records in samples.items():
        write_table(folder, table, who, *records).close()


@pytest.fixture(scope="module")
def large_recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Of very many ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    write_ranks(folder)
    return read_recording(folder)


@pytest.fixture
def sources_read(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """The tables that were looked at."""
    found: list[Source] = []
    count_known = Source.count_until

    def count_and_note(source: Source, cursor_ns: int) -> int:
        found.append(source)
        return count_known(source, cursor_ns)

    monkeypatch.setattr(Source, "count_until", count_and_note)
    return found


def test_findings(large_recording: Recording, sources_read: list[Source]) -> None:
    detection = begin_detection(large_recording)
    while detection.search_piece(large_recording.last_written_ns) or detection.is_behind:
        assert len(sources_read) <= 25 * TABLES, "a piece asks each table a few times"
        sources_read.clear()


def test_a_view_asks_each_table_a_few_times(large_recording: Recording, sources_read: list[Source]) -> None:
    source = RecordingSource(large_recording)
    for cursor_ns in (BEGIN_NS + 5 * S, BEGIN_NS + 3 * S):
        sources_read.clear()
        assert len(source.view_at(cursor_ns).ranks) == RANKS
        print(len(sources_read) / TABLES)
        assert len(sources_read) <= 5 * TABLES
