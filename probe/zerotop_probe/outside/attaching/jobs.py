"""Finding the training jobs of this node, whoever started them.

A rank is a process that its launcher gave a rank number: a variable whose value differs in its parent's environment. Its
job is the process tree below its topmost launcher. Ranks whose launcher has died belong together if their rendezvous
variables agree. Two processes with the same rank are of two jobs. A worker of Ray that has PyTorch is a rank, too, whose
number is not known: Ray sets RANK inside of it, and the job is the raylet's. Everything is read from /proc; no process is
stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching import jupyter_kernels
from zerotop_probe.outside.attaching.found_ranks import FoundRank, split_same_ranks
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.ranks import silent_ranks
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.outside.sampling.ranks.missing_probe import has_imported_torch
from zerotop_probe.outside.sampling.ranks.ray_monitor import find_raylet
from zerotop_probe.recording import launchers
from zerotop_probe.recording.directory import SESSION_VARIABLE

# The name of the launcher of Ray's workers, and the begin of the titles of those that run something.
RAY, _RAY_TITLE = "ray", "ray::"


@dataclass(frozen=True)
class FoundJob:
    """A job of this node."""

    root: ProcessHandle  # the topmost launcher, or the first rank where there is none
    launcher: str  # "deepspeed", "torchrun", "accelerate", "mpi", "slurm", "ray", "jupyter" for a kernel, or "python"
    command: tuple[str, ...]  # of the root, not redacted
    ranks: tuple[FoundRank, ...]
    age_s: float

    @property
    def recording_path(self) -> str:
        """The directory to which ``zerotop run`` records it, or ""."""
        return next((path for rank in self.ranks if (path := rank.environment.get(SESSION_VARIABLE))), "")

    @property
    def working_directory(self) -> str:
        """The working directory of its first rank; "" if it cannot be read."""
        try:
            return os.readlink(f"/proc/{self.ranks[0].process.pid}/cwd") if self.ranks else ""
        except OSError:
            return ""

    @property
    def script_path(self) -> str:
        """The script, as the first rank's command line names it, or the notebook of a kernel; "" if there is none."""
        if self.launcher == jupyter_kernels.JUPYTER:
            return jupyter_kernels.find_notebook(self.ranks[0].environment)
        arguments = procfs.read_command_line(self.ranks[0].process.pid) if self.ranks else list(self.command)
        return next((argument for argument in arguments if argument.endswith(".py")), "")


def find_jobs() -> list[FoundJob]:
    """Return all jobs with a rank that a launcher numbered, or a worker of Ray, the youngest first."""
    node = _NodeSnapshot()
    lines = ((pid, attributes["cmdline"] or []) for pid, attributes in procfs.iter_processes("cmdline"))
    ranks = [rank for pid, arguments in lines if (rank := node.find_rank(pid, arguments)) is not None]
    return sorted(node.group_ranks(ranks), key=lambda job: job.age_s)


def find_job(pid: int) -> FoundJob | None:
    """Return the job of a process, which may be a rank, a launcher or a worker.

    Any other Python process counts as a job by itself. None if there is no such process, or it does not run Python.
    """
    process = ProcessHandle.from_pid(pid)
    if process is None:
        return None
    lineage, found = procfs.list_ancestors(pid), find_jobs()
    members = {rank.process.pid: job for job in found for rank in job.ranks} | {job.root.pid: job for job in found}
    nearest = next((members[number] for number in lineage if number in members), None)
    if nearest is not None:
        return nearest
    # A launcher of several jobs is the root of none of them.
    is_launcher = bool(find_launcher(procfs.read_command_line(pid)))
    below = (job for job in found if is_launcher and pid in procfs.list_ancestors(job.root.pid))
    if (job := next(below, None)) is not None:
        return job
    if not silent_ranks.is_python(procfs.read_command_line(pid)):
        return None
    return _make_single(process)


def find_kernel_jobs() -> list[FoundJob]:
    """Return the Jupyter kernels that hold a GPU, or without GPUs those with PyTorch, as jobs, the youngest first."""
    found = (process for pid in jupyter_kernels.find_kernels() if (process := ProcessHandle.from_pid(pid)) is not None)
    return sorted(map(_make_single, found), key=lambda job: job.age_s)


def _make_single(process: ProcessHandle) -> FoundJob:
    """Return the job of a process that no launcher started."""
    is_kernel = jupyter_kernels.is_kernel(procfs.read_command_line(process.pid))
    rank = FoundRank(process, None, procfs.read_environment(process.pid))
    return _make_job(process, [rank], launcher=jupyter_kernels.JUPYTER if is_kernel else "python")


