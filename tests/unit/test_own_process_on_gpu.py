"""Processes that a job has started compute on a rank's GPU: they are named as the job's own, with the rank that did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from in_pieces import find_in_pieces
from memory_recording import PlantedRecording, make_record
from small_recording import make_identity, make_span
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.memory import outside_pytorch, own_process_on_gpu
from zerotop_probe.recording import events, tables

GIB = 1 << 30
RANK, SCORER = make_identity(0).pid, 300


def write_job(
    folder: Path,
    *,
    used: tuple[float, float] = (60, 40),
    ranks: int = 1,
    listed: int = RANK,
    alternate: bool = False,
    sleeps: bool = False,
    **facts: Any,
) -> None:
    """Write ranks, and a scorer on the GPU of rank 0: both use so many percent of it, the scorer from second 10 on."""
    recording = PlantedRecording(folder)
    recording.node_event(2)
    recording.write_event(recording.node, 0.5, events.JobStarted, pid=RANK if ranks == 1 else 50, command=["python", "a.py"])
    usual = {"program": "python score.py", "user": "me", "of_job": True}
    recording.write_event(recording.node, 4, events.GpuProcess, pid=SCORER, **(usual | facts))
    rows = []
    for second in range(4, 41):
        theirs = used if second >= 10 else (99.0, 0.0)
        if alternate and second >= 10:
            theirs = (99.0, 0.0) if second // 4 % 2 else (0.0, 99.0)
        held = GIB if not sleeps or second % 10 >= 5 else 4 * GIB
        both = ((listed, theirs[0], 8 * GIB), (SCORER, theirs[1], held))
        rows += [
            make_record(tables.GPU_PROCESSES, second, pid=pid, sm_percent=use, used_bytes=size) for pid, use, size in both
        ]
    recording.write_records(tables.GPU_PROCESSES, recording.node, rows)
    recording.write_records(
        tables.GPUS, recording.node, [make_record(tables.GPUS, second, used_bytes=9 * GIB) for second in range(41)]
    )
    for rank in range(ranks):
        who = make_identity(rank)
        recording.write_engine(rank, on=rank)
        spans = [make_span(5 + at / 2, 5.5 + at / 2, "step", at, tables.BOUNDARY) for at in range(70)]
        recording.write_records(tables.SPANS, who, spans, born=1)
        recording.write_records(tables.ALLOCATOR, who, [make_record(tables.ALLOCATOR, 2, reserved_bytes=6 * GIB)], born=1)


def find(folder: Path) -> list[Finding]:
    return [one for one in find_in_pieces(folder, own_process_on_gpu.detect, (16384, 7, 1)) if one is not None]


def test_it_is_named_with_the_rank_that_started_it(tmp_path: Path) -> None:
    write_job(tmp_path)
    (found,) = find(tmp_path)
    assert found.headline == "The job's own process 300 uses 40 % of GPU 0, where rank 0 trains"
    assert found.details.startswith("It runs python score.py. Rank 0 started it. It holds 1.00 GiB there.")
    assert "rank 0's kernels ran in 60 % of the time" in found.details
    assert "on another GPU" in found.advice
    assert (found.ranks, found.fix) == ((0,), "")


@pytest.mark.parametrize(
    ("parents", "said"), [(None, ""), ([77, 50], ""), ([77, make_identity(1).pid, 50], "Rank 1 started it. ")]
)
def test_of_several_ranks_the_one_above_it_started_it(tmp_path: Path, parents: list[int] | None, said: str) -> None:
    write_job(tmp_path, ranks=2, parents=parents)
    (found,) = find(tmp_path)
    assert found.ranks == (0,)
    assert found.details.startswith(f"It runs python score.py. {said}It holds")


@pytest.mark.parametrize(
    "facts",
    [
        {"of_job": False},
        {"of_job": None},
        {"used": (90, 8)},
        {"used": (0, 99)},  # the rank does something else meanwhile
        {"alternate": True},
        {"sleeps": True},
        {"program": "VLLM::EngineCore"},
        {"listed": 4711},  # NVML has the PIDs of another namespace
        {"used": (float("nan"), float("nan"))},
    ],
)
def test_other_processes_are_not_named(tmp_path: Path, facts: dict[str, Any]) -> None:
    write_job(tmp_path, **facts)
    assert find(tmp_path) == []


def test_it_trains_on_no_other_gpu(tmp_path: Path) -> None:
    """The sampler samples processes of the job, as it does its ranks and launchers."""
    write_job(tmp_path)
    recording = PlantedRecording(tmp_path)
    rows = [make_record(tables.PROCESSES, second, pid=pid, rank=rank) for second in (4, 5) for pid, rank in ((SCORER, -1),)]
    recording.write_records(tables.PROCESSES, recording.node, rows)
    assert not find_in_pieces(tmp_path, outside_pytorch.detect, (16384, 7))
