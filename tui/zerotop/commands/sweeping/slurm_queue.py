"""Read the states of ended Slurm jobs from ``squeue``, which every cluster has; ``sacct`` needs an accounting database."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

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


def read_ended_jobs(job_ids: Iterable[str]) -> dict[str, str]:
    """Return the states of jobs that have ended, such as CANCELLED or TIMEOUT; none if Slurm does not answer.

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
