"""Running a sweep's points as jobs of a cluster, through submitit: one array of jobs, each with one point.

The sweep's folder must be on a file system that the nodes share. A job runs its point until it has a result, further
attempts included; this process waits, and writes the results.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.sweeping.point_run import Interrupted, run_point
from zerotop.commands.sweeping.point_runner import PointRefused
from zerotop.commands.sweeping.runner import SweepRunner
from zerotop.recording.sweeps import CRASHED, POINTS_FOLDER, Plan, Point, PointAttempt, Result, Sweep

GONE = "GONE"
"""The state of a job that Slurm has forgotten, some minutes after its end."""

# https://slurm.schedmd.com/job_state_codes.html: a job in one of these is not over.
_ALIVE = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "STAGE_OUT",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
)
_TIMEOUT_S = 30.0
_LOG_FOLDER = "slurm"
_STOP_FILE = ".stop"  # its existence asks all jobs to stop
_POLL_S = 1.0
_STOP_WAIT_S = 60.0
# Between questions to Slurm about jobs without a result, which may have died. Their results are files.
_ASK_INTERVAL_S = 30.0
# Parameters that submitit knows by these names; all others become options of sbatch.
_KNOWN = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")
_SLURM_ONLY = ("partition", "qos", "gres", "constraint", "account", "array_parallelism", "exclude", "nodelist")


def read_ended_jobs(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of jobs that have ended, such as CANCELLED or TIMEOUT; none if Slurm does not answer.

    Every cluster has ``squeue``; ``sacct`` needs an accounting database.
    An id is that of a job, or of a job of an array: ``13_0``.
    """
    wanted = list(job_ids)
    arrays = sorted({job_id.partition("_")[0] for job_id in wanted})
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={','.join(arrays)}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    # With several arrays, those that Slurm has forgotten are left out; it complains if it has forgotten all.
    if done.returncode and "Invalid job id" not in done.stderr:
        return {}
    states = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if len(line.split()) > 1)
    return {job_id: state for job_id in wanted if (state := states.get(job_id, GONE)) not in _ALIVE}


def parse_parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Return submitit's parameters for ``KEY=VALUE`` words. Raises Problem for other words."""
    parameters: dict[str, Any] = {}
    additional: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not name or not equals or not value:
            raise Problem(f"--slurm {text}: write KEY=VALUE, as in --slurm partition=gpu gpus_per_node=1", USAGE)
        number = int(value) if value.isdecimal() else value
        if name in _KNOWN:
            parameters[name] = number
        elif name in _SLURM_ONLY:
            parameters[f"slurm_{name}"] = number
        else:
            additional[name.replace("_", "-")] = value
    return parameters | ({"slurm_additional_parameters": additional} if additional else {})


def run_on_node(folder: Path, plan: Plan, point: Point) -> Result:
    """Run a point in its job, until the stop file appears."""
    return run_point(folder, plan, point, is_stopping=(folder / _STOP_FILE).exists)


