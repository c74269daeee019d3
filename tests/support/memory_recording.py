"""A small recording of memory, written with the real writers: what is said in gibibytes and seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from small_recording import BEGIN_NS, S, make_identity, make_span, read_recording, write_table
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events, tables
from zerotop_probe.recording.events import Event
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE, TICK, Table
from zerotop_probe.recording.writer import EventWriter, Identity, create_file

GIB = 1 << 30
UUID = "GPU-00000000-0000-0000-0000-00000000000"
EDGES = {"begin": BEGIN, "end": END, "tick": TICK}


def gib_to_bytes(amount: float) -> int:
    """Return the bytes of so many gibibytes."""
    return round(amount * GIB)


def make_record(table: Table, at: float, **values: Any) -> tuple[Any, ...]:
    """Return a record; fields that are not given are 0."""
    values["time_ns"] = int(at * S)
    assert set(values) <= {field.name for field in table.fields}
    empty = {field.name: b"" if field.code.endswith("s") else 0 for field in table.fields}
    return tuple((empty | values).values())


def make_reading(
    at: float, allocated: float, reserved: float, *, phase: str = "other", edge: str = "tick", **more: Any
) -> tuple[Any, ...]:
    """Return a reading of an allocator; peaks that are not given equal the current sizes."""
    held = {"allocated_bytes": gib_to_bytes(allocated), "reserved_bytes": gib_to_bytes(reserved)}
    peaks = {name.replace("_bytes", "_peak_bytes"): size for name, size in held.items()}
    place = {"phase": PHASE_CODE[phase], "edge": EDGES[edge]}
    return make_record(tables.ALLOCATOR, at, **{**held, **peaks, **place, **more})


def make_gpu_sample(at: float, used: float, total: float = 80, index: int = 0) -> tuple[Any, ...]:
    """Return NVML's figures for a GPU."""
    return make_record(tables.GPUS, at, used_bytes=gib_to_bytes(used), total_bytes=gib_to_bytes(total), gpu=index)


def make_gpu_process_sample(at: float, pid: int, used: float, index: int = 0) -> tuple[Any, ...]:
    """Return NVML's figure for a process."""
    return make_record(tables.GPU_PROCESSES, at, used_bytes=gib_to_bytes(used), pid=pid, gpu=index)


def make_process_sample(at: float, pid: int, rss: float, rank: int = 0) -> tuple[Any, ...]:
    """Return a sample of a process's host memory."""
    return make_record(tables.PROCESSES, at, rss_bytes=gib_to_bytes(rss), pid=pid, rank=rank)


OOM = {
    "device": 0,
    "requested_bytes": gib_to_bytes(30),
    "limit_bytes": gib_to_bytes(79),
    "free_bytes": gib_to_bytes(20),
    "phase": "backward",
    "step": 1,
    "micro_step": 0,
    "rows": 4,
    "sequence": 512,
    "tokens": 2048,
    "allocated_bytes": gib_to_bytes(50),
    "reserved_bytes": gib_to_bytes(53),
    "inactive_split_bytes": gib_to_bytes(3),
    "largest_free_block_bytes": gib_to_bytes(1),
    "retries": 1,
    "ooms": 1,
}
"""The facts of a rank's out-of-memory error on the GPU, in its micro-batch of 4 x 512 tokens."""


HELD_LIST: dict[str, Any] = {
    "name": "seen",
    "scope": "local",
    "owner": "main",
    "file": "train.py",
    "own": True,
    "levels": 0,
    "kind": "list",
    "count": 20,
    "bytes": gib_to_bytes(4),
    "keeps_graph": False,
    "shape": [8, 32000],
    "block_bytes": gib_to_bytes(0.2),
    "view_of": [8, 512, 32000],
    "added_file": "train.py",
    "added_line": 97,
    "added_function": "main",
}
"""A list with views of logits, as the probe finds it."""


