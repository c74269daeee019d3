"""A long recording of one rank on one GPU, written a table at a time: an optimizer on the CPU, and nothing happens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from zerotop_probe.recording import directory, events, tables
from zerotop_probe.recording.tables import BEGIN, BOUNDARY, END, PHASE_CODE, TICK, UNKNOWN
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

STEP_NS = 250_000_000
_TICK_NS = 100_000_000
_BORN_NS = 1_700_000_000 * 10**9
# The phases of a step and how deep they lie, in the order in which they end.
_PHASES = (("data", 0), ("forward", 0), ("reduce", 1), ("backward", 0), ("cpu_optimizer", 1), ("step", 0))
_GIB = 1 << 30


def write(path: Path, steps: int) -> Path:
    """Writes it to a new folder, which is returned."""
    clock = {"monotonic_ns": 0, "unix_ns": _BORN_NS}
    directory.create_session(["python", "train.py"], path=str(path), clock=clock)
    node = Identity.for_this_process("node")
    rank = node._replace(role="rank", rank=0, pid=1000)

    def table(kind: tables.Table, who: Identity, count: int, **columns: Any) -> None:
        RecordWriter(str(path), kind, who, clock=clock, peaks="window").close()
        rows = np.zeros(count, np.dtype([tuple(field) for field in kind.dtype]))
        for name, values in columns.items():
            rows[name] = values
        with open(path / f"{kind.name}-{who.file_stem}.rec", "ab") as file:
            rows.tofile(file)

    each = len(_PHASES)
    place = {
        "step": np.repeat(np.arange(steps), each),
        "phase": np.tile([PHASE_CODE[name] for name, _ in _PHASES], steps),
    }
    begins = np.arange(steps * each) * (STEP_NS // each)
    # Steps vary by 2 %, as they do.
    ends = begins + STEP_NS // each - np.random.default_rng(1).integers(0, STEP_NS // 50, steps * each)
    forward = place["phase"] == PHASE_CODE["forward"]
    flags = np.where(place["phase"] == PHASE_CODE["step"], BOUNDARY, 0)
    sizes = {"tokens": np.where(forward, 4096, UNKNOWN), "rows": np.where(forward, 8, UNKNOWN)}
    depth = np.tile([depth for _, depth in _PHASES], steps)
    table(tables.SPANS, rank, len(begins), begin_ns=begins, end_ns=ends, depth=depth, flags=flags, **sizes, **place)
    table(tables.BEGINS, rank, len(begins), time_ns=begins, depth=depth, **place)
    ticks = np.arange(0, steps * STEP_NS, _TICK_NS)
    times = np.concatenate([begins, ends, ticks])
    order = np.argsort(times, kind="stable")
    edges = np.repeat([BEGIN, END, TICK], [len(begins), len(ends), len(ticks)])[order]
    phases = np.concatenate([place["phase"], place["phase"], np.zeros(len(ticks), np.int64)])[order]
    held = dict.fromkeys(("allocated_bytes", "allocated_peak_bytes"), 10 * _GIB + times[order] % _GIB)
    reserved = dict.fromkeys(("reserved_bytes", "reserved_peak_bytes"), 20 * _GIB)
    table(tables.ALLOCATOR, rank, len(order), time_ns=times[order], edge=edges, phase=phases, **held, **reserved)
    table(tables.GPUS, node, len(ticks), time_ns=ticks, used_bytes=22 * _GIB, total_bytes=80 * _GIB)
    table(tables.GPU_PROCESSES, node, len(ticks), time_ns=ticks, used_bytes=21 * _GIB, pid=1000)
    table(tables.PROCESSES, node, len(ticks), time_ns=ticks, pid=1000, rss_bytes=30 * _GIB, cores_used=4.0)
    slow = ticks[::5]
    host = {"memory_total_bytes": 500 * _GIB, "memory_available_bytes": 300 * _GIB, "cgroup_limit_bytes": UNKNOWN}
    table(tables.HOSTS, node, len(slow), time_ns=slow, cores=64, cores_used=5.0, **host)
    _write_events(path, node, rank, clock)
    return path


def _write_events(path: Path, node: Identity, rank: Identity, clock: dict[str, int]) -> None:
    # Events are written with the clock that this machine has.
    at = clock["unix_ns"] - time.time_ns() + time.monotonic_ns()
    writer = EventWriter(str(path), node)
    writer.write(at, events.NODE, host=node.host, cores=64, gpus=[{"index": 0, "uuid": "GPU-1", "name": "GPU"}])
    writer.close()
    writer = EventWriter(str(path), rank)
    writer.write(at, events.HELLO, rank=0, local_rank=0, world_size=1)
    engine = {"zero_stage": 2, "offload_optimizer": "cpu", "offload_parameters": "none", "dtype": "bf16"}
    sizes = {"parameters": 10**9, "trainable_parameters": 10**9, "data_parallel": 1}
    devices = [{"ordinal": 0, "uuid": "1", "total_bytes": 80 * _GIB}]
    writer.write(at, events.ENGINE, engine=0, device="cuda:0", devices=devices, optimizer="x", **engine, **sizes)
    writer.close()
