"""Running a sweep's points, as many at once as there are sets of GPUs, and writing the results after each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from zerotop.commands.sweeping.gpu_sets import GpuSets
from zerotop.commands.sweeping.point_run import Interrupted, run_point
from zerotop.commands.sweeping.point_runner import PointRunner
from zerotop.recording.sweeps import Point, Result, Sweep, write_sweep

_POLL_S = 0.2


class SweepRunner(PointRunner):
    """A sweep in progress."""

    def __init__(self, sweep: Sweep, *, gpus: Sequence[str] = ()) -> None:
        """``gpus`` are shared among points; without any, one point runs at a time."""
        super().__init__(sweep)
        self._gpu_sets = GpuSets(sweep.plan, gpus)
        self._first_done = sum(point.result is not None for point in sweep.points)

    @property
    def waiting(self) -> list[Point]:
        """The points without a result, those that run now included."""
        return [point for point in self.sweep.points if point.result is None]

    def estimate_left_s(self) -> float | None:
        """Return the seconds that the remaining points should take at the current pace; None before the first result."""
        done = len(self.sweep.finished) - self._first_done
        return self.elapsed_s / done * len(self.waiting) if done else None

    def _run_points(self) -> None:
        waiting = self.waiting
        running: dict[Future[Result], tuple[Point, tuple[str, ...]]] = {}
        with ThreadPoolExecutor(self._gpu_sets.count, "sweep-point") as workers:
            try:
                while waiting or running:
                    if self.is_stopping():
                        raise Interrupted
                    # In order: a point that needs many GPUs is not overtaken by all others.
                    while waiting and (gpus := self._gpu_sets.take(waiting[0])) is not None:
                        point = waiting.pop(0)
                        running[workers.submit(self._run_point, point, gpus)] = point, gpus
                    for ended in wait(running, _POLL_S, FIRST_COMPLETED).done:
                        point, gpus = running.pop(ended)
                        self._gpu_sets.give_back(gpus)
                        share = len(gpus) / self._gpu_sets.count
                        self.add_result(point.number, replace(ended.result(), machine_share=share))
            except BaseException:
                self.stop()  # the other points; leaving the block waits for them
                raise

    def _run_point(self, point: Point, gpus: Sequence[str]) -> Result:
        return run_point(
            self.sweep.path,
            self.sweep.plan,
            point,
            gpus=self._gpu_sets.list_visible(gpus),
            is_stopping=self.is_stopping,
            on_attempt=self.note_attempt,
        )

    def add_result(self, number: int, result: Result) -> None:
        """Add a point's result, and write all results. Raises OSError."""
        self.forget_attempt(number)
        sweep = self.sweep.with_result(number, result)
        write_sweep(sweep)
        self.sweep = sweep
