"""Running a sweep's points, as many at once as there are sets of GPUs for, and writing the results after each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from zerotop.commands.common.errors import describe_error
from zerotop.commands.sweeping.gpu_sets import GpuSets
from zerotop.commands.sweeping.point_run import Attempt, Interrupted, run_point
from zerotop.session.sweeps import Point, Result, Sweep, find_point_session, write_sweep
from zerotop_probe.recording.directory import SESSION_FILE

if TYPE_CHECKING:
    from zerotop.ui.base.start_interfaces import OpenedRecording


_POLL_S = 0.2


class SweepRunner:
    """A sweep in progress. One thread calls :meth:`run`; any thread may read the attributes and call :meth:`stop`."""

    def __init__(self, sweep: Sweep, *, gpus: Sequence[str] = (), on_change: Callable[[], None] = lambda: None) -> None:
        """``gpus`` are shared among points; without any, one point runs at a time.

        ``on_change`` is called after each result and when an attempt begins, in any thread.
        """
        self.sweep = sweep
        self.attempts: Mapping[int, Attempt] = {}  # by point, of those that run now; replaced, never changed
        self.begun_s = time.time()
        self.problem = ""  # a sentence: why the sweep ended early
        self.was_interrupted = False
        self.is_over = False
        self._ended_s = 0.0
        self._gpu_sets = GpuSets(sweep.plan, gpus)
        self._changing = threading.Lock()
        self._on_change = on_change
        self._stopping = threading.Event()
        self._first_done = sum(point.result is not None for point in sweep.points)

    @property
    def waiting(self) -> list[Point]:
        """The points without a result, those that run now included."""
        return [point for point in self.sweep.points if point.result is None]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the sweep began, or went on."""
        return (self._ended_s or time.time()) - self.begun_s

    def estimate_left_s(self) -> float | None:
        """Return the seconds that the rest should take at the pace so far; None before the first result."""
        done = len(self.sweep.finished) - self._first_done
        return self.elapsed_s / done * len(self.waiting) if done else None

    def stop(self) -> None:
        """Stop the jobs that run now; :meth:`run` returns soon."""
        self._stopping.set()

    def is_stopping(self) -> bool:
        """Return whether the sweep was asked to stop."""
        return self._stopping.is_set()

    def open_point(self, number: int) -> OpenedRecording | None:
        """Open the session of a point; None if it has none. Raises SessionError."""
        attempt = self.attempts.get(number)
        path = attempt.session if attempt is not None and (attempt.session / SESSION_FILE).is_file() else None
        path = path or find_point_session(self.sweep.path, self.sweep.points[number].result)
        if path is None:
            return None
        from zerotop.commands.job.open_session import open_recording

        return replace(open_recording(path), controller=None)  # the sweep controls its jobs

    def run(self) -> None:
        """Run all points without a result."""
        try:
            self._run_points()
        except Interrupted:
            self.was_interrupted = True
            self.problem = "Interrupted."
        except OSError as error:
            self.problem = f"Nothing can be written to {self.sweep.path}: {describe_error(error)}."
        finally:
            self.attempts = {}
            self._ended_s = time.time()
            self.is_over = True
            self._on_change()

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

    def note_attempt(self, attempt: Attempt) -> None:
        """Note that an attempt has begun."""
        with self._changing:
            self.attempts = {**self.attempts, attempt.point: attempt}
        self._on_change()

    def add_result(self, number: int, result: Result) -> None:
        """Add a point's result, and write all results. Raises OSError."""
        with self._changing:
            self.attempts = {point: attempt for point, attempt in self.attempts.items() if point != number}
        sweep = self.sweep.with_result(number, result)
        write_sweep(sweep)
        self.sweep = sweep
        self._on_change()
