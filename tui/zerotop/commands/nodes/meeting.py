"""Several ``zerotop run`` of one job, one for each task or typed on each node: they meet by a file that they all see.

The first to create it records the job and writes there how the others take part. One on each other node records that node's
part; all further ones only become their command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.exit_messages import write_messages
from zerotop.commands.common.node_orders import NODES_FILE
from zerotop.commands.job.launching import become_job
from zerotop.commands.nodes.launched_nodes import LaunchedNodes, expand_nodes
from zerotop.commands.nodes.messages import TOKEN_VARIABLE, is_job_name
from zerotop.commands.nodes.node_part import lock_part
from zerotop.recording.reader import Recording, RecordingError
from zerotop_probe.outside.job.job import build_environment
from zerotop_probe.recording import clock
from zerotop_probe.recording.directory import SESSION_VARIABLE, find_default_root
from zerotop_probe.recording.node_part import NODES_VARIABLE, NodesPlan, find_folder

_NAMES = (SESSION_VARIABLE, NODES_VARIABLE, TOKEN_VARIABLE)
_CONTENT_S = 30.0
_POLL_S = 0.1


class _Tasks(NamedTuple):
    """The tasks of one step of a launcher: the variables of their number, and those that name the step."""

    number: str
    names: tuple[str, ...]
    nodes: str = ""
    list: str = ""


_TASKS = (
    _Tasks("SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"),
    _Tasks("OMPI_COMM_WORLD_SIZE", ("OMPI_MCA_ess_base_jobid",)),
    _Tasks("OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE",)),
)


class Meeting:
    """The place where the first ``zerotop run`` of a job tells the others."""

    def __init__(self, path: Path, environment: Mapping[str, str], *, is_for_node: bool) -> None:
        """``is_for_node``: only for tasks of this node."""
        self._path = path
        tasks = _find_tasks(environment)
        count = environment.get(tasks.nodes, "") if tasks is not None else ""
        self._expected = int(count) if count.isdecimal() and not is_for_node else 0
        self.nodes = LaunchedNodes(expand_nodes(environment.get(tasks.list, "")) if tasks is not None else [], True, [])

    @property
    def has_one_node(self) -> bool:
        """Whether all tasks are certainly on this node."""
        return self._expected == 1

    def tell(self, recording: str) -> None:
        """Let the others take part in this recording. Raise OSError."""
        content = {name: os.environ.get(name, "") for name in _NAMES} | {SESSION_VARIABLE: recording}
        partial = self._path.with_suffix(".new")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump([clock.read_hostname(), clock.read_boot_id(), content], file)
        partial.replace(self._path)

    def end(self, recording: str) -> None:
        """Remove the file, and say if nodes are missing from the recording, if there is one."""
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError, ValueError):
            if not recording:
                return
            known = json.loads(Path(recording, NODES_FILE).read_text()) if Path(recording, NODES_FILE).exists() else ()
            if 0 < len(known) + 1 < self._expected:
                write_messages(
                    f"{len(known) + 1} of {self._expected} nodes took part: they find each other by {self._path.parent},"
                    " which they must share. Otherwise give --collector and --job"
                )


def meet(options: argparse.Namespace) -> Meeting | None:
    """Return the place to tell the others if we are the first of them, else None.

    Then ``options`` say how to record this node's part, if that is ours; or we become the command and do not return. Raises
    Problem.
    """
    key = _find_key(options)
    if not key:
        return None
    path = Path(find_default_root()).parent / "meetings" / f"{key}.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(2):
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            return Meeting(path, os.environ, is_for_node=options.collector is not None)
        told = _await_content(path)
        if told is None:
            write_messages(f"This task records by itself: the first one has written nothing to {path}")
            return None
        host, boot, content = told
        if not _is_over(content[SESSION_VARIABLE]):
            _follow(options, (host, boot) == (clock.read_hostname(), clock.read_boot_id()), content)
            return None
        path.unlink(missing_ok=True)  # it is that of an earlier run
    return None


def _find_key(options: argparse.Namespace) -> str:
    """Return what only the tasks of this job have in common; "" for a job without others."""
    tasks = _find_tasks(os.environ)
    # With a collector the nodes need not find each other, but the tasks of a node do.
    suffix = "" if options.collector is None else f"@{clock.read_hostname()}"
    if tasks is not None:
        values = [os.environ[name] for name in tasks.names]
        return re.sub(r"[^A-Za-z0-9_-]+", "_", "-".join([tasks.names[0], *values])) + suffix
    if options.job is None or options.collector is not None:
        return ""
    if not is_job_name(options.job):
        raise Problem(f"{options.job} is not a job's name: letters, digits, _ and -, at most 64", USAGE)
    return f"job-{options.job}"


def _find_tasks(environment: Mapping[str, str]) -> _Tasks | None:
    for tasks in _TASKS:
        count = environment.get(tasks.number, "")
        if count.isdecimal() and int(count) > 1 and all(name in environment for name in tasks.names):
            return tasks
    return None


def _await_content(path: Path) -> tuple[str, str, dict[str, str]] | None:
    deadline_s = time.monotonic() + _CONTENT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError, TypeError):
            if path.stat().st_uid != os.geteuid():
                return None
            host, boot, content = json.loads(path.read_text())
            return str(host), str(boot), {name: str(content[name]) for name in _NAMES}
        time.sleep(_POLL_S)
    return None


def _is_over(recording: str) -> bool:
    with suppress(RecordingError, OSError):
        return Recording.open(Path(recording)).is_over
    return False


def _follow(options: argparse.Namespace, is_here: bool, content: dict[str, str]) -> None:
    """Record this node's part of the recording if we are the first here, else become the command."""
    recording = content.pop(SESSION_VARIABLE)
    os.environ.update({name: value for name, value in content.items() if value})
    plan, part = NodesPlan.read(os.environ), find_folder(os.environ | {SESSION_VARIABLE: recording})
    if not is_here and plan is not None and plan.url and part != recording and lock_part(part):
        options.recording, options.part_of = part, recording
        options.collector, options.job = plan.url, plan.job
        return
    os.environ.update(build_environment(recording, os.environ, unbuffered=False))
    become_job(options.command)
