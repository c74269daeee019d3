"""Ranks, hosts and GPUs at a cursor: samplers and jobs that are started again, peaks, what is not known."""

from __future__ import annotations

import gc
import itertools
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recordings import unpack_to_folder
from small_recording import BEGIN_NS, S, make_identity, make_record, read_recording, write_table
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.processes import running_max as peaks_module
from zerotop.analysis.processes.running_max import find_peaks
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import tables
from zerotop_probe.recording.events import Engine, JobEnded, Left, Node, RankGone
from zerotop_probe.recording.tables import PHASE_CODE
from zerotop_probe.recording.writer import EventWriter, Identity

SAMPLER = make_identity(-1)
LATER_SAMPLER = SAMPLER._replace(pid=1)  # its files are found first


def view_at(folder: Path, at: float) -> LiveView:
    return RecordingSource(read_recording(folder)).view_at(BEGIN_NS + int(at * S))


def write_facts(
    folder: Path, table: tables.Table, who: Identity, *facts: dict[str, Any], born: float = 0, **header: Any
) -> None:
    """Writes records; ``at`` among their facts is their time in seconds."""
    records = [make_record(table, time_ns=int(fact.pop("at") * S), **fact) for fact in map(dict, facts)]
    write_table(folder, table, who, *records, born=born, **header).close()


def make_process(at: float, rss: int, *, rank: int = 0, pid: int = 100) -> dict[str, Any]:
    return {"at": at, "rss_bytes": rss, "rank": rank, "pid": pid}


_PIDS = st.integers(0, 3)
_VALUES = st.lists(st.integers(-1, 50), max_size=60)


