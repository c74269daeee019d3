"""A sweep in progress for the screen: two allocators at eight lengths, as one GPU might measure them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.sweeps.search import LargestResult, Line
from zerotop.recording.sweeps import OK, OUT_OF_MEMORY, Plan, Point, PointAttempt, Result, Sweep, Value
from zerotop.ui.base.start_interfaces import OpenedRecording
from zerotop.ui.sweep.model import SweepModel

GIB = 1 << 30
LENGTHS = [128, 256, 512, 1024, 1536, 2048, 3072, 4096]
ALLOCATORS = ["default", "expandable_segments:True"]
SHAPE = ModelShape(layers=24, hidden=896, heads=14, vocabulary=151936, parameters=494_032_768, largest_layer=136_134_656)
REASON = "Rank 0 ran out of GPU memory in backward of step 0. PyTorch needed 9.27 GiB at once, and 6.11 GiB were free."


class Progress:
    """A sweep that stands still: ``done`` points have results, the next one runs."""

    elapsed_s = 252.0
    problem = ""
    is_compiling = False
    running: tuple[int, ...]

    def __init__(self, done: int = 11) -> None:
        self.sweep = make_sweep(done)
        self.is_over = done == len(self.sweep.points)
        self.running = () if self.is_over else (done,)
        self.stopped = False

    @property
    def attempts(self) -> dict[int, PointAttempt]:
        """An attempt that began just now, so that its clock shows the same time in each picture."""
        begun_s = time.time() - 12.5
        return {one: PointAttempt(one, 1, Path("/nowhere"), begun_s, self.is_compiling) for one in self.running}

    def estimate_left_s(self) -> float | None:
        return None if self.is_over else 117.0

    def is_stopping(self) -> bool:
        return self.stopped

    def stop(self) -> None:
        self.stopped = True

    def open_point(self, number: int) -> OpenedRecording | None:
        return None


class FitProgress(Progress):
    """A search of two stages: ``done`` of its runs have results, the next one runs."""

    searched = "seq_length"
    series_count = 2
    most_runs = 20

    def __init__(self, done: int = 6) -> None:
        tried = [(2, 4096), (2, 8192), (2, 6144), (2, 7168), (3, 7168), (3, 16384), (3, 12288), (3, 10240), (3, 11264)]
        plan = Plan(settings={"stage": [2, 3], "seq_length": list(range(1024, 16385, 1024))}, model="qwen-0.5b")
        settings: list[dict[str, Value]] = [{"stage": stage, "seq_length": length} for stage, length in tried]
        points = [
            Point(number, one, measure_search(*tried[number]) if number < done else None)
            for number, one in enumerate(settings[: done + 1])
        ]
        self.sweep = Sweep(Path("/sweeps/20261122-180000-qwen-0.5b"), plan, tuple(points))
        self.is_over = done == len(tried)
        self.running = () if self.is_over else (done,)
        self.stopped = False
        self.runs = done
        self.results: tuple[LargestResult, ...] = ()
        for stage in (2, 3) if done >= 4 else (2,):
            own = [point for point in points if point.settings["stage"] == stage and point.result is not None]
            fits = [int(point.settings["seq_length"]) for point in own if point.result and point.result.outcome == OK]
            fails = [int(point.settings["seq_length"]) for point in own if point.result and point.result.outcome != OK]
            largest, failing = max(fits, default=None), min(fails, default=None)
            size = 60 * GIB if largest else None
            is_final = bool(largest and failing and failing - largest <= 1024)
            predicted, expected = 4400.0 + 3000 * (stage - 2), 7300.0 * (stage - 1)
            result = LargestResult({"stage": stage}, largest, failing, is_final, predicted, size, len(own), "", expected)
            fragmented = 13 * GIB if stage == 2 and failing == 8192 else None
            line = Line(12.4e6, 3.81 * GIB)
            result = replace(result, line=line, limit_bytes=130.0 * GIB, fragmented_bytes=fragmented)
            self.results = (*self.results, result)

    def estimate_left_s(self) -> float | None:
        return None


def measure_search(stage: int, length: int) -> Result:
    if length > (7168 if stage == 2 else 10240):
        return Result(OUT_OF_MEMORY, REASON, attempts=1, seconds=19.0)
    return simulate_result("expandable_segments:True", length)


def make_search(done: int = 6) -> SweepModel:
    progress = FitProgress(done)
    return SweepModel(progress, SHAPE, progress)


def make_model(done: int = 11) -> SweepModel:
    return SweepModel(Progress(done), SHAPE)


def make_sweep(done: int) -> Sweep:
    plan = Plan(
        settings={"stage": [3], "allocator": ALLOCATORS, "micro_batch": [4], "seq_length": LENGTHS},
        model="qwen-0.5b",
        price_per_hour=30.0,
        currency=("$", ""),
    )
    points: list[Point] = []
    for allocator in ALLOCATORS:
        for length in LENGTHS:
            settings: dict[str, Value] = {"stage": 3, "allocator": allocator, "micro_batch": 4, "seq_length": length}
            result = simulate_result(allocator, length) if len(points) < done else None
            points.append(Point(len(points), settings, result))
    return Sweep(Path("/sweeps/20261122-170000-qwen-0.5b"), plan, tuple(points))


def simulate_result(allocator: str, length: int) -> Result:
    if allocator == "default" and length == 4096:
        return Result(OUT_OF_MEMORY, REASON, attempts=1, seconds=19.0)
    tokens = 4 * length
    allocated = int(9.3 * GIB + 3.1e6 * max(0, tokens - 1900))
    reserved = int(allocated * (1.28 if allocator == "default" else 1.03))
    iteration_s = 0.12 + tokens * 3.2e-5
    return Result(
        OK,
        attempts=1,
        seconds=22.0 + length / 400,
        steps=5,
        micro_batch_tokens=tokens,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=reserved,
        nvml_peak_bytes=reserved + 600_000_000,
        host_peak_bytes=int(4.4 * GIB),
        step_cores=1.2,
        iterations_per_s=1 / iteration_s,
        slowest_per_s=0.9 / iteration_s,
        fastest_per_s=1.05 / iteration_s,
        tokens_per_s=tokens / iteration_s,
    )
