"""What a screen shows at a cursor is the same while the recording grows and ever after."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from small_recording import S, make_identity, make_span, write_table
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.events import Engine, JobEnded, RankGone
from zerotop_probe.recording.tables import BOUNDARY, PHASE_CODE
from zerotop_probe.recording.writer import EventWriter


def is_same(one: Any, other: Any) -> bool:
    if dataclasses.is_dataclass(one):
        return all(is_same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def test_a_view_is_the_same_while_growing(tmp_path: Path) -> None:
    # Rank 2 makes its engine, never finishes a step and is gone.
    # Times lie ahead, so that the recording is live however slow this machine is.
    folder = Path(directory.create_recording(["train.py"], path=str(tmp_path / "recording"), boot="boot"))
    base = time.monotonic_ns() / S + 1000
    spans = {rank: write_table(folder, tables.SPANS, make_identity(rank)) for rank in (0, 1)}
    begins = {rank: write_table(folder, tables.BEGINS, make_identity(rank)) for rank in (0, 1)}
    node, hosts = (
        write_table(folder, tables.PROCESSES, make_identity(-1)),
        write_table(folder, tables.HOSTS, make_identity(-1)),
    )
    events = {rank: EventWriter(str(folder), make_identity(rank)) for rank in (-1, 0)}
    growing = RecordingSource(Recording.open(folder))
    offset, seen = growing.recording.begin_ns - growing.recording.info["clock"]["monotonic_ns"], []

    def look_at(at: float) -> None:
        growing.refresh()
        seen.append(growing.view_at(int(at * S) + offset + 1))
        # Histories are told when they are asked for.
        assert len([*seen[-1].history.ranks.values()]) == len(seen[-1].history.ranks)

    look_at(base - 1)
    events[0].write(int(base * S), Engine, model="tiny", world_size=2)
    dead = write_table(folder, tables.SPANS, make_identity(2), make_span(base - 1, base, "init"))
    for step in range(5):
        if step == 3:
            events[-1].write(int((base + 4 * step) * S), RankGone, rank=2, pid=make_identity(2).pid)
            look_at(base + 4 * step)
        for rank in (0, 1):
            at = base + 1 + 4 * step + rank
            begins[rank].write(int(at * S), step, 0, PHASE_CODE["forward"], 0, 0, 0)
            look_at(at)
            spans[rank].write(*make_span(at, at + 0.25, "forward", step, tokens=10 + rank))
            look_at(at + 0.25)
            spans[rank].write(*make_span(at + 0.25, at + 0.5 + rank / 8, "step", step, BOUNDARY))
            look_at(at + 0.5 + rank / 8)
            tick = int((at + 0.75) * S)
            node.write(tick, 9 - step, 1, 1, 1, 0, 0, 1.0, math.nan, 3, 1, 100 + rank, rank)
            hosts.write(tick, 100, 50 - step, 0, -1, -1, 1.0, 1.0, 4, 0)
            look_at(at + 0.75)
    events[-1].write(int((base + 30) * S), JobEnded, exit_code=0, text="Done.")
    look_at(base + 30)
    writers: list[Any] = [*spans.values(), *begins.values(), dead, node, hosts, *events.values()]
    for writer in writers:
        writer.close()
    finished = RecordingSource(Recording.open(folder))
    for view in seen:
        again = finished.view_at(view.cursor_ns)
        for name in ("cursor_ns", "job", "progress", "gpus", "hosts", "ranks", "iterations", "output", "history"):
            assert is_same(getattr(view, name), getattr(again, name)), name
    assert len(seen[-1].iterations.step) == 5
    assert {len(view.iterations.step) for view in seen} == {0, 3, 4, 5}
