"""Processes that share a GPU in turns, in small recordings: their cycles, and memory that they keep asleep."""

from __future__ import annotations

from pathlib import Path

import pytest

from in_pieces import find_in_pieces
from small_recording import S, make_identity, make_record, make_span, write_table
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.ranks import shared_gpu
from zerotop_probe.recording.events import GpuProcess
from zerotop_probe.recording.tables import BOUNDARY, GPU_PROCESSES, SPANS
from zerotop_probe.recording.writer import EventWriter

GIB, MIB = 1 << 30, 1 << 20
ENGINE = 300
# Of a cycle in seconds: awake with weights, awake with all, asleep.
PARTLY, FULL, ASLEEP = 3, 6, 11
CYCLE = PARTLY + FULL + ASLEEP


def write_job(folder: Path, kept: list[int], *, of_job: bool = True, trainer_sleeps: bool = False, begin: int = 10) -> None:
    """Write rank 0 and an engine that keeps so many bytes asleep in each cycle, after ``begin`` seconds asleep."""
    rows, end = [], begin + CYCLE * len(kept)
    for second in range(end + 1):
        cycle, at = divmod(second - begin, CYCLE)
        is_asleep = cycle < 0 or cycle >= len(kept) or at >= PARTLY + FULL
        level = kept[min(cycle, len(kept) - 1)] if cycle >= 0 else kept[0]
        held = level if is_asleep else 8 * GIB if at < PARTLY else 40 * GIB
        trainer = 20 * GIB if is_asleep or not trainer_sleeps else GIB
        rows += [make_record(GPU_PROCESSES, time_ns=second * S, pid=100, gpu=0, used_bytes=trainer)]
        rows += [make_record(GPU_PROCESSES, time_ns=second * S, pid=ENGINE, gpu=0, used_bytes=held)]
    write_table(folder, GPU_PROCESSES, make_identity(-1), *rows).close()
    write_table(folder, SPANS, make_identity(0), *(make_span(at, at + 1, "step", at, BOUNDARY) for at in range(end))).close()
    writer = EventWriter(str(folder), make_identity(-1))
    writer.write(S, GpuProcess, pid=ENGINE, program="vllm", user="me", of_job=of_job)
    writer.close()


def find_all(folder: Path) -> tuple[Finding, ...]:
    return find_in_pieces(folder, shared_gpu.detect, (16384, 7, 1))


def test_growth_is_named_in_the_third_cycle(tmp_path: Path) -> None:
    write_job(tmp_path, [GIB + cycle * 512 * MIB for cycle in range(5)])
    growth = [one for one in find_all(tmp_path) if one.name == "memory_kept_asleep"]
    assert str(growth[0].headline) == f"Process {ENGINE} keeps 0.50 GiB more of GPU 0 after each sleep"
    assert growth[0].known_ns / S - 1000 < 10 + 3 * CYCLE
    assert "1.00 GiB, 1.50 GiB and 2.00 GiB" in growth[0].details
    assert [one.evidence["grown_bytes"] for one in growth] == [GIB, 2 * GIB]  # told again when it has doubled
    assert len({one.event for one in growth}) == 1


def test_turns_have_their_durations(tmp_path: Path) -> None:
    write_job(tmp_path, [GIB] * 5)
    first, last = find_all(tmp_path)
    assert str(last.headline) == f"GPU 0 is shared in turns: process {ENGINE} is awake 45 % of the time"
    assert last.details.startswith(f"Process {ENGINE} (vllm) shares it with rank 0.")
    assert (last.evidence["full_s"], last.evidence["partly_s"], last.evidence["asleep_s"]) == (FULL, PARTLY, ASLEEP)
    assert last.known_ns > first.known_ns


KEPT_BUT_NOT_GROWING = {
    "once": [GIB, 2 * GIB, 2 * GIB, 2 * GIB],
    "levelling off": [GIB, 2 * GIB, 2 * GIB + 100 * MIB, 2 * GIB + 101 * MIB],
    "a little": [GIB + cycle * 4 * MIB for cycle in range(6)],
    "up and down": [GIB, 2 * GIB, GIB, 2 * GIB, GIB],
}


@pytest.mark.parametrize("name", KEPT_BUT_NOT_GROWING)
def test_memory_that_does_not_grow_is_not_named(tmp_path: Path, name: str) -> None:
    write_job(tmp_path, KEPT_BUT_NOT_GROWING[name])
    assert {one.name for one in find_all(tmp_path)} == {"gpu_turns"}


def test_both_may_take_turns(tmp_path: Path) -> None:
    write_job(tmp_path, [GIB] * 5, trainer_sleeps=True)
    assert {str(one.details).partition(" shares ")[0] for one in find_all(tmp_path)} == {
        f"Process {ENGINE} (vllm)",
        "Rank 0",
    }


def test_somebody_else_s_process_is_not_the_job_s(tmp_path: Path) -> None:
    write_job(tmp_path, [GIB + cycle * 512 * MIB for cycle in range(5)], of_job=False)
    assert find_all(tmp_path) == ()
