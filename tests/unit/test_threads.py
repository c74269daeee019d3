"""The threads of a rank at a cursor, from small recordings whose figures are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.live_view import Activity, LateActivity, Rank
from zerotop.analysis.processes.cores import Affinities, parse_cores
from zerotop.analysis.processes.thread_kinds import MAIN, OPENMP, POOL, UNNAMED
from zerotop.analysis.ranks.threads import RankThreads, ThreadTable, describe_crowding
from zerotop.analysis.views.history import PIECE_NS
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import tables
from zerotop_probe.recording.event_values import format_numbers
from zerotop_probe.recording.events import Affinity, Event, Node, ThreadNames
from zerotop_probe.recording.writer import EventWriter

SAMPLER = make_identity(-1)
CELLS = 20


def make_thread(at: float, tid: int, cores: float, *, name: bytes = b"python3", pid: int = 100, **columns: float) -> Any:
    fields = {"pid": pid, "tid": tid, "cores_used": cores, "name": name, "processor": columns.get("core", 0)}
    counters = {f"{name}_ns": int(columns.get(name, 0) * S) for name in ("wait", "cpu")}
    return make_record(tables.THREADS, time_ns=int(at * S), **fields, **counters)


def make_process(at: float, cores: float, busy: int, *, rank: int = 0, pid: int = 100, waiting: float = 0.0) -> Any:
    fields = {"rank": rank, "pid": pid, "rss_bytes": 1, "cores_used": cores, "busy_threads": busy, "thread_count": 30}
    return make_record(tables.PROCESSES, time_ns=int(at * S), waiting_cores=waiting, **fields)


def record_threads(folder: Path, *threads: Any, processes: Any = ()) -> Recording:
    write_table(folder, tables.THREADS, SAMPLER, *threads).close()
    write_table(
        folder, tables.PROCESSES, SAMPLER, *(processes or [make_process(at / 2, 3.0, 3) for at in range(1, 20)])
    ).close()
    return read_recording(folder)


def read_threads(recording: Recording, at: float, pieces: int = 1, table: ThreadTable | None = None) -> RankThreads:
    cursor = BEGIN_NS + int(at * S)
    (rank, *_) = RecordingSource(recording).view_at(cursor).ranks
    return (table or ThreadTable(recording)).threads_at(rank, cursor, CELLS, pieces * PIECE_NS)


def write_event(folder: Path, at: float, event: type[Event], **facts: Any) -> None:
    writer = EventWriter(str(folder), SAMPLER)
    writer.write(int(at * S), event, **facts)
    writer.close()


def test_listed_threads_that_are_idle_now_are_no_others(tmp_path: Path) -> None:
    """The rank has 30 threads: 2 are in the table, though one has not run for some seconds."""
    rows = [make_thread(at / 2, 100, 0.9, name=b"python3") for at in range(1, 20)]
    rows += [make_thread(at / 2, 101, 0.5 if at < 12 else 0.0, name=b"worker") for at in range(1, 20)]
    threads = read_threads(record_threads(tmp_path, *rows), 9.6)
    listed = sum(len(group.threads) for group in threads.groups)
    assert (listed, threads.rest_threads) == (2, 28)


def test_threads_of_a_name_are_a_group_and_the_first_thread_is_one_of_its_own(tmp_path: Path) -> None:
    at_once = [(100, 0.5, b"python3"), (101, 0.9, b"python3"), (102, 0.8, b"python3"), (103, 0.1, b"worker-1")]
    rows = [make_thread(at / 2, tid, cores, name=name) for at in range(1, 20) for tid, cores, name in at_once]
    rows += [make_thread(at / 2, 104, 0.1, name=b"worker-2") for at in range(1, 20)]
    threads = read_threads(record_threads(tmp_path, *rows), 9.6)
    assert [(group.name, [one.tid for one in group.threads]) for group in threads.groups] == [
        (POOL, [101, 102]),
        (MAIN, [100]),
        ("worker*", [103, 104]),
    ]
    assert threads.groups[0].cores_used == pytest.approx(1.7)
    assert threads.rest_cores == pytest.approx(3.0 - 2.4)
    assert threads.rest_threads == 25


def test_the_first_sample_of_a_process_is_found_where_it_is_recent(tmp_path: Path) -> None:
    recording = record_threads(tmp_path, processes=[make_process(at / 2, 3.0, 3) for at in range(4, 20)])
    cursor_ns, table = BEGIN_NS + 9 * S, ThreadTable(recording)
    (rank, *_) = RecordingSource(recording).view_at(cursor_ns).ranks
    assert table.find_first_sample(rank, cursor_ns, 60 * S) == BEGIN_NS + 2 * S
    assert table.find_first_sample(rank, cursor_ns, 5 * S) is None


def test_a_thread_has_the_cores_of_each_cell_and_none_of_those_of_others(tmp_path: Path) -> None:
    rows = [
        make_thread(1.5, 101, 0.5),
        make_thread(2.0, 101, 1.0),
        make_thread(3.1, 101, 0.25),
        make_thread(3.1, 900, 1.0, pid=200),
    ]
    rows += [make_thread(5.0, 900, 1.0, pid=200)]
    (group,) = read_threads(record_threads(tmp_path, *rows), 5.2).groups
    cells = dict(enumerate(group.cores_history.tolist(), start=10 - CELLS))
    # Ticks in which it is not among the busiest are ticks in which it hardly ran; where there is none the one before counts.
    assert {cell: value for cell, value in cells.items() if value > 0} == {3: 0.5, 4: 1.0, 5: 1.0, 6: 0.25, 7: 0.25}
    assert [cell for cell in range(10) if math.isnan(cells[cell])] == [0, 1, 2, 8, 9]
    assert group.cores_used == 0.0


def test_samples_after_the_cursor_are_not_shown(tmp_path: Path) -> None:
    recording = record_threads(tmp_path, *[make_thread(at / 2, 101, at / 20) for at in range(1, 20)])
    before = read_threads(recording, 4.1)
    assert before.groups[0].cores_used == pytest.approx(7.5 / 20)  # mean of the last second's two samples
    assert before.time_s.max() <= BEGIN_NS / 1e9 + 4.1
    assert before.end_s <= BEGIN_NS / 1e9 + 4.1


def test_growing_equals_opening_later(tmp_path: Path) -> None:
    writer = write_table(tmp_path, tables.THREADS, SAMPLER)
    write_table(tmp_path, tables.PROCESSES, SAMPLER, *[make_process(at / 2, 1.0, 1) for at in range(1, 20)]).close()
    recording = read_recording(tmp_path)
    table = ThreadTable(recording)
    for at in range(1, 20):
        writer.write(*make_thread(at / 2, 100 + at % 3, 0.5))
        recording.refresh()
        growing = read_threads(recording, at / 2 + 0.1, table=table)
        again = read_threads(read_recording(tmp_path), at / 2 + 0.1)
        assert [group.name for group in growing.groups] == [group.name for group in again.groups]
        for one, other in zip(growing.groups, again.groups, strict=True):
            np.testing.assert_array_equal(one.cores_history, other.cores_history)
    assert read_threads(recording, 9.6, table=table) is read_threads(recording, 9.6, table=table)
    writer.close()


def test_waiting_cores_are_averaged_over_the_last_second(tmp_path: Path) -> None:
    rows = [make_thread(at, 101, 0.5, wait=(0 if at < 15 else (at - 15) * 0.4)) for at in range(1, 26)]
    recording = record_threads(tmp_path, *rows, processes=[make_process(at, 1.0, 1) for at in range(1, 26)])
    assert read_threads(recording, 25.1, 2).groups[0].waiting_cores == pytest.approx(0.4, rel=0.1)
    assert read_threads(recording, 14.1, 2).groups[0].waiting_cores == 0.0
    assert math.isnan(read_threads(recording, 1.1, 2).groups[0].waiting_cores)


def test_threads_have_their_cores_nodes_and_affinity(tmp_path: Path) -> None:
    write_event(tmp_path, 0.1, Node, numa=[{"node": 0, "cpus": "0-3"}, {"node": 1, "cpus": "4-7"}])
    writer = EventWriter(str(tmp_path), make_identity(-1, pid=7))
    writer.write(int(0.2 * S), Affinity, pid=100, cpus="0-7", threads={"102": "5"})
    writer.write(int(4.0 * S), Affinity, pid=100, cpus="0-3", threads={"101": "0-7"})
    rows = [make_thread(at / 2, tid, 0.5, core=at % 6 if tid == 101 else 5) for at in range(1, 20) for tid in (101, 102)]
    recording = record_threads(tmp_path, *rows)
    (group,) = read_threads(recording, 9.6).groups
    first, second = sorted(group.threads, key=lambda one: one.tid)
    assert (format_numbers(first.ran_on), first.numa_nodes, format_numbers(first.allowed_cores)) == ("0-5", (0, 1), "0-7")
    assert (format_numbers(second.ran_on), second.numa_nodes, format_numbers(second.allowed_cores)) == ("5", (1,), "5")
    affinities = Affinities(recording)
    assert [format_numbers(affinities.find_process_cores("node1", 100, BEGIN_NS + at * S)) for at in (0, 1, 5)] == [
        "",
        "0-7",
        "0-3",
    ]
    assert (affinities.count_nodes("node1"), affinities.count_nodes("node2")) == (2, 0)


def test_the_phase_of_each_cell(tmp_path: Path) -> None:
    rank = make_identity(0, pid=100)
    begins = [(int(at * S), 0, 0, tables.PHASE_CODE[phase], 0, 0, 0) for at, phase in ((1, "forward"), (2, "backward"))]
    write_table(tmp_path, tables.BEGINS, rank, *begins).close()
    write_table(tmp_path, tables.SPANS, rank, make_span(1, 2, "forward"), make_span(2, 4, "backward")).close()
    threads = read_threads(record_threads(tmp_path, make_thread(3, 101, 0.5)), 4.2)
    assert threads.phases[-8:] == ("", "", "forward", "forward", *["backward"] * 4)


def test_phases_shorter_than_the_samples_have_no_means(tmp_path: Path) -> None:
    rank = make_identity(0, pid=100)
    changes = [*enumerate(("forward", "step"), 1), *((3 + at / 10, ("forward", "backward")[at % 2]) for at in range(30))]
    begins = [(int(at * S), 0, 0, tables.PHASE_CODE[phase], 0, 0, 0) for at, phase in changes]
    ends = [at for at, _ in changes[1:]] + [6]
    write_table(tmp_path, tables.BEGINS, rank, *begins).close()
    spans = [make_span(at, end, phase) for (at, phase), end in zip(changes, ends, strict=True)]
    write_table(tmp_path, tables.SPANS, rank, *spans).close()
    # Half a second each: two of the step, two of a long forward, and six in which forward and backward take turns.
    cores = {1.5: 1.0, 2.0: 1.0, 2.5: 8.0, 3.0: 10.0}
    processes = [make_process(at / 2, cores.get(at / 2, 4.0), 3) for at in range(1, 13)]
    threads = read_threads(record_threads(tmp_path, make_thread(3, 101, 0.5), processes=processes), 6.1)
    assert threads.phase_means["step"] == (9.0, 9.0)
    assert not threads.phase_means.keys() & {"forward", "backward"}


def test_without_threads_it_says_so(tmp_path: Path) -> None:
    write_table(tmp_path, tables.PROCESSES, SAMPLER, make_process(1, 2.0, 2)).close()
    threads = read_threads(read_recording(tmp_path), 1.5)
    assert (threads.groups, threads.is_recorded, threads.rest_threads) == ((), False, 30)


def make_ranks(*facts: tuple[int, float, float], host: str = "node1") -> list[Rank]:
    """Of (rank, cores used, waiting)."""
    return [
        Rank(rank, host, 100 + rank, True, LateActivity(Activity), 0, 1, 1, 0, 0, used, waiting, 20)
        for rank, used, waiting in facts
    ]


def test_more_threads_than_cores_are_reported(tmp_path: Path) -> None:
    affinities = Affinities(record_threads(tmp_path))
    (notes,) = describe_crowding(make_ranks((0, 8.0, 6.0), (1, 8.0, 6.0)), {"node1": 16}, affinities, BEGIN_NS)
    assert notes.startswith("28 threads compete for 16 cores: 12.0 of them wait. Set OMP_NUM_THREADS=8")
    assert describe_crowding(make_ranks((0, 8.0, 0.5), (1, 8.0, 0.3)), {"node1": 16}, affinities, BEGIN_NS) == []
    assert describe_crowding(make_ranks((0, 8.0, math.nan)), {}, affinities, BEGIN_NS) == []
    # It is other processes that have the cores.
    assert describe_crowding(make_ranks((0, 0.3, 0.8), (1, 0.3, 0.7)), {"node1": 2}, affinities, BEGIN_NS) == []


def test_ranks_that_share_cores_are_reported(tmp_path: Path) -> None:
    for rank, cpus in enumerate(("0-7", "8-15", "15,16")):
        writer = EventWriter(str(tmp_path), make_identity(-1, pid=50 + rank))
        writer.write(0, Affinity, pid=100 + rank, cpus=cpus, threads={})
        writer.close()
    affinities, now = Affinities(record_threads(tmp_path)), BEGIN_NS + S
    three = make_ranks((0, 1.0, 0.0), (1, 1.0, 0.0), (2, 1.0, 0.0))
    assert describe_crowding(three, {"node1": 32}, affinities, now) == [
        "Ranks 1 and 2 are bound to the same cores, including core 15."
    ]
    assert describe_crowding(three[:2], {"node1": 32}, affinities, now) == []
    # All cores of the node are no bond.
    assert describe_crowding(three[2:] * 2, {"node1": 2}, affinities, now) == []


@given(st.frozensets(st.integers(0, 300)))
def test_sets_of_cores_there_and_back(cores: frozenset[int]) -> None:
    assert parse_cores(format_numbers(cores)) == cores


def test_an_invalid_list_of_cores_is_empty() -> None:
    assert parse_cores("") == parse_cores("none") == parse_cores("3-x") == parse_cores("\N{SUPERSCRIPT TWO}") == frozenset()
    assert len(parse_cores("0-99999999999")) < 1 << 17


def test_threads_are_named_by_what_they_are(tmp_path: Path) -> None:
    names = {
        100: b"python3",
        101: b"pt_autograd_0",
        102: b"NCCL Progress",
        103: b"python3",
        104: b"python3",
        105: b"python3",
    }
    rows = [make_thread(at / 2, tid, 0.1, name=name) for at in range(1, 20) for tid, name in names.items()]
    recording = record_threads(tmp_path, *rows)
    writer = EventWriter(str(tmp_path), SAMPLER)
    writer.write(1 * S, ThreadNames, pid=100, python={"103": "refresher"})
    writer.write(1 * S, ThreadNames, pid=100, libraries={"104": "libgomp.so.1"})
    writer.write(1 * S, ThreadNames, pid=200, libraries={"105": "libgomp.so.1"})
    writer.close()
    recording.refresh()
    kinds = {thread.tid: thread.kind for group in read_threads(recording, 9.6).groups for thread in group.threads}
    assert kinds == {100: MAIN, 101: "autograd", 102: "NCCL", 103: "Python refresher", 104: OPENMP, 105: UNNAMED}


def test_a_thread_is_counted_while_it_is_not_among_the_busiest(tmp_path: Path) -> None:
    """Its counter has grown meanwhile."""
    rows = [make_thread(at, 101, 0.5, cpu=cpu) for at, cpu in ((1.0, 0.5), (9.0, 4.5))]
    rows += [make_thread(at / 2, 102, 0.1, cpu=at / 20) for at in range(1, 20)]
    threads = read_threads(record_threads(tmp_path, *rows), 9.1)
    assert {one.tid: round(one.cores_used, 2) for group in threads.groups for one in group.threads} == {101: 0.5, 102: 0.1}
