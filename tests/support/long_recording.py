"""A long recording, written a table at a time: ranks on a GPU each, an optimizer on the CPU, and one trouble or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zerotop_probe.recording import directory, events, tables
from zerotop_probe.recording.events import Event
from zerotop_probe.recording.tables import BEGIN, BOUNDARY, END, PHASE_CODE, TICK, UNKNOWN
from zerotop_probe.recording.writer import EventWriter, Identity, RecordWriter

Rows = np.ndarray[Any, Any]

STEP_S = 0.25
GIB = 1 << 30
CORES = 64
_TICK_NS = 100_000_000
_BORN_NS = 1_700_000_000 * 10**9
GAP = "gap"
# The phases of a step and how deep they lie, in the order in which they end. Without trouble those from eval on are absent;
# a gap is in no phase.
_PHASES = (
    ("data", 0),
    ("forward", 0),
    ("reduce", 1),
    ("backward", 0),
    ("cpu_optimizer", 1),
    ("step", 0),
    ("eval", 0),
    ("checkpoint_save", 0),
    (GAP, 0),
)
PHASE_NAMES = [name for name, _ in _PHASES]


def _change_nothing(rows: Rows) -> None:
    pass


def _write_nothing(write: Callable[..., None], steps: int) -> None:
    pass


@dataclass(frozen=True)
class Trouble:
    """The differences from a recording without trouble."""

    # Changes the seconds of each phase of a rank, shape (steps, PHASE_NAMES).
    paces: Callable[[Rows, int], None] = lambda seconds, rank: None
    # Changes the records of a table by its name.
    tables: Mapping[str, Callable[[Rows], None]] = field(default_factory=dict)
    # Writes events: write(second, name, **facts) of rank 0, and with ``node=True`` of the sampler.
    events: Callable[[Callable[..., None], int], None] = _write_nothing
    # Facts of the engine that differ.
    engine: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    has_probe: bool = True


def write_recording(path: Path, steps: int, trouble: Trouble | None = None) -> Path:
    """Write a recording to a new folder; return the folder."""
    return _Writer(path, steps, trouble or Trouble()).write_recording()


class _Writer:
    def __init__(self, path: Path, steps: int, trouble: Trouble) -> None:
        self.path, self.steps, self.trouble = path, steps, trouble
        self.clock = {"monotonic_ns": 0, "unix_ns": _BORN_NS}
        self.node = Identity.for_this_process("node")

    def write_recording(self) -> Path:
        directory.create_recording(["python", "train.py"], path=str(self.path), clock=self.clock)
        end_ns = max(self._write_rank(rank) for rank in range(self.trouble.ranks))
        self._write_node(np.arange(0, end_ns, _TICK_NS))
        self._write_events()
        return self.path

    def _identify_rank(self, rank: int) -> Identity:
        return self.node._replace(role="rank", rank=rank, pid=1000 + rank)

    def _write_table(self, kind: tables.Table, who: Identity, count: int, **columns: Any) -> None:
        RecordWriter(str(self.path), kind, who, clock=self.clock, peaks="window").close()
        rows = np.zeros(count, np.dtype([tuple(field) for field in kind.dtype]))
        for name, values in columns.items():
            rows[name] = values
        self.trouble.tables.get(kind.name, _change_nothing)(rows)
        with open(self.path / f"{kind.name}-{who.file_stem}.rec", "ab") as file:
            rows.tofile(file)

    def _write_rank(self, rank: int) -> int:
        """Write the tables of a rank; return when its last step ends."""
        who, steps, each = self._identify_rank(rank), self.steps, len(_PHASES)
        seconds = np.zeros((steps, each))
        seconds[:, :6] = STEP_S / 6
        self.trouble.paces(seconds, rank)
        lasting = (seconds * 1e9).astype(np.int64).ravel()
        ends = lasting.cumsum()
        end_ns = int(ends[-1])
        if not self.trouble.has_probe:
            return end_ns
        codes = np.tile([PHASE_CODE.get(name, UNKNOWN) for name in PHASE_NAMES], steps)
        shown = np.flatnonzero((lasting > 0) & (codes != UNKNOWN))
        begins = (ends - lasting)[shown]
        # Steps vary by 2 %, as they do.
        ends = ends[shown] - np.random.default_rng(1).integers(0, int(STEP_S * 2e7), len(shown))
        place = {
            "step": np.repeat(np.arange(steps), each)[shown],
            "phase": codes[shown],
        }
        forward = place["phase"] == PHASE_CODE["forward"]
        flags = np.where(place["phase"] == PHASE_CODE["step"], BOUNDARY, 0)
        sizes = {"tokens": np.where(forward, 4096, UNKNOWN), "rows": np.where(forward, 8, UNKNOWN)}
        depth = np.tile([depth for _, depth in _PHASES], steps)[shown]
        count = len(shown)
        self._write_table(tables.SPANS, who, count, begin_ns=begins, end_ns=ends, depth=depth, flags=flags, **sizes, **place)
        self._write_table(tables.BEGINS, who, count, time_ns=begins, depth=depth, **place)
        ticks = np.arange(0, end_ns, _TICK_NS)
        times = np.concatenate([begins, ends, ticks])
        order = np.argsort(times, kind="stable")
        edges = np.repeat([BEGIN, END, TICK], [count, count, len(ticks)])[order]
        phases, numbers = (
            np.concatenate([place[name], place[name], np.full(len(ticks), fill)])[order]
            for name, fill in (("phase", 0), ("step", UNKNOWN))
        )
        held = dict.fromkeys(("allocated_bytes", "allocated_peak_bytes"), 10 * GIB + times[order] % GIB)
        reserved = dict.fromkeys(("reserved_bytes", "reserved_peak_bytes"), 20 * GIB)
        where = {"time_ns": times[order], "edge": edges, "phase": phases, "step": numbers}
        self._write_table(tables.ALLOCATOR, who, len(order), **where, **held, **reserved)
        return end_ns

    def _write_node(self, ticks: Rows) -> None:
        """Write the samplers' tables: each rank's process and GPU at every tick."""
        ranks, node = self.trouble.ranks, self.node
        times, number = np.repeat(ticks, ranks), np.tile(np.arange(ranks), len(ticks))
        count = len(times)
        self._write_table(tables.GPUS, node, count, time_ns=times, gpu=number, used_bytes=22 * GIB, total_bytes=80 * GIB)
        self._write_table(
            tables.GPU_PROCESSES, node, count, time_ns=times, gpu=number, used_bytes=21 * GIB, pid=1000 + number
        )
        self._write_table(
            tables.PROCESSES, node, count, time_ns=times, pid=1000 + number, rank=number, rss_bytes=30 * GIB, cores_used=4.0
        )
        slow = ticks[::5]
        host = {"memory_total_bytes": 500 * GIB, "memory_available_bytes": 300 * GIB, "cgroup_limit_bytes": UNKNOWN}
        self._write_table(tables.HOSTS, node, len(slow), time_ns=slow, cores=CORES, cores_used=5.0, **host)

    def _write_events(self) -> None:
        node = EventWriter(str(self.path), self.node, clock=self.clock)
        gpus = [{"index": rank, "uuid": f"GPU-{rank}", "name": "GPU"} for rank in range(self.trouble.ranks)]
        node.write(0, events.Node, host=self.node.host, cores=CORES, gpus=gpus)
        writers = [
            EventWriter(str(self.path), self._identify_rank(rank), clock=self.clock) for rank in range(self.trouble.ranks)
        ]
        engine = {"zero_stage": 2, "offload_optimizer": "cpu", "offload_parameters": "none", "dtype": "bf16"}
        sizes = {"parameters": 10**9, "trainable_parameters": 10**9, "data_parallel": 1}
        for rank, writer in enumerate(writers if self.trouble.has_probe else ()):
            writer.write(0, events.Hello, rank=rank, local_rank=rank, world_size=self.trouble.ranks)
            devices = [{"ordinal": rank, "uuid": str(rank), "total_bytes": 80 * GIB}]
            facts: dict[str, Any] = {
                "engine": 0,
                "device": f"cuda:{rank}",
                "devices": devices,
                "optimizer": "x",
                **engine,
                **sizes,
            }
            writer.write(0, events.Engine, **(facts | dict(self.trouble.engine)))

        def write_event(second: float, name: type[Event], *, on_node: bool = False, **facts: Any) -> None:
            (node if on_node else writers[0]).write(int(second * 1e9), name, **facts)

        self.trouble.events(write_event, self.steps)
        for writer in (node, *writers):
            writer.close()
