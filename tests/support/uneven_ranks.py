"""Recordings of made-up jobs of many ranks, 8 to a node, written with the real writers: a step a second, some slower."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from small_recording import S, make_identity, make_record, make_span, write_table
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, END, GPUS, PHASE_CODE, PROCESSES, SPANS

GIB = 1 << 30
ON_A_NODE = 8
DATA_S, FORWARD_S, BACKWARD_S, STEP_S, PERIOD_S = 0.01, 0.2, 0.5, 0.25, 1.0


def write_ranks(
    folder: Path,
    ranks: int,
    steps: int,
    *,
    late_s: Mapping[int, float] | None = None,
    more_bytes: Mapping[int, int] | None = None,
    sampled: bool = True,
    first_step: Mapping[int, int] | None = None,
) -> None:
    """Write the recording.

    Args:
        late_s: rank -> seconds by which its wait for data is longer; the other ranks wait for it in backward.
        more_bytes: rank -> bytes that it has allocated beyond those of the other ranks.
        sampled: whether memory and cores are recorded too.
        first_step: rank -> the step from which on it is recorded; 0 for others.
    """
    slowest = max((late_s or {}).values(), default=0.0)
    for rank in range(ranks):
        late, more = (late_s or {}).get(rank, 0.0), (more_bytes or {}).get(rank, 0)
        who = make_identity(rank, host=f"node{rank // ON_A_NODE:03}")
        first = (first_step or {}).get(rank, 0)
        spans = [one for step in range(first, steps) for one in _make_step_spans(step, late, slowest - late)]
        write_table(folder, SPANS, who, *spans).close()
        if sampled:
            write_table(
                folder,
                ALLOCATOR,
                who,
                *(_make_peak_record(step, rank, more) for step in range(first, steps)),
                peaks="window",
            ).close()
    for node in range(-(-ranks // ON_A_NODE) if sampled else 0):
        _write_node_samples(folder, node, min(ranks, (node + 1) * ON_A_NODE), steps)


def _make_step_spans(step: int, late: float, waits: float) -> list[tuple[int, ...]]:
    at, found = step * PERIOD_S, []
    parts = (("data", DATA_S + late), ("forward", FORWARD_S), ("backward", BACKWARD_S + waits), ("step", STEP_S))
    scale = 1.0 if late + waits <= 0.03 else (PERIOD_S - 0.01) / (DATA_S + FORWARD_S + BACKWARD_S + STEP_S + late + waits)
    for name, seconds in parts:
        found.append(make_span(at, at + seconds * scale, name, step, BOUNDARY if name == "step" else 0))
        at += seconds * scale
    return found


def _make_peak_record(step: int, rank: int, more: int) -> tuple[object, ...]:
    return make_record(
        ALLOCATOR,
        time_ns=int((step + 0.5) * PERIOD_S * S),
        allocated_bytes=20 * GIB,
        allocated_peak_bytes=30 * GIB + more,
        reserved_bytes=40 * GIB,
        reserved_peak_bytes=40 * GIB,
        step=step,
        micro_step=0,
        phase=PHASE_CODE["backward"],
        edge=END,
        device=rank % ON_A_NODE,
    )


def _write_node_samples(folder: Path, node: int, beyond: int, steps: int) -> None:
    who = make_identity(-1, host=f"node{node:03}", pid=90_000 + node)
    here = range(node * ON_A_NODE, beyond)
    ticks = range(int(steps * PERIOD_S) + 1)
    gpus = [
        make_record(
            GPUS, time_ns=tick * S, used_bytes=(50 + rank % ON_A_NODE) * GIB, total_bytes=140 * GIB, gpu=rank % ON_A_NODE
        )
        for tick in ticks
        for rank in here
    ]
    processes = [
        make_record(
            PROCESSES,
            time_ns=tick * S,
            rss_bytes=GIB,
            cpu_ns=int(tick * S * (1 + rank % ON_A_NODE)),
            cores_used=1.0 + rank % ON_A_NODE,
            waiting_cores=0.0,
            thread_count=10,
            busy_threads=1,
            pid=100 + rank,
            rank=rank,
        )
        for tick in ticks
        for rank in here
    ]
    write_table(folder, GPUS, who, *gpus).close()
    write_table(folder, PROCESSES, who, *processes).close()
