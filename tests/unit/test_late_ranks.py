"""The rank that delays the others: named as the cause of a change of pace, with its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from small_recording import BEGIN_NS, S, make_identity, make_record, make_span, read_recording, write_table
from zerotop.analysis.findings.pace import iteration_shift
from zerotop.analysis.findings.support import detection
from zerotop.analysis.findings.support.steps.late_spells import begins_spell
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, COUNTED, GPUS, SPANS
from zerotop_probe.recording.writer import EventWriter

_PHASES = ("forward", "backward", "step")
_CHANGED, _COUNT = 60, 160
_STEP = (0.03, 0.04, 0.01)


Phased = Callable[[int, int], bool]
"""Whether a rank records the phases of a step."""


class Level(NamedTuple):
    """A rank's steps: seconds between the phases and in each of them, and the percentage of its GPU's use."""

    between: float
    phases: Sequence[float] = _STEP
    busy: float = 80.0


USUAL = Level(0.02)
LATE = Level(0.12, busy=40.0)
WAITS_IN_FORWARD = Level(0.02, (0.13, 0.04, 0.01), busy=100.0)
WAITS_BETWEEN = Level(0.12, busy=100.0)


RARE: Phased = lambda rank, step: (step + 7 * rank) % 20 <= 2  # noqa: E731
OFTEN: Phased = lambda rank, step: step % 4 in ((0,), (2, 3))[rank]  # noqa: E731


def write_rank(folder: Path, rank: int, since: Level, line: str, *, device: str, phased: Phased) -> None:
    """Write steps that are usual up to the change, and samples of a line between the phases since then.

    Most are counted, and no step has phases on both of the first ranks, as the detector of stragglers needs.
    """
    at, noise, spans, changed, gpus = 0.0, np.random.default_rng(rank), [], 0.0, []
    for step in range(_COUNT):
        changed = at if step == _CHANGED else changed
        level = since if step >= _CHANGED else USUAL
        is_counted = step > 20 and not phased(rank, step)
        at += level.between * noise.normal(1.0, 0.01)
        for phase, length in zip(_PHASES, level.phases, strict=True):
            if phase == "step" or not is_counted:
                flags = BOUNDARY | COUNTED * is_counted if phase == "step" else 0
                spans.append(make_span(at, at + length, phase, step, flags))
            at += length
        gpus.append(make_record(GPUS, time_ns=int(at * S), gpu=rank, utilization_percent=level.busy))
    write_table(folder, SPANS, make_identity(rank), *spans).close()
    writer = EventWriter(str(folder), make_identity(rank), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Engine, engine=0, kind="loop", device=f"{device}:{rank}" if device != "cpu" else device)
    if device != "cpu":
        write_table(folder, GPUS, make_identity(-1, pid=50 + rank), *gpus).close()
        times = [row[0] for row in gpus]
        allocated = (make_record(ALLOCATOR, time_ns=int(time), device=rank) for time in times)
        write_table(folder, ALLOCATOR, make_identity(rank), *allocated, peaks="window").close()
    for second in range(3 if line else 0):
        begin, end = (int((changed + second + part) * S) for part in (0.01, 0.9))
        called, _, name = line.rpartition(".")
        frames = [
            {"file": f"{called}.py", "line": 9, "function": name, "module": called, "own": False},
            {"file": "train.py", "line": 40 + rank, "function": "main", "own": True},
        ]
        stacks = [{"count": 20, "seconds": 0.8, "frames": [0, 1]}]
        facts = {"where": "between phases", "why": "slow", "step": _CHANGED + 6 * second, "samples": 20}
        writer.write(end, events.Stacks, **facts, begin_ns=begin, end_ns=end, frames=frames, stacks=stacks)
    writer.close()


def describe(folder: Path, *ranks: tuple[Level, str], device: str = "cuda", phased: Phased = RARE) -> str:
    """Return the sentences about the change of pace; "" if it is not told."""
    for rank, (since, line) in enumerate(ranks):
        write_rank(folder, rank, since, line, device=device, phased=phased)
    recording = read_recording(folder)
    runner = detection.Detection(recording, [iteration_shift.detect])
    runner.update()
    return "".join(f"{one.headline}. {one.details}" for one in runner.findings_at(recording.end_ns))


def is_named(told: str, rank: int, *, has_line: bool) -> bool:
    """Whether the rank is named, with its line if it has one."""
    late = rf"rank {rank} began to arrive (99|100|101) ms later where ranks synchronize"
    place = f"train.py:{40 + rank}"
    return bool(re.search(rf" on: {place}\..*{late}: {place} in main" if has_line else rf"{late}\.", told))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_whose_own_work_takes_longer_is_named(tmp_path: Path, late: int, device: str) -> None:
    ranks = [(LATE, "heapq.merge"), (WAITS_IN_FORWARD, "")]
    assert is_named(describe(tmp_path, *(ranks if late == 0 else ranks[::-1]), device=device), late, has_line=True)


def test_a_rank_is_named_where_all_record_many_steps_but_never_the_same_ones(tmp_path: Path) -> None:
    """No straggler is found then, for which the change of pace would stand aside."""
    told = describe(tmp_path, (WAITS_IN_FORWARD, ""), (LATE, ""), device="cpu", phased=OFTEN)
    assert is_named(told, 1, has_line=False)


@pytest.mark.parametrize(
    ("late_s", "iteration_s", "is_told"),
    [(0.004, 0.008, False), (0.012, 0.020, True), (0.012, 0.040, False), (0.03, 0.1, True), (0.03, 0.3, False)],
    ids=["too short", "most of a short step", "less of it", "long enough", "a small share"],
)
def test_a_delay_counts_by_its_length_and_its_share(late_s: float, iteration_s: float, is_told: bool) -> None:
    late, iteration = np.full(8, late_s), np.full(8, iteration_s)
    assert begins_spell(late, iteration) is is_told
    late[::4] = 0.0  # never five in a row
    assert not begins_spell(late, iteration)


def test_without_samples_the_rank_is_named_alone(tmp_path: Path) -> None:
    assert is_named(describe(tmp_path, (LATE, ""), (WAITS_IN_FORWARD, "")), 0, has_line=False)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_whose_gpu_is_idle_is_named_where_the_others_wait_between_the_phases(tmp_path: Path, late: int) -> None:
    """As for the value of a loss: their GPUs are busy with collectives, and have no more work."""
    ranks = [(LATE, "heapq.merge"), (WAITS_BETWEEN, "torch.Tensor.item")]
    told = describe(tmp_path, *(ranks if late == 0 else ranks[::-1]))
    assert is_named(told, late, has_line=True)
    assert "GPU" not in told


@pytest.mark.parametrize(
    "ranks",
    [
        [(WAITS_BETWEEN, "heapq.merge"), (WAITS_BETWEEN, "heapq.merge")],
        [(LATE, "heapq.merge"), (LATE, "heapq.merge")],
        [(LATE, "torch.distributed.barrier"), (WAITS_BETWEEN, "torch.Tensor.item")],
        [(LATE, ""), (WAITS_BETWEEN, "torch.Tensor.item")],
        [(WAITS_IN_FORWARD, ""), (WAITS_IN_FORWARD, "")],
        [(WAITS_BETWEEN, "torch.Tensor.item"), (WAITS_IN_FORWARD, "")],
    ],
    ids=["all busier", "all idle", "a barrier", "no line", "no own work", "more work of the GPU"],
)
def test_no_rank_is_named_without_evidence(tmp_path: Path, ranks: list[tuple[Level, str]]) -> None:
    assert "began to arrive" not in describe(tmp_path, *ranks)


def test_a_gpu_that_waits_for_an_idle_one_is_not_busier(tmp_path: Path) -> None:
    """Which one delays the other is not known without samples."""
    told = describe(tmp_path, (WAITS_BETWEEN, ""), (LATE, ""))
    assert "Iterations take" in told
    assert "GPU is busy" not in told
