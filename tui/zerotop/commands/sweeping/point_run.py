"""Running one point: a fresh process and a recording for each attempt, until the result is known.

A crash is tried again; running out of memory and hanging are results. Works in any process that reaches the sweep's folder.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from zerotop.analysis.sweeps.measurement import judge_outcome, measure_point, measure_shortage
from zerotop.commands.job.training_machine import remove_shared_memory
from zerotop.commands.sweeping.point_job import PointJob, prepare_job
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.sweeps import CRASHED, OK, OUT_OF_MEMORY, POINTS_FOLDER, Plan, Point, PointAttempt, Result
from zerotop_probe.outside import own_python
from zerotop_probe.outside.job import job_control
from zerotop_probe.outside.job.shutdown import GRACE_S
from zerotop_probe.recording import directory, events

_NOT_MEASURED = "Its pace was not measured: too few steps were recorded after the warm-up."
_NO_STEP = "No optimizer step was recorded: all that is known is that the job ended without an error."
_POLL_S = 0.2
_LOOK_INTERVAL_S = 2.0  # between looks for signs of life
_USAGE = 2  # the exit code of a command line that is refused: another attempt would be refused too
_KILL_AFTER_S = sum(GRACE_S) + 10.0


class Interrupted(Exception):
    """The point was stopped by the user and has no result."""


def run_point(
    folder: Path,
    plan: Plan,
    point: Point,
    *,
    gpus: Sequence[str] = (),
    is_stopping: Callable[[], bool] = lambda: False,
    on_attempt: Callable[[PointAttempt], None] = lambda attempt: None,
) -> Result:
    """Run a point to its result, on ``gpus`` or where its environment says.

    Raises Interrupted, and OSError if nothing can be written to the sweep's folder."""
    begun_s = time.monotonic()
    result = Result(CRASHED)
    for number in range(1, plan.retries + 2):
        recording = _choose_recording(folder, point)
        job = prepare_job(folder, plan, point, gpus)
        attempt = PointAttempt(point.number, number, recording, time.time())
        on_attempt(attempt)
        exit_code, is_hung, error = _run_job(job, attempt, plan, is_stopping, on_attempt)
        remove_shared_memory(job.port)
        result = _build_result(folder, recording, plan, exit_code, is_hung, error)
        result = replace(result, attempts=number, seconds=round(time.monotonic() - begun_s, 3))
        if result.outcome != CRASHED or exit_code == _USAGE:
            break
    return result


def _choose_recording(folder: Path, point: Point) -> Path:
    """Return a new path for a recording, after stopping a job that an earlier, killed sweep left in one."""
    number = 1
    while (path := folder / POINTS_FOLDER / (f"{point.number:04}" + (f"-{number}" if number > 1 else ""))).exists():
        _stop_job(str(path))
        number += 1
    return path


def _stop_job(recording: str) -> None:
    with suppress(OSError):
        job_control.request_stop(recording)
    deadline_s = time.monotonic() + _KILL_AFTER_S
    while job_control.is_job_alive(recording) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _run_job(
    job: PointJob,
    attempt: PointAttempt,
    plan: Plan,
    is_stopping: Callable[[], bool],
    on_attempt: Callable[[PointAttempt], None],
) -> tuple[int, bool, str]:
    """Run an attempt; return its exit code, whether it hung, and zerotop's message if nothing was recorded."""
    recording = attempt.recording
    environment = {**own_python.build_environment(), **job.environment}
    expect = ["--expect", job.question] if job.question else []
    options = ["--headless", "--require-recording", "--recording", str(recording), *expect]
    command = own_python.build_command("zerotop.cli", "run", *options, "--", *job.command)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=plan.working_directory or None,
            env={name: value for name, value in environment.items() if value is not None},
            start_new_session=True,  # Ctrl+C is ours to pass on
        )
        watch = LifeWatch(recording, plan.hang_after_s)
        is_hung = False
        while process.poll() is None:
            time.sleep(_POLL_S)
            if is_stopping() or (is_hung := watch.is_silent()):
                _stop_process(process, str(recording))
                break
            if watch.is_compiling != attempt.is_compiling:
                attempt = replace(attempt, is_compiling=watch.is_compiling)
                on_attempt(attempt)
        if is_stopping():
            raise Interrupted
        return process.returncode, is_hung, _read_last_line(errors)


def _stop_process(process: subprocess.Popen[bytes], recording: str) -> None:
    with suppress(OSError):
        job_control.request_stop(recording)
    try:
        process.wait(_KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_last_line(errors: IO[bytes]) -> str:
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4096))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("zerotop: ") if lines else ""


class LifeWatch:
    """Notices when a job neither begins or ends a phase nor prints anything, and while it compiles."""

    def __init__(self, path: Path, hang_after_s: float) -> None:
        self._path, self._hang_after_s = path, hang_after_s
        self._recording: Recording | None = None
        self._signs = -1
        self.is_compiling = False
        self._looked_s = self._heard_s = time.monotonic()

    def is_silent(self) -> bool:
        """Return whether the last sign of life is too old."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_INTERVAL_S:
            self._looked_s = now_s
            signs = self.count_signs()
            if signs != self._signs:
                self._signs, self._heard_s = signs, now_s
        return now_s - self._heard_s >= self._hang_after_s

    def count_signs(self) -> int:
        with suppress(RecordingError):
            if self._recording is None:
                self._recording = Recording.open(self._path)
            self._recording.refresh()
            has_engine = bool(self._recording.events_of(events.Engine))
            self.is_compiling = not has_engine and bool(self._recording.events_of(events.Compiling))
            sources = [source for name in ("spans", "begins", "output") for source in self._recording.sources[name]]
            return len(self._recording.events) + sum(len(source.array) for source in sources)
        return -1


def _build_result(folder: Path, path: Path, plan: Plan, exit_code: int, is_hung: bool, error: str) -> Result:
    if not directory.has_recording(str(path)):
        return Result(CRASHED, error or f"Nothing was recorded in {path}.")
    recording = Recording.open(path)
    outcome, reason = judge_outcome(recording, exit_code, is_hung=is_hung)
    measured = measure_point(recording, plan.warmup)
    if outcome == OUT_OF_MEMORY:
        measured |= measure_shortage(recording)
    if outcome == OK and measured["iterations_per_s"] is None:
        reason = f"{reason} {_NO_STEP if measured['steps'] is None else _NOT_MEASURED}".strip()
    return Result(outcome, reason, str(path.relative_to(folder)), **measured)
