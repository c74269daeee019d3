"""The memory of steps, from samples that are taken when the sampler gets to it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from small_recording import S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.recording.samples import Windows
from zerotop.recording.steps.step_table import read_steps
from zerotop_probe.recording import tables
from zerotop_probe.recording.tables import BOUNDARY, FRESH_NS, UNKNOWN
from zerotop_probe.recording.writer import Identity

TENTH = S // 10


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 100)), max_size=30),
    st.lists(st.integers(-5, 120), min_size=2, max_size=8),
)
def test_windows(samples: list[tuple[int, int]], edges: list[int]) -> None:
    samples, edges = sorted(samples, key=lambda sample: sample[0]), sorted(edges)
    expected = []
    for begin, end in pairwise(edges):
        within = [value for at, value in samples if begin < at <= end]
        before = [value for at, value in samples if at <= end and (end - at) * TENTH < FRESH_NS]
        expected.append(max(within) if within else before[-1] if before else UNKNOWN)
    at = np.array([at for at, _ in samples], np.int64) * TENTH
    values = np.array([value for _, value in samples], np.int64)
    bounds = np.array(edges) * TENTH
    assert Windows(at, bounds[:-1], bounds[1:], max_age_ns=FRESH_NS).find_highest(values).tolist() == expected


def three_steps(folder: Path) -> None:
    """Of rank 0, from second 0 to 10, 20 and 30."""
    ends = (10, 20, 30)
    records = [make_span(end - 10, end, "step", step, BOUNDARY) for step, end in enumerate(ends)]
    write_table(folder, tables.SPANS, make_identity(0), *records).close()


@pytest.mark.parametrize(
    ("header", "peaks", "expected"),
    [
        ({"peaks": "window"}, (50, 7, 50, 6, 60, 3), [50, 50, 60]),
        ({"peaks": "process"}, (50, 50, 50, 50, 60, 60), [50, 4, 60]),
        ({}, (50, 50, 50, 50, 60, 60), [50, 4, 60]),
    ],
)
def test_the_peak_is_of_the_step_it_was_in(
    tmp_path: Path, header: dict[str, str], peaks: tuple[int, ...], expected: list[int]
) -> None:
    samples = zip((2, 10, 12, 20, 25, 30), (5, 3, 4, 4, 9, 2), peaks, strict=True)
    records = [
        make_record(tables.ALLOCATOR, time_ns=at * S, allocated_bytes=now, allocated_peak_bytes=peak)
        for at, now, peak in samples
    ]
    write_table(tmp_path, tables.ALLOCATOR, make_identity(0), *records, **header).close()  # type: ignore[arg-type]
    three_steps(tmp_path)
    assert read_steps(read_recording(tmp_path))["allocated_peak_bytes"].tolist() == expected


def make_process(at: float, pid: int, rss: int) -> tuple[Any, ...]:
    return make_record(tables.PROCESSES, time_ns=int(at * S), pid=pid, rss_bytes=rss)


def test_resident_memory_is_of_the_own_process_whichever_sampler_took_it(tmp_path: Path) -> None:
    three_steps(tmp_path)
    mine, sampler = make_identity(0).pid, make_identity(-1)
    other: Identity = sampler._replace(pid=7)
    write_table(
        tmp_path, tables.PROCESSES, sampler, make_process(1, mine, 99), make_process(2, mine, 70), make_process(3, 1, 500)
    ).close()
    write_table(tmp_path, tables.PROCESSES, other, make_process(18, mine, 50), make_process(19.5, 1, 600)).close()
    elsewhere = make_identity(-1, 8, host="node2")
    write_table(tmp_path, tables.PROCESSES, elsewhere, make_process(15, mine, 900)).close()
    rows = read_steps(read_recording(tmp_path))
    assert rows["host_rss_bytes"].tolist() == [99, 50, UNKNOWN]
    assert rows["nvml_process_bytes"].tolist() == [UNKNOWN] * 3
