"""Running a sweep's points, as many at once as there are sets of GPUs, and writing the results after each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from zerotop.analysis.sweeps.settings import GPUS, OFFLOAD
from zerotop.commands.sweeping.point_run import Interrupted, run_point
from zerotop.commands.sweeping.point_runner import PointRunner
from zerotop.recording.sweeps import Plan, Point, Result, Sweep, write_sweep

_NO_OFFLOAD = "none"
_NO_GPU = ("",)  # a machine without GPUs is one set
_POLL_S = 0.2


class GpuSets:
    """Takes sets of the GPUs of this machine for points, each on its own set, and gets them back."""

    def __init__(self, plan: Plan, gpus: Sequence[str]) -> None:
        """``gpus``: as in ``CUDA_VISIBLE_DEVICES``; empty for training on the CPU."""
        self._plan = plan
        self._gpus = tuple(gpus) or _NO_GPU
        self._free = list(self._gpus)

    @property
    def count(self) -> int:
        """The number of all GPUs; 1 without any."""
        return len(self._gpus)

    def take(self, point: Point) -> tuple[str, ...] | None:
        """Take the GPUs that a point needs; None if too few are free."""
        needed = self._count_needed(point)
        if needed > len(self._free):
            return None
        taken, self._free = tuple(self._free[:needed]), self._free[needed:]
        return taken

    def give_back(self, gpus: Sequence[str]) -> None:
        """Note that a point has ended."""
        self._free = [gpu for gpu in self._gpus if gpu in self._free or gpu in gpus]

    def list_visible(self, taken: Sequence[str]) -> tuple[str, ...]:
        """Return the GPUs to show to a point that has ``taken`` these; empty to leave the environment as it is."""
        return () if len(taken) == self.count else tuple(taken)

    def _count_needed(self, point: Point) -> int:
        """Return the number of GPUs that a point occupies: all, if it is unknown or the point uses the host heavily."""
        section = self._plan.config.get("zero_optimization", {})
        offloads = point.settings.get(OFFLOAD, _NO_OFFLOAD) != _NO_OFFLOAD or "offload" in str(section)
        is_open = bool(self._plan.command) and (GPUS not in point.settings or self._has_deepspeed_launcher())
        return self.count if offloads or is_open else min(int(point.settings.get(GPUS, 1)), self.count)

    def _has_deepspeed_launcher(self) -> bool:
        """Return whether DeepSpeed's launcher chooses the GPUs: with ``--num_gpus`` it ignores CUDA_VISIBLE_DEVICES."""
        return any("deepspeed" in word.rpartition("/")[2] for word in self._plan.command[:3])


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
