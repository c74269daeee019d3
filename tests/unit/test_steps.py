"""From spans to steps: exact columns, the same however the recording grew."""

from __future__ import annotations

import dataclasses
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zerotop.analysis.source import RecordingSource
from zerotop.analysis.steps import StepTable, steps, windowed_max
from zerotop.session.reader import Session
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.tables import BOUNDARY, EVAL, PHASE_CODE, SKIPPED, UNKNOWN
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

S = 10**9


def identity(rank: int) -> Identity:
    return Identity("rank" if rank >= 0 else "node", rank, "node1", 100 + rank, 1, "boot")


def span(begin: float, end: float, phase: str, step: int = 0, flags: int = 0, depth: int = 0, tokens: int = -1) -> Any:
    rows = 2 if tokens >= 0 else -1
    return (int(begin * S), int(end * S), tokens, step, 0, rows, -1, PHASE_CODE[phase], flags, depth, 0, 0)


SPANS = (
    span(0, 5, "init"),
    span(5, 8, "checkpoint_load"),
    span(10, 11, "data"),
    span(11, 13, "forward", tokens=100),
    span(13, 16, "backward"),
    span(16, 17, "forward", tokens=50),
    span(17, 19, "backward"),
    span(19.5, 20, "optimizer", depth=1),
    span(19, 21, "step", flags=BOUNDARY),
    span(22, 23, "data", depth=1),
    span(23, 24, "forward", flags=EVAL, depth=1, tokens=999),
    span(22, 25, "eval"),
    span(25, 29, "checkpoint_save"),
    span(29, 30, "forward", 1, tokens=70),
    span(30, 31, "backward", 1),
    span(31, 33, "step", 1, flags=BOUNDARY | SKIPPED),
    span(33, 34, "forward", 2, tokens=7),
)


def write(folder: Path, table: tables.Table, rank: int, *records: Any) -> RecordWriter:
    writer = RecordWriter(str(folder), table, identity(rank))
    for record in records:
        writer.write(*record)
    return writer


def read(folder: Path) -> Session:
    return Session(folder, {"boot": "boot", "clock": {"unix_ns": 1000 * S, "monotonic_ns": 0}})


def test_columns(tmp_path: Path) -> None:
    write(tmp_path, tables.SPANS, 3, *SPANS).close()
    rows = steps(read(tmp_path))
    expected: dict[str, list[Any]] = {
        "rank": [3, 3],
        "step": [0, 1],
        "begin_unix_s": [1010, 1021],
        "end_unix_ns": [1021 * S, 1033 * S],
        "iteration_s": [11, 5],
        "data_s": [1, 0],
        "forward_s": [3, 1],
        "backward_s": [5, 1],
        "step_s": [2, 2],
        "optimizer_s": [0.5, 0],
        "eval_s": [0, 3],
        "checkpoint_s": [3, 4],
        "micro_steps": [2, 1],
        "rows": [4, 2],
        "tokens": [150, 70],
        "skipped": [False, True],
    }
    assert {name: rows[name].tolist() for name in expected} == expected


def test_in_two_parts(tmp_path: Path) -> None:
    for cut in range(len(SPANS)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        writer = write(folder, tables.SPANS, 0, *SPANS[:cut])
        session = read(folder)
        table = StepTable(session)
        table.update()
        for record in SPANS[cut:]:
            writer.write(*record)
        writer.close()
        session.refresh()
        table.update()
        np.testing.assert_array_equal(table.by_rank()[0], steps(read(folder)))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 100)), max_size=30),
    st.lists(st.integers(-5, 45), min_size=2, max_size=8),
)
def test_windowed_max(samples: list[tuple[int, int]], edges: list[int]) -> None:
    samples, edges = sorted(samples, key=lambda sample: sample[0]), sorted(edges)
    expected = []
    for begin, end in pairwise(edges):
        within = [value for at, value in samples if begin < at <= end]
        before = [value for at, value in samples if at <= end]
        expected.append(max(within) if within else before[-1] if before else UNKNOWN)
    at, values, bounds = (np.array(v, np.int64) for v in ([s[0] for s in samples], [s[1] for s in samples], edges))
    assert windowed_max(at, values, bounds[:-1], bounds[1:]).tolist() == expected


def same(one: Any, other: Any) -> bool:
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def test_a_view_is_the_same_while_growing(tmp_path: Path) -> None:
    # Times lie ahead, so that the recording is live however slow this machine is.
    folder = Path(directory.create(["train.py"], path=str(tmp_path / "session"), boot="boot"))
    base = time.monotonic_ns() / S + 1000
    spans = {rank: write(folder, tables.SPANS, rank) for rank in (0, 1)}
    begins = {rank: write(folder, tables.BEGINS, rank) for rank in (0, 1)}
    node, hosts = write(folder, tables.PROCESSES, -1), write(folder, tables.HOSTS, -1)
    events = {rank: EventWriter(str(folder), identity(rank)) for rank in (-1, 0)}
    growing = RecordingSource(Session.open(folder))
    offset, seen = growing.session.begin_ns - growing.session.info["clock"]["monotonic_ns"], []

    def look(at: float) -> None:
        growing.refresh()
        seen.append(growing.view(int(at * S) + offset + 1))

    look(base - 1)
    events[0].write(int(base * S), "engine", model="tiny", world_size=2)
    for step in range(5):
        for rank in (0, 1):
            at = base + 1 + 4 * step + rank
            begins[rank].write(int(at * S), step, 0, PHASE_CODE["forward"], 0, 0, 0)
            look(at)
            spans[rank].write(*span(at, at + 0.25, "forward", step, tokens=10 + rank))
            look(at + 0.25)
            spans[rank].write(*span(at + 0.25, at + 0.5 + rank / 8, "step", step, BOUNDARY))
            look(at + 0.5 + rank / 8)
            tick = int((at + 0.75) * S)
            node.write(tick, 9 - step, 1, 1, 1, 0, 0, 1.0, math.nan, 3, 1, 100 + rank, rank)
            hosts.write(tick, 100, 50 - step, 0, -1, -1, 1.0, 1.0, 4, 0)
            look(at + 0.75)
    events[-1].write(int((base + 30) * S), "job_ended", exit_code=0, text="Done.")
    look(base + 30)
    for writer in (*spans.values(), *begins.values(), node, hosts, *events.values()):
        writer.close()
    finished = RecordingSource(Session.open(folder))
    for view in seen:
        again = finished.view(view.cursor_ns)
        for name in ("cursor_ns", "job", "progress", "gpus", "hosts", "ranks", "iterations", "output"):
            assert same(getattr(view, name), getattr(again, name)), name
    assert len(seen[-1].iterations.step) == 5