@st.composite
def draw_ticks(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw samples of the same processes again and again, as a sampler writes them."""
    return list(zip(itertools.cycle(draw(st.lists(_PIDS, min_size=1, max_size=5))), draw(_VALUES), strict=False))


@given(
    st.lists(st.tuples(_PIDS, st.integers(-1, 50)), max_size=60) | draw_ticks(),
    st.integers(1, 9),
    st.integers(0, 9),
    st.lists(st.integers(-1, 70), max_size=8),
)
def test_peaks(samples: list[tuple[int, int]], block: int, few: int, cursors: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(peaks_module, "_BLOCK_ROWS", block)
        patch.setattr(peaks_module, "_FEW_ROWS", few)
        facts = [make_process(at, rss, rank=-1, pid=pid) for at, (pid, rss) in enumerate(samples)]
        write_facts(Path(folder), tables.PROCESSES, SAMPLER, *facts)
        (source,) = read_recording(Path(folder)).sources["processes"]
        for cursor in cursors:
            known = samples[: cursor + 1]
            expected = {pid: (max(rss for other, rss in known if other == pid), -1) for pid, _ in known}
            columns = ("rss_bytes", "rank")
            assert find_peaks(source, columns, BEGIN_NS + cursor * S, by="pid") == expected


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=12), st.integers(0, 13))
def test_the_last_sample_of_each_process(ticks: list[set[int]], cursor: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        facts = [make_process(at, at, rank=pid, pid=pid) for at, pids in enumerate(ticks) for pid in sorted(pids)]
        write_facts(Path(folder), tables.PROCESSES, SAMPLER, *facts)
        last = {pid: at for at, pids in enumerate(ticks[: cursor + 1]) for pid in pids}
        assert {rank.pid: rank.rss_bytes for rank in view_at(Path(folder), cursor).ranks} == last


def test_a_sampler_that_was_started_again(tmp_path: Path) -> None:
    for sampler, begin, size in ((SAMPLER, 1, 50), (LATER_SAMPLER, 5, 20)):
        write_facts(
            tmp_path,
            tables.PROCESSES,
            sampler,
            make_process(begin, size, pid=100),
            make_process(begin + 1, size - 10, pid=100),
        )
        write_facts(tmp_path, tables.HOSTS, sampler, {"at": begin, "cores": begin, "memory_total_bytes": 9})
        write_facts(tmp_path, tables.THREADS, sampler, {"at": begin, "pid": 100, "cores_used": 0.5, "name": b"t%d" % begin})
    (rank,), (host,) = view_at(tmp_path, 6).ranks, view_at(tmp_path, 6).hosts
    assert (rank.rss_bytes, rank.rss_peak_bytes, rank.alive) == (10, 50, True)
    assert rank.busiest == (("t5", 0.5),)
    assert host.cores == 5
    (before,) = view_at(tmp_path, 2).ranks
    assert (before.rss_bytes, before.rss_peak_bytes, before.busiest) == (40, 50, (("t1", 0.5),))
    assert not view_at(tmp_path, 20).ranks[0].alive


def test_threads_are_averaged_over_the_time_of_their_ranks_cores(tmp_path: Path) -> None:
    processes = [{**make_process(at, 1, pid=100), "cores_used": cores} for at, cores in ((5.5, 0.4), (6, 0.8))]
    write_facts(tmp_path, tables.PROCESSES, SAMPLER, *processes)
    write_facts(tmp_path, tables.HOSTS, SAMPLER, {"at": 6, "cores": 2, "memory_total_bytes": 9})
    uses = ((5.5, 1, 0.4), (6, 1, 0.2), (6, 2, 0.6))
    threads = [{"at": at, "pid": 100, "tid": tid, "cores_used": used, "name": b"t%d" % tid} for at, tid, used in uses]
    write_facts(tmp_path, tables.THREADS, SAMPLER, *threads)
    (rank,) = view_at(tmp_path, 6).ranks
    # Of the last tick alone they would be 0.6 and 0.2, which do not add up to the cores beside them.
    assert rank.cores_used == pytest.approx(0.6)
    assert sorted((name, round(used, 3)) for name, used in rank.busiest) == [("t1", 0.3), ("t2", 0.3)]


def test_a_rank_that_was_started_again_is_its_last_process(tmp_path: Path) -> None:
    write_facts(tmp_path, tables.PROCESSES, SAMPLER, make_process(1, 10, pid=300), make_process(2, 20, pid=200))
    assert [rank.pid for rank in view_at(tmp_path, 1).ranks] == [300]
    assert [rank.pid for rank in view_at(tmp_path, 3).ranks] == [200]


def test_launchers_are_shown_while_there_are_no_ranks(tmp_path: Path) -> None:
    write_facts(tmp_path, tables.PROCESSES, SAMPLER, make_process(1, 10, rank=-1, pid=7), make_process(5, 20, pid=8))
    assert [rank.rank for rank in view_at(tmp_path, 2).ranks] == [-1]
    assert [rank.rank for rank in view_at(tmp_path, 5).ranks] == [0]


def test_a_phase_of_the_future_is_some_other(tmp_path: Path) -> None:
    write_facts(tmp_path, tables.PROCESSES, SAMPLER, make_process(2, 10))
    write_facts(tmp_path, tables.BEGINS, make_identity(0), {"at": 1, "phase": 99, "step": 3})
    (rank,) = view_at(tmp_path, 2.5).ranks
    assert (rank.phase, rank.phase_s, rank.step) == ("other", 1.5, 3)


@pytest.mark.parametrize(("limit", "expected"), [(-1, (1000, 600)), (800, (800, 70)), (2000, (1000, 600))])
def test_a_hosts_memory_is_what_the_job_may_use(tmp_path: Path, limit: int, expected: tuple[int, int]) -> None:
    sizes = {"memory_total_bytes": 1000, "memory_available_bytes": 400, "cgroup_used_bytes": 70}
    write_facts(tmp_path, tables.HOSTS, SAMPLER, {"at": 1, "cores": 4, "cgroup_limit_bytes": limit, **sizes})
    (host,) = view_at(tmp_path, 1).hosts
    assert (host.memory_limit_bytes, host.memory_used_bytes, host.swap_used_bytes) == (*expected, 0)


def test_gpus(tmp_path: Path) -> None:
    events = EventWriter(str(tmp_path), SAMPLER)
    seen = ((0, "GPU-aa", "H200"), (1, "GPU-bb", "B"))
    events.write(0, Node, gpus=[{"index": index, "uuid": uuid, "name": name} for index, uuid, name in seen])
    for rank, uuid in ((0, "bb"), (1, "bb"), (2, "aa")):
        ranks = EventWriter(str(tmp_path), make_identity(rank))
        ranks.write(0, Engine, devices=[{"ordinal": 0, "uuid": uuid}])
        ranks.close()
        write_facts(tmp_path, tables.BEGINS, make_identity(rank), {"at": 1, "phase": 3})
    for rank, sizes in ((0, (5, 9, 3)), (1, (20, 10, 10))):
        reserved = {"reserved_bytes": 30, "reserved_peak_bytes": 31}
        held = [{"allocated_bytes": size, "allocated_peak_bytes": size + 1, **reserved} for size in sizes]
        samples = [{"at": at, **bytes_} for at, bytes_ in enumerate(held, 1)]
        write_facts(tmp_path, tables.ALLOCATOR, make_identity(rank), *samples, peaks="window")
    both = [{"at": at, "gpu": gpu, "total_bytes": 99, "used_bytes": 60 + gpu} for at in (2, 3) for gpu in (0, 1)]
    write_facts(tmp_path, tables.GPUS, SAMPLER, *({**fact, "pcie_tx_bytes": fact["at"] * 1000} for fact in both))
    processes = [{"at": 3, "gpu": 1, "pid": pid, "used_bytes": used} for pid, used in ((100, 40), (101, 50), (7, 5))]
    write_facts(tmp_path, tables.GPU_PROCESSES, SAMPLER, *processes, {"at": 3, "gpu": 0, "pid": 102})
    events.close()
    first, second = view_at(tmp_path, 3).gpus
    assert (second.name, second.used_bytes, second.total_bytes, second.process_bytes) == ("B", 61, 99, 90)
    assert (second.allocated_bytes, second.allocated_peak_bytes) == (3 + 10, 10 + 21)
    assert (second.reserved_bytes, second.reserved_peak_bytes) == (60, 62)
    assert second.pcie_tx_bytes_per_s == 1000
    assert math.isnan(second.pcie_rx_bytes_per_s)
    assert (first.name, first.allocated_bytes, first.allocated_peak_bytes, first.process_bytes) == ("H200", None, None, None)
    assert view_at(tmp_path, 2).gpus[1].allocated_peak_bytes == 10 + 21
    assert view_at(tmp_path, 2).gpus[1].process_bytes is None


def test_a_rank_that_was_started_again_holds_its_memory_once(tmp_path: Path) -> None:
    write_facts(tmp_path, tables.GPUS, SAMPLER, {"at": 9, "gpu": 0, "total_bytes": 99, "used_bytes": 60})
    sizes = {"allocated_peak_bytes": 50, "reserved_bytes": 1, "reserved_peak_bytes": 1}
    write_facts(tmp_path, tables.ALLOCATOR, make_identity(0, 900), {"at": 1, "allocated_bytes": 40, **sizes}, born=1)
    again = {**sizes, "allocated_peak_bytes": 8}
    write_facts(tmp_path, tables.ALLOCATOR, make_identity(0, 200), {"at": 8, "allocated_bytes": 7, **again}, born=8)
    (gpu,) = view_at(tmp_path, 9).gpus
    assert (gpu.allocated_bytes, gpu.allocated_peak_bytes, gpu.reserved_bytes) == (7, 50, 1)


def test_the_memory_of_a_rank_goes_with_it(tmp_path: Path) -> None:
    write_facts(
        tmp_path, tables.GPUS, SAMPLER, *({"at": at, "gpu": 0, "total_bytes": 99, "used_bytes": 60} for at in range(1, 10))
    )
    for rank in (0, 1):
        sizes = {"allocated_bytes": 40, "allocated_peak_bytes": 50, "reserved_bytes": 45, "reserved_peak_bytes": 55}
        write_facts(tmp_path, tables.ALLOCATOR, make_identity(rank), {"at": 1, **sizes}, born=1)
    events = EventWriter(str(tmp_path), SAMPLER)
    events.write(3 * S, RankGone, rank=0, pid=make_identity(0).pid)
    events.write(5 * S, JobEnded, exit_code=0)
    events.close()
    seen = [view_at(tmp_path, second).gpus[0] for second in (2, 4, 6)]
    assert [(gpu.allocated_bytes, gpu.reserved_bytes) for gpu in seen] == [(80, 90), (40, 45), (None, None)]
    assert {(gpu.allocated_peak_bytes, gpu.reserved_peak_bytes) for gpu in seen} == {(100, 110)}


def test_a_rank_without_its_probe_has_no_place_until_it_is_entered_again(tmp_path: Path) -> None:
    write_facts(
        tmp_path, tables.GPUS, SAMPLER, *({"at": at, "gpu": 0, "total_bytes": 99, "used_bytes": 60} for at in range(1, 10))
    )
    write_facts(tmp_path, tables.PROCESSES, SAMPLER, *(make_process(at, 5) for at in range(1, 10)))
    for born, size in ((1, 40), (7, 30)):
        sizes = {"allocated_peak_bytes": 50, "reserved_bytes": size + 5, "reserved_peak_bytes": 55}
        write_facts(tmp_path, tables.ALLOCATOR, make_identity(0), {"at": born, "allocated_bytes": size, **sizes}, born=born)
        write_facts(
            tmp_path, tables.BEGINS, make_identity(0), {"at": born, "phase": PHASE_CODE["forward"], "step": born}, born=born
        )
    events = EventWriter(str(tmp_path), make_identity(0))
    events.write(4 * S, Left, lost=0)
    events.close()
    seen = [view_at(tmp_path, second) for second in (3, 6, 9)]
    assert [(one.gpus[0].allocated_bytes, one.gpus[0].reserved_bytes) for one in seen] == [(40, 45), (None, None), (30, 35)]
    assert {one.gpus[0].allocated_peak_bytes for one in seen} == {50}
    assert [(one.ranks[0].phase, one.ranks[0].step, one.ranks[0].alive) for one in seen] == [
        ("forward", 1, True), ("", 1, True), ("forward", 7, True),
    ]  # fmt: skip
    strip = seen[-1].history
    assert [math.isnan(value) for value in strip.gpus["node1", 0].allocated_bytes[-9:]] == [True] * 5 + [False] * 4
    assert [bool(phase) for phase in strip.ranks[0].phase[-9:]] == [False] * 5 + [True] * 4


def test_a_recording_holds_no_file_open_and_what_is_mapped_goes_with_it(tmp_path: Path) -> None:
    folder = unpack_to_folder("cpu-clean", tmp_path)

    def count_maps() -> int:
        return Path("/proc/self/maps").read_text().count(f"{folder}/")

    source = RecordingSource(Recording.open(folder))
    source.view_at(None)
    assert count_maps() > 0
    opened = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if path.startswith(str(folder))]
    del source
    gc.collect()
    assert count_maps() == 0