class PlantedRecording:
    """Tables and events of some writers, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = make_identity(-1)

    def write_records(self, table: Table, who: Identity, records: Sequence[tuple[Any, ...]], **more: Any) -> None:
        """Write a whole table."""
        write_table(self.folder, table, who, *records, **more).close()

    def write_event(self, who: Identity, at: float, event: type[Event], **facts: Any) -> None:
        """Add an event."""
        writer = EventWriter(str(self.folder), who)
        writer.write(int(at * S), event, **facts)
        writer.close()

    def node_event(self, gpus: int = 1) -> None:
        """Add the node's event with NVML's facts about its GPUs."""
        told = [
            {"index": i, "uuid": f"{UUID}{i}", "name": "NVIDIA H200", "total_bytes": gib_to_bytes(80)} for i in range(gpus)
        ]
        self.write_event(self.node, 0, events.Node, host="node1", cores=8, gpus=told, gpu_notice=None)

    def write_engine(self, rank: int = 0, at: float = 1, on: int = 0, **facts: Any) -> None:
        """Add an engine with 1 Gi parameters in bf16 under ZeRO-2, on the GPU of that index."""
        usual: dict[str, Any] = {
            "engine": 0,
            "zero_stage": 2,
            "offload_optimizer": "none",
            "offload_parameters": "none",
            "dtype": "bf16",
            "micro_batch": 1,
            "gradient_accumulation": 1,
            "world_size": 1,
            "data_parallel": 1,
            "parameters": GIB,
            "trainable_parameters": GIB,
            "optimizer": "DeepSpeedZeroOptimizer",
            "devices": [{"ordinal": 0, "uuid": f"{UUID}{on}", "name": "NVIDIA H200", "total_bytes": gib_to_bytes(79)}],
        }
        self.write_event(make_identity(rank), at, events.Engine, **(usual | facts))

    def write_inventory(self, at: float, when: str, device: dict[str, float], *, rank: int = 0, **facts: Any) -> None:
        """Add an inventory of tensors, in gibibytes; ``unclaimed`` is 0 if not given."""
        sizes = {name: gib_to_bytes(size) for name, size in device.items()}
        host = {name: gib_to_bytes(size) for name, size in facts.pop("host", {}).items()}
        pinned = {name: gib_to_bytes(size) for name, size in facts.pop("host_pinned", {}).items()}
        unclaimed = gib_to_bytes(facts.pop("unclaimed", 0))
        told: dict[str, Any] = {
            "engine": 0,
            "step": int(when == "after_update"),
            "host": host,
            "host_pinned": pinned,
            "allocated_bytes": sum(sizes.values()) + unclaimed,
            "unclaimed_bytes": unclaimed,
            "unclaimed_largest": [unclaimed] if unclaimed else [],
        }
        self.write_event(make_identity(rank), at, events.Tensors, when=when, device=sizes, **(told | facts))

    def write_output(self, at: float, text: str) -> None:
        """Write the job's output; to be called once."""
        data = text.encode()
        descriptor = create_file(str(self.folder), f"output-{self.node.file_stem}", ".log")
        os.write(descriptor, data)
        os.close(descriptor)
        self.write_records(tables.OUTPUT, self.node, [make_record(tables.OUTPUT, at, length=len(data))])

    def open_recording(self) -> Recording:
        """Open the recording so far."""
        return read_recording(self.folder)


PARTS = {"parameters": 2, "master_weights": 4, "optimizer_state": 8, "buffers": 0.5}
"""The tensors of the usual engine on its GPU after its first update, in gibibytes."""


