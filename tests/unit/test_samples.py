"""Samples of a recording: windows, groups, ticks, bins, and the memory of hosts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, read_recording, write_table
from zerotop.recording.moments.host_memory import HostMemory, measure_used_bytes, read_host_memory
from zerotop.recording.samples import bin_maxima, bin_means, iter_samples, merge_columns, split_samples, sum_ticks
from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import HOSTS, PROCESSES


def write_sources(folder: Path, *samples: list[tuple[int, int, int]]) -> list[Source]:
    """A table for each list of (second, pid, bytes)."""
    for number, rows in enumerate(samples):
        records = [make_record(PROCESSES, time_ns=at * S, pid=pid, rss_bytes=size) for at, pid, size in rows]
        write_table(folder, PROCESSES, make_identity(-1, pid=number), *records).close()
    return read_recording(folder).sources["processes"]


def test_windows_are_open_at_their_begin(tmp_path: Path) -> None:
    (source,) = write_sources(tmp_path, [(at, 1, at) for at in range(6)])
    begin, end = BEGIN_NS + 2 * S, BEGIN_NS + 4 * S
    assert source.between(begin, end)["rss_bytes"].tolist() == [3, 4]
    assert source.between(begin, end, rows_before=1, rows_after=9)["rss_bytes"].tolist() == [2, 3, 4, 5]
    assert source.between(0, end, rows_before=9)["rss_bytes"].tolist() == [0, 1, 2, 3, 4]
    assert source.until(begin)["rss_bytes"].tolist() == [0, 1, 2]
    assert source.unix_times(source.until(begin)).tolist() == [BEGIN_NS, BEGIN_NS + S, BEGIN_NS + 2 * S]


def test_samples_of_several_samplers_are_merged_in_order_of_time(tmp_path: Path) -> None:
    tables = write_sources(tmp_path, [(1, 7, 10), (4, 7, 40), (4, 8, 0)], [(2, 7, 20), (3, 8, 0)])
    times, columns = merge_columns(list(iter_samples(tables, 0, BEGIN_NS + 9 * S, "pid", 7)), ("rss_bytes",))
    assert (times - BEGIN_NS).tolist() == [1 * S, 2 * S, 4 * S]
    assert columns["rss_bytes"].tolist() == [10, 20, 40]
    times, columns = merge_columns([], ("rss_bytes",))
    assert len(times) == len(columns["rss_bytes"]) == 0


def test_samples_are_split_by_process_and_stay_in_order(tmp_path: Path) -> None:
    tables = write_sources(tmp_path, [(1, 8, 1), (1, 7, 2), (2, 8, 3), (2, 9, 4)])
    (samples,) = iter_samples(tables, 0, BEGIN_NS + 9 * S)
    assert {pid: own.rows["rss_bytes"].tolist() for pid, own in split_samples(samples, "pid")} == {7: [2], 8: [1, 3], 9: [4]}
    (empty,) = iter_samples(tables, 0, BEGIN_NS)
    assert list(split_samples(empty, "pid")) == []


def test_ticks_and_bins() -> None:
    times, (sums,) = sum_ticks(np.array([1, 1, 3]), [np.array([5, 6, 7])])
    assert (times.tolist(), sums.tolist()) == ([1, 3], [11.0, 7.0])
    bins, values = np.array([0, 0, 2]), np.array([1, 4, 2])
    np.testing.assert_array_equal(bin_means(bins, values, 4), [2.5, np.nan, 2, np.nan])
    np.testing.assert_array_equal(bin_maxima(bins, values, 4), [4, np.nan, 2, np.nan])


@pytest.mark.parametrize(("limit", "expected"), [(-1, (600, 1000)), (800, (70, 800)), (1000, (600, 1000))])
def test_host_memory_is_the_control_groups_below_the_hosts(tmp_path: Path, limit: int, expected: tuple[int, int]) -> None:
    sizes = {"memory_total_bytes": 1000, "memory_available_bytes": 400, "cgroup_used_bytes": 70}
    write_table(tmp_path, HOSTS, make_identity(-1), make_record(HOSTS, time_ns=0, cgroup_limit_bytes=limit, **sizes)).close()
    rows = read_recording(tmp_path).sources["hosts"][0].array
    assert read_host_memory(rows[0], 5) == HostMemory(5, *expected)
    assert measure_used_bytes(rows).tolist() == [expected[0]]
