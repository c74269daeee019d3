"""Batches that grow by a plan: one finding that tells of them, without a leak or a change of pace beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory_recording import make_reading
from small_recording import BEGIN_NS, make_identity, make_span, read_recording, write_table
from zerotop.analysis.findings import Finding, begin_detection, detect_findings
from zerotop.analysis.findings.pace.batch_growth import describe_jumps
from zerotop.analysis.findings.support.steps.growing_batches import BatchHistory, GrowingBatches, spread_sizes
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, SPANS
from zerotop_probe.recording.writer import EventWriter

STEPS = 160
SIZES: dict[str, Callable[[int], int]] = {
    "jumps": lambda step: 512 * (1 + step // 40),
    "each step": lambda step: 512 + 8 * max(0, step - 24),
    "each third step": lambda step: 512 + 24 * (max(0, step - 24) // 3),
    "fast": lambda step: 512 if step < 60 else min(2048, 512 + 24 * (step - 59)),
    "one jump": lambda step: 512 if step < 80 else 1024,
    "back and forth": lambda step: 512 if step // 20 % 2 else 1024,
}


def record(
    folder: Path, get_size: Callable[[int], int], *, leaked: int = 0, slower: Callable[[int], float], allocs: int = 0
) -> None:
    """Write steps of 0.1 ms for each token, which keep 0.5 MiB for each while they run, and half of that after them.

    ``allocs``: calls of cudaMalloc in each step that is larger than the one before.
    """
    spans, readings, at, calls = [], [], 0.0, 0
    for step in range(STEPS):
        calls += allocs * (step > 0 and get_size(step) > get_size(step - 1))
        took, held = get_size(step) * 1e-4 * slower(step), (get_size(step) + leaked * step) / 4096
        for phase, begin, end in (("forward", 0.0, 0.4), ("backward", 0.4, 0.9), ("step", 0.9, 0.999)):
            tokens, flags = (get_size(step), 0) if phase == "forward" else (-1, BOUNDARY if phase == "step" else 0)
            spans.append(make_span(at + begin * took, at + end * took, phase, step, flags, tokens=tokens))
        readings.append(make_reading(at + 0.9 * took, 8 + 2 * held, 20, phase="backward", edge="end", device_allocs=calls))
        readings.append(make_reading(at + 0.998 * took, 8 + held, 20, phase="step", edge="end", device_allocs=calls))
        at += took
    write_table(folder, SPANS, make_identity(0), *spans).close()
    write_table(folder, ALLOCATOR, make_identity(0), *readings, peaks="window").close()
    writer = EventWriter(str(folder), make_identity(0), clock={"monotonic_ns": 0, "unix_ns": BEGIN_NS})
    writer.write(0, events.Hello, rank=0, torch="2.11.0")
    writer.write(0, events.Engine, engine=0, kind="loop", device="cuda:0")
    writer.close()


def find(
    folder: Path, sizes: str, *, leaked: int = 0, slower: Callable[[int], float] = lambda step: 1.0, allocs: int = 0
) -> dict[str, Finding]:
    record(folder, SIZES[sizes], leaked=leaked, slower=slower, allocs=allocs)
    recording = read_recording(folder)
    names = "iteration_shift", "iteration_drift", "memory_creep", "memory_step", "batch_growth"
    return {one.name: one for one in detect_findings(recording, recording.end_ns) if one.name in names}


@pytest.mark.parametrize("sizes", ["jumps", "each step", "each third step"])
def test_growth_by_a_plan_is_one_finding(tmp_path: Path, sizes: str) -> None:
    found = find(tmp_path, sizes)
    assert list(found) == ["batch_growth"]
    finding = found["batch_growth"]
    assert finding.severity.value == "info"
    assert finding.headline.startswith("Steps grew from 512 to ")
    assert "Time per token is unchanged." in finding.details
    assert "Memory peaks at " in finding.details
    assert len(finding.headline) <= 80


def test_the_growth_is_placed_and_measured(tmp_path: Path) -> None:
    finding = find(tmp_path, "jumps")["batch_growth"]
    assert finding.headline == "Steps grew from 512 to 2,048 tokens and take 205 ms instead of 51 ms"
    assert finding.details.startswith(
        "They grew at steps 40, 80 and 120, sequences from 256 to 1,024 tokens: iterations take 4.0 times"
        " as long for 4.0 times the tokens."
    )
    assert finding.step == 40


@pytest.mark.parametrize(
    ("last_steps", "first_steps", "when"),
    [
        ([149, 299, 400], [1, 150, 300], "at steps 150 and 300"),
        ([123, 241, 400], [1, 182, 300], "in 2 jumps, one between steps 123 and 182, one between steps 241 and 300"),
        ([123, 299, 400], [1, 182, 300], "in 2 jumps, one between steps 123 and 182, one at step 300"),
        ([20, 60], [1, 41], "between steps 20 and 41"),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], "between steps 1 and 5"),
    ],
)
def test_few_jumps_are_told_one_by_one(last_steps: list[int], first_steps: list[int], when: str) -> None:
    sizes = np.arange(len(last_steps))
    growth = GrowingBatches(sizes, np.array(first_steps), np.array(last_steps), is_planned=True)
    assert describe_jumps(growth) == when


@pytest.mark.parametrize(("allocs", "slower", "severity"), [(3, 5.0, "warning"), (0, 5.0, "info"), (3, 1.0, "info")])
def test_new_blocks_of_growing_batches_cost_time(tmp_path: Path, allocs: int, slower: float, severity: str) -> None:
    """Sizes grow in each step from 60 to 123."""
    finding = find(tmp_path, "fast", slower=lambda step: slower if 60 <= step < 124 else 1.0, allocs=allocs)["batch_growth"]
    assert finding.severity.value == severity
    assert ("called cudaMalloc 3 times: larger blocks do not fit" in finding.details) is (severity == "warning")
    assert bool(finding.fix) is bool(finding.cost) is (severity == "warning")


def test_time_that_grows_faster_than_sizes_is_not_that_of_new_blocks(tmp_path: Path) -> None:
    """As with attention: with the square of the length."""
    finding = find(tmp_path, "fast", slower=lambda step: SIZES["fast"](step) / SIZES["fast"](0), allocs=3)["batch_growth"]
    assert finding.severity.value == "info"
    assert "cudaMalloc" not in finding.details


@pytest.mark.parametrize("sizes", ["one jump", "back and forth"])
def test_other_sizes_are_no_plan(tmp_path: Path, sizes: str) -> None:
    assert "batch_growth" not in find(tmp_path, sizes)


def test_a_leak_while_batches_grow_in_jumps_is_still_told(tmp_path: Path) -> None:
    """It adds to the memory in steps of the same size, too."""
    assert {"batch_growth", "memory_creep"} <= set(find(tmp_path, "jumps", leaked=64))


def test_a_slowdown_while_batches_grow_is_still_told(tmp_path: Path) -> None:
    """From the middle of a level on, each token takes twice as long."""
    found = find(tmp_path, "jumps", slower=lambda step: 1.0 if step < 100 else 2.0)
    assert "Time per token rose by 100 %." in found["batch_growth"].details
    assert found["iteration_shift"].step == 100


@pytest.mark.parametrize("sizes", ["jumps", "each step"])
def test_growth_is_told_alike_however_often_it_is_looked_for(tmp_path: Path, sizes: str) -> None:
    record(tmp_path, SIZES[sizes], slower=lambda step: 1.0)
    recording = read_recording(tmp_path)
    told = []
    for looks in (1, 3, STEPS):
        detection = begin_detection(recording)
        for look in range(1, looks + 1):
            detection.update(recording.begin_ns + (recording.end_ns - recording.begin_ns) * look // looks)
        told.append([one for one in detection.ordered_findings if one.name == "batch_growth"])
    assert told[0] == told[1] == told[2] != []


@pytest.mark.parametrize(
    ("sizes", "is_planned"),
    [
        ([64] * 10 + [128] * 10 + [192] * 10, True),
        ([64 + step for step in range(30)], True),
        ([64] * 10 + [128] * 5 + [40] + [128] * 5 + [192] * 10, True),
        ([64] * 20 + [128] * 10, False),
        ([64] * 20 + [96, 128] + [128] * 10, False),
        ([64] * 10 + [128] * 10 + [192] * 10 + [128] * 10, False),
        (np.random.default_rng(1).integers(60, 200, 40).tolist(), False),
    ],
    ids=["jumps", "each step", "a smaller last batch", "one jump", "at once", "back", "any size"],
)
def test_only_sizes_that_never_shrink_are_planned(sizes: list[int], *, is_planned: bool) -> None:
    """However many steps are read at once."""
    for piece in (1, 7, len(sizes)):
        history = BatchHistory()
        for begin in range(0, len(sizes), piece):
            part = np.array(sizes[begin : begin + piece])
            history.add_steps(part, begin + 1 + np.arange(len(part)))
        assert history.after(len(sizes)).is_planned is is_planned
        assert history.after(0).is_planned is False


def test_counted_steps_have_the_size_of_both_neighbours() -> None:
    rows = np.zeros(9, STEP_DTYPE)
    rows["tokens"] = (-1, 64, -1, -1, 64, -1, 128, 128, -1)
    assert spread_sizes(rows).tolist() == [0, 64, 64, 64, 64, 0, 128, 128, 0]