def record_two_steps(folder: Path, *later: tuple[Any, ...]) -> PlantedRecording:
    """Record one rank on one GPU in two steps, from second 10 and from 20: forward 3 s, backward 4 s, step 2 s.

    ``later``: more readings of its allocator.
    """
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine()
    spans, begins, readings = [], [], [make_reading(2, 2, 4, phase="init", edge="end")]
    for step, start in enumerate((10, 20)):
        kept = 6.5 if step == 0 else 14.5
        # Between steps nothing is allocated.
        between = {"allocated_peak_bytes": gib_to_bytes(kept + 0.25), "step": step}
        readings.append(make_reading(start, kept + 0.25, 4 if step == 0 else 22, phase="forward", edge="begin", **between))
        for begin, end, phase, highest, after in (
            (0, 3, "forward", kept + 3, kept + 2.5),
            (3, 7, "backward", kept + 5, kept + 2.25),
            (7, 9, "step", kept + 4, 14.75),
        ):
            flags = tables.BOUNDARY if phase == "step" else 0
            spans.append(make_span(start + begin, start + end, phase, step, flags))
            begins.append(make_record(tables.BEGINS, start + begin, step=step, phase=PHASE_CODE[phase]))
            more = {"allocated_peak_bytes": gib_to_bytes(highest), "reserved_peak_bytes": gib_to_bytes(22), "step": step}
            readings.append(make_reading(start + end, after, 22, phase=phase, edge="end", **more))
    recording.write_records(tables.SPANS, who, spans, born=1)
    recording.write_records(tables.BEGINS, who, begins, born=1)
    recording.write_records(tables.ALLOCATOR, who, [*readings, *later], born=1, peaks="window")
    recording.write_inventory(2, "init", {"parameters": 2, "master_weights": 4, "buffers": 0.5})
    before_forward = {"parameters": 2, "master_weights": 4, "buffers": 0.5}
    recording.write_inventory(10, "before_forward", before_forward, unclaimed=0.25)
    before = {"parameters": 2, "master_weights": 4, "buffers": 0.5, "gradients": 2}
    recording.write_inventory(17, "before_update", before, unclaimed=0.25)
    recording.write_inventory(18.5, "after_update", PARTS, unclaimed=0.125)
    looks = range(30)
    recording.write_records(tables.GPUS, recording.node, [make_gpu_sample(at, 0.5 if at < 2 else 28.5) for at in looks])
    held = [
        row
        for at in looks
        if at >= 2
        for row in (make_gpu_process_sample(at, who.pid, 23), make_gpu_process_sample(at, 7, 4))
    ]
    recording.write_records(tables.GPU_PROCESSES, recording.node, held)
    recording.write_records(tables.PROCESSES, recording.node, [make_process_sample(at, who.pid, 6) for at in looks])
    return recording


LEAK = tuple(4 + 0.2 * max(0, step - 20) for step in range(40))
"""GiB after each of 40 steps: from step 21 on each leaves 0.2 more."""


def record_leak(
    folder: Path,
    *,
    held: dict[str, Any] | None,
    sizes: Sequence[float | None] = LEAK,
    count: tuple[int, float] = (36, 3.2),
    unread: int = 0,
    grows_batches: bool = False,
    step_s: float = 1.0,
    **engine: Any,
) -> Recording:
    """Record steps of ``step_s`` that leave so many GiB; None if memory was not read after one.

    ``count``: the step after which tensors are counted, with the holders of the bytes in no category, and these GiB.
    ``unread``: the last steps after which memory was not read.  ``grows_batches``: each has 256 tokens more.
    ``engine``: more facts of the loop.
    """
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    recording.write_engine(kind="loop", zero_stage=None, device="cuda:0", **engine)
    spans, begins, readings = [], [], []
    for step, size in enumerate(sizes):
        begin, end = 10 + step * step_s, 10 + (step + 0.9) * step_s
        if grows_batches:
            spans.append(make_span(begin - 0.1, begin - 0.05, "forward", step, tokens=256 * (step + 1)))
        spans.append(make_span(begin, end, "step", step, tables.BOUNDARY))
        begins.append(make_record(tables.BEGINS, begin, step=step, phase=PHASE_CODE["step"]))
        if step < len(sizes) - unread and size is not None:
            readings.append(make_reading(end, size, 40, phase="step", edge="end", step=step))
    recording.write_records(tables.SPANS, who, spans, born=1)
    recording.write_records(tables.BEGINS, who, begins, born=1)
    recording.write_records(tables.ALLOCATOR, who, readings, born=1, peaks="window")
    pools = [{"stream": 0, "private": False, "reserved": 8 * GIB, "allocated": 8 * GIB, "sparse": 0}]
    facts: dict[str, Any] = {"held": [held]} if held is not None else {}
    facts |= {"unclaimed": count[1], "step": count[0], "pools": pools}
    recording.write_inventory(10.95 + count[0], "again", {"parameters": 4}, **facts)
    (folder / "session.json").write_text(json.dumps({"stacks": True, "boot": "boot", "clock": {"unix_ns": BEGIN_NS}}))
    return recording.open_recording()