def _make_job(root: ProcessHandle, ranks: Iterable[FoundRank], *, launcher: str = "") -> FoundJob:
    command = procfs.read_command_line(root.pid)
    if launcher == RAY:  # the raylet's own arguments say nothing of the job
        command = command[:1]
    ordered = sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank, rank.process.pid))
    age_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - root.start / procfs.TICKS_PER_S)
    return FoundJob(root, launcher or find_launcher(command) or "python", tuple(command), tuple(ordered), age_s)


class _NodeSnapshot:
    """One search of this node: the environment of a process is read once."""

    def __init__(self) -> None:
        self._environments: dict[int, dict[str, str]] = {}

    def _read_environment(self, pid: int) -> dict[str, str]:
        if pid not in self._environments:
            self._environments[pid] = procfs.read_environment(pid)
        return self._environments[pid]

    def find_rank(self, pid: int, arguments: list[str]) -> FoundRank | None:
        """Return the process with this command line as a rank, or None."""
        is_ray = bool(arguments) and arguments[0].startswith(_RAY_TITLE)
        if not is_ray and not silent_ranks.is_python(arguments):
            return None
        stat, environment = procfs.read_stat(pid), self._read_environment(pid)
        if stat is None or stat.is_dead:
            return None
        if is_ray:
            is_rank = find_raylet(pid) is not None and has_imported_torch(pid)
            return FoundRank(ProcessHandle(pid, stat.start), None, environment) if is_rank else None
        number = launchers.read_number(environment, launchers.RANK, inherited=self._read_environment(stat.parent))
        if number is None or find_launcher(arguments):
            return None
        return FoundRank(ProcessHandle(pid, stat.start), number, environment)

    def group_ranks(self, ranks: Iterable[FoundRank]) -> list[FoundJob]:
        """Return the jobs that these ranks make up."""
        by_root: dict[ProcessHandle, list[FoundRank]] = {}
        orphans: dict[tuple[str, ...], list[FoundRank]] = {}
        for rank in ranks:
            root = _find_raylet(rank.process.pid) if rank.rank is None else _find_root(rank.process.pid)
            if root is not None:
                by_root.setdefault(root, []).append(rank)
            else:
                rendezvous = tuple(rank.environment.get(name, "") for name in ("MASTER_ADDR", *launchers.JOB))
                orphans.setdefault(rendezvous, []).append(rank)
        jobs = [
            _make_job(own, part, launcher=RAY if part[0].rank is None else "")
            for root, members in by_root.items()
            for own, part in _find_roots(root, split_same_ranks(members))
        ]
        parts = [part for members in orphans.values() for part in split_same_ranks(members)]
        return jobs + [_make_job(_choose_first(part).process, part) for part in parts]


def _find_roots(root: ProcessHandle, parts: Sequence[list[FoundRank]]) -> Iterator[tuple[ProcessHandle, list[FoundRank]]]:
    """Yield the jobs below a launcher, each with its root: of several jobs, the topmost launcher above one only."""
    lines = [[procfs.list_ancestors(rank.process.pid)[1:] for rank in part] for part in parts]
    for part, own in zip(parts, lines, strict=True):
        others = {pid for one in lines if one is not own for line in one for pid in line}
        above = (pid for pid in reversed(own[0]) if pid not in others and all(pid in line for line in own))
        topmost = next((pid for pid in above if find_launcher(procfs.read_command_line(pid))), None)
        process = ProcessHandle.from_pid(topmost) if topmost is not None else None
        yield root if len(parts) == 1 else process or _choose_first(part).process, part


def _find_root(pid: int) -> ProcessHandle | None:
    """Return the topmost launcher above a rank, or None. Other programs between launchers do not matter."""
    pids = [number for number in procfs.list_ancestors(pid)[1:] if find_launcher(procfs.read_command_line(number))]
    return ProcessHandle.from_pid(pids[-1]) if pids else None


def _find_raylet(pid: int) -> ProcessHandle | None:
    raylet = find_raylet(pid)
    return ProcessHandle.from_pid(raylet) if raylet is not None else None


def _choose_first(ranks: list[FoundRank]) -> FoundRank:
    return min(ranks, key=lambda rank: (rank.rank if rank.rank is not None else -1, rank.process.pid))


def read_zero_stage(job: FoundJob) -> int | None:
    """Return the ZeRO stage of the configuration file on the first rank's command line; None if it cannot be read."""
    for rank in job.ranks[:1]:
        for argument in procfs.read_command_line(rank.process.pid):
            path = argument.partition("=")[2] if argument.startswith("-") else argument
            if path.endswith((".json", ".hjson")):
                stage = _read_stage(f"/proc/{rank.process.pid}/root{os.path.join(job.working_directory, path)}")
                if stage is not None:
                    return stage
    return None


def _read_stage(path: str) -> int | None:
    try:
        import hjson  # another node may not have it

        stage = hjson.loads(procfs.read_file(path, 1 << 20).decode())["zero_optimization"]["stage"]
    except (ImportError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return stage if isinstance(stage, int) else None
