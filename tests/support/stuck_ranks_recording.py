"""A recording of ranks that are stuck after some steps, with the stacks that they wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memory_recording import PlantedRecording, make_record
from small_recording import S, make_identity, make_span
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events, tables

STEPS = 10
SILENT_S = 20.0
"""The second from which on nothing begins or ends."""
WAITING = (
    ("torch/distributed/distributed_c10d.py", 3252, "all_reduce", False),
    ("torch/distributed/c10d_logger.py", 83, "_exception_logger.<locals>.wrapper", False),
    ("train.py", 90, "step", True),
    ("train.py", 120, "<module>", True),
)
SAVING = (
    ("torch/serialization.py", 1003, "save", False),
    ("train.py", 71, "save", True),
    ("train.py", 121, "<module>", True),
)
SLEEPING = (("train.py", 40, "build_batch", True), ("train.py", 118, "<module>", True))


class Stand(NamedTuple):
    """The place at which a rank is stuck: the frames of its training thread, innermost first, and the called C function."""

    frames: Sequence[tuple[str, int, str, bool]]
    call: str = ""
    called: int | None = None  # collectives, for PyTorch's flight recorder
    pending: str = ""  # the one that has not ended, if the stack does not show it
    cores_used: float = 0.0
    waiting_cores: float = 0.0
    own_cores: float = 0.0  # the part of both that is the probe's
    calls: Sequence[tuple[int, str, int]] = ()  # number, name and line of the last collectives
    seen_s: Sequence[float] = ()  # the seconds at which py-spy saw the same stack
    allocations: Mapping[float, int] | None = None  # by PyTorch's allocator on the GPU, by the second of the stacks
    groups: Sequence[tuple[str, int, int, str]] = ()  # process groups: name, calls, number and name of the one that waits
    other: tuple[Any, ...] | None = None  # a thread: its name, the called C function, its frames
    is_daemon: bool | None = None  # whether that thread is one; None: unknown
    reads_until_s: float = SILENT_S  # ten batches in a second
    reads_flags: int = 0


class Left(NamedTuple):
    """The orderly end of ranks and their job."""

    second: float
    exit_code: int
    printed: str = ""
    is_raised: bool = False  # an exception ended the phase of each rank


def write_standing(
    folder: Path,
    stands: Mapping[int, Stand | None],
    written_s: Sequence[float] = (25, 30, 40),
    *,
    ended_s: float | None = None,
    left: Left | None = None,
    phase: str = "step",
    went_on_s: float | None = None,
) -> Recording:
    """Write ranks that iterate in a second and stand still from SILENT_S on; None: a rank that writes no stacks.

    ``phase``: the last one that rank 0 has begun and ended. ``ended_s``: when the job was killed.
    ``went_on_s``: when a last step begins on each rank, which takes a second.
    ``left``: when the ranks said goodbye, just before the job ended, its exit code, and what was printed just before.
    """
    recording = PlantedRecording(folder)
    for rank in stands:
        who = make_identity(rank)
        recording.write_engine(rank)
        recording.write_event(who, 1.5, events.Hello, rank=rank, local_rank=rank)
        begin = SILENT_S - STEPS
        spans = [make_span(begin + step, begin + step + 1, "step", step, tables.BOUNDARY) for step in range(STEPS)]
        begun = (
            [] if rank or phase == "step" else [make_record(tables.BEGINS, SILENT_S - 1, phase=tables.PHASES.index(phase))]
        )
        if begun:
            spans[-1] = make_span(SILENT_S - 1, SILENT_S, phase, STEPS - 1, tables.BOUNDARY)
        spans += _read_batches(stands[rank])
        if left is not None and left.is_raised:
            spans.append(make_span(left.second - 0.1, left.second, "backward", STEPS, tables.FAILED))
        if went_on_s is not None:
            spans.append(make_span(went_on_s, went_on_s + 1, "step", STEPS, tables.BOUNDARY))
        recording.write_records(tables.SPANS, who, spans, born=1)
        recording.write_records(tables.BEGINS, who, begun, born=1)
    looks = [(second, rank) for second in range(30) for rank in stands]
    recording.write_records(tables.PROCESSES, recording.node, [_use_cores(at_s, rank, stands[rank]) for at_s, rank in looks])
    _write_own_threads(recording, stands)
    for second in written_s:
        for rank, stand in stands.items():
            if stand is not None:
                recording.write_event(make_identity(rank), second, events.Stacks, **make_facts(stand, second))
    known = [(rank, stand, second) for rank, stand in stands.items() if stand is not None for second in stand.seen_s]
    for rank, stand, second in known:
        facts = {name: value for name, value in make_facts(stand).items() if name in ("frames", "stacks")}
        recording.write_event(recording.node, second, events.RankStacks, rank=rank, pid=make_identity(rank).pid, **facts)
    _write_ends(recording, stands, ended_s, left)
    return recording.open_recording()


def _read_batches(stand: Stand | None) -> list[tuple[Any, ...]]:
    begins = [SILENT_S + number / 10 for number in range(int((stand.reads_until_s - SILENT_S) * 10) if stand else 0)]
    return [make_span(begin_s, begin_s + 0.08, "data", STEPS, stand.reads_flags) for begin_s in begins if stand is not None]


def _write_ends(recording: PlantedRecording, ranks: Iterable[int], ended_s: float | None, left: Left | None) -> None:
    for rank in ranks:
        who = make_identity(rank)
        if left is not None:
            recording.write_event(who, left.second, events.Goodbye, lost=0, step=STEPS - 1)
        if ended_s is not None:
            recording.write_event(recording.node, ended_s, events.RankGone, rank=rank, pid=who.pid)
    if left is not None:
        end_s = max(left.second + 1, ended_s or 0)
        recording.write_event(recording.node, end_s, events.JobEnded, exit_code=left.exit_code, seconds=end_s)
        if left.printed:
            recording.write_output(left.second - 0.1, left.printed)


def _write_own_threads(recording: PlantedRecording, stands: Mapping[int, Stand | None]) -> None:
    """Write a thread of the probe for each rank: half of what it wants of a core it gets."""
    rows = []
    for rank, stand in stands.items():
        if stand is not None and stand.own_cores:
            pid, half_ns = make_identity(rank).pid, int(stand.own_cores * S / 2)
            recording.write_event(
                make_identity(rank), 2, events.ThreadNames, pid=pid, python={str(pid + 1): "zerotop-ticker"}
            )
            used = {"pid": pid, "tid": pid + 1, "name": b"python"}
            rows += [
                make_record(tables.THREADS, second, cpu_ns=second * half_ns, wait_ns=second * half_ns, **used)
                for second in range(30)
            ]
    recording.write_records(tables.THREADS, recording.node, rows)


def _use_cores(second: float, rank: int, stand: Stand | None) -> tuple[Any, ...]:
    used, waiting = (stand.cores_used, stand.waiting_cores) if stand is not None else (0.0, 0.0)
    return make_record(
        tables.PROCESSES, second, pid=make_identity(rank).pid, rank=rank, cores_used=used, waiting_cores=waiting
    )


def make_facts(stand: Stand, second: float = SILENT_S) -> dict[str, Any]:
    """Return the fields of the event that a silent rank writes."""
    frames = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in stand.frames]
    stack = {"count": 1, "call": stand.call, "frames": list(range(len(frames)))}
    helper = {"count": 1, "call": "acquire", "thread": "Thread-1", "frames": [0]}
    times = {"begin_ns": int(SILENT_S * S), "end_ns": int(SILENT_S * S), "step": STEPS, "samples": 1}
    name = next((frame["function"] for frame in frames if frame["file"] == WAITING[0][0]), stand.pending)
    collectives = [{"group": "0", "called": stand.called, "waits_for": stand.called if name else -1, "name": name}]
    if stand.other is not None:
        thread, call, *others = stand.other
        numbers = list(range(len(frames), len(frames) + len(others)))
        frames += [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in others]
        helper = {"count": 1, "call": call, "thread": thread, "daemon": stand.is_daemon, "frames": numbers}
    facts = {"where": "between phases", "why": "silent", "frames": frames, "stacks": [helper, stack], **times}
    if stand.groups:
        facts["collectives"] = [
            dict(zip(("group", "called", "waits_for", "name"), group, strict=True)) for group in stand.groups
        ]
    if stand.calls:
        named = [
            {"number": number, "name": called, "file": "train.py", "line": line} for number, called, line in stand.calls
        ]
        facts["calls"] = [{"group": "0", "function": "step", **call} for call in named]
    facts["allocations"] = stand.allocations[second] if stand.allocations is not None else None
    return facts | ({"collectives": collectives} if stand.called is not None else {})