class ClusterRunner(SweepRunner):
    """Submits all points at once."""

    def __init__(self, sweep: Sweep, parameters: Mapping[str, Any], *, cluster: str = "slurm") -> None:
        """``cluster``: "slurm", or submitit's own "local" (a process for each point) and "debug" (in this process).

        Raises Problem if submitit or Slurm is not there.
        """
        super().__init__(sweep)
        try:
            import submitit
        except ImportError as error:
            raise Problem("--executor slurm needs submitit: pip install 'zerotop[slurm]'") from error
        try:
            self._executor = submitit.AutoExecutor(folder=sweep.path / _LOG_FOLDER, cluster=cluster)
            self._executor.update_parameters(name=f"zerotop-{sweep.name}"[:60], **parameters)
        except (RuntimeError, ValueError, NameError) as error:
            raise Problem(f"Cannot submit jobs to {cluster}: {error}") from error
        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns whenever Slurm keeps no accounts
        self._cluster = cluster
        self._ask_interval_s = 0.0 if cluster == "debug" else _ASK_INTERVAL_S
        self._asked_s = time.monotonic() if cluster == "slurm" else 0.0
        self._ended: dict[str, str] = {}  # states of jobs that had ended at the last question, without a result

    def _run_points(self) -> None:
        stop_file = self.sweep.path / _STOP_FILE
        stop_file.unlink(missing_ok=True)
        points = self.waiting
        jobs = self._submit_jobs(points)
        pending = dict(zip((point.number for point in points), jobs, strict=True))
        try:
            while pending:
                self._collect_results(pending)
                if self.is_stopping():
                    raise Interrupted
                time.sleep(_POLL_S if pending else 0.0)
        finally:
            if pending:
                self._stop_jobs(pending)

    def _submit_jobs(self, points: Sequence[Point]) -> list[Any]:
        """Submit one job for each point. Raises Refused."""
        from submitit.core.utils import FailedJobError

        try:
            with self._executor.batch():
                return [self._executor.submit(run_on_node, self.sweep.path, self.sweep.plan, point) for point in points]
        except (FailedJobError, RuntimeError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise PointRefused(f"Slurm refuses the jobs: {lines[0].removeprefix('sbatch: error: ')}.") from error

    def _collect_results(self, pending: dict[int, Any]) -> None:
        """Add the results of jobs that have ended, and note those that run."""
        is_asking = time.monotonic() - self._asked_s >= self._ask_interval_s
        self._asked_s = time.monotonic() if is_asking else self._asked_s
        ended = self._find_ended(list(pending.values())) if is_asking else {}
        for number, job in list(pending.items()):
            if self.is_stopping():
                return
            has_result = job.paths.result_pickle.exists()
            if has_result or job.job_id in ended:
                del pending[number]
                state = "" if has_result else ended[job.job_id]
                self.add_result(number, _describe_lost_job(job, state) if state else _read_result(job))
            elif number not in self.attempts and (attempt := self._find_attempt(number)) is not None:
                self.note_attempt(attempt)

    def _find_ended(self, jobs: Sequence[Any]) -> dict[str, str]:
        """Return the ids of jobs that are over without a file of their result, with their states; "" where it can be read.

        Slurm's jobs must be over at two questions, since a result on a shared file system may be seen late.
        """
        if self._cluster != "slurm":
            return {job.job_id: "" for job in jobs if job.done()}
        before, self._ended = self._ended, read_ended_jobs(job.job_id for job in jobs)
        return {job_id: state for job_id, state in self._ended.items() if job_id in before}

    def _find_attempt(self, number: int) -> PointAttempt | None:
        """Return the attempt that a node has begun, by its recording."""
        recordings = sorted((self.sweep.path / POINTS_FOLDER).glob(f"{number:04}*"), key=lambda path: path.stat().st_ctime)
        return PointAttempt(number, len(recordings), recordings[-1], recordings[-1].stat().st_ctime) if recordings else None

    def _stop_jobs(self, pending: Mapping[int, Any]) -> None:
        """Let running jobs stop their training, then cancel whatever is left."""
        (self.sweep.path / _STOP_FILE).touch()
        running = [job for number, job in pending.items() if number in self.attempts]
        for job in pending.values():
            if job not in running:
                job.cancel(check=False)
        deadline_s = time.monotonic() + _STOP_WAIT_S
        while any(not job.paths.result_pickle.exists() for job in running) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        for job in running:
            with suppress(Exception):  # it has ended meanwhile
                job.cancel(check=False)


def _describe_lost_job(job: Any, state: str) -> Result:
    """Return the result of a job that Slurm has ended."""
    how = f"Slurm says {state}" if state != GONE else "it was cancelled or killed, or its node failed"
    return Result(CRASHED, f"The job {job.job_id} ended without a result: {how}. Its log: {job.paths.stderr}", attempts=1)


def _read_result(job: Any) -> Result:
    """Return a job's result; if its node or Slurm ended it, it has crashed."""
    error = job.exception()
    if error is None:
        result: Result = job.result()
        return result
    reason = str(error).strip().splitlines()
    return Result(CRASHED, f"The job {job.job_id} failed: {reason[0] if reason else type(error).__name__}", attempts=1)
