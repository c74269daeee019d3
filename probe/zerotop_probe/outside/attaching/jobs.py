"""The training jobs of this node, whoever started them: their launcher and ranks, from any process of theirs.

A rank is a process whose launcher gave it a rank number, which its parent's environment does not hold with that value.
Its job is what lies below the topmost of the launchers above it; ranks whose launcher has died belong together by what
their environments say of where they meet. Everything is read from /proc, and nothing is stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import Process
from zerotop_probe.outside.sampling import silent_ranks
from zerotop_probe.recording import launchers
from zerotop_probe.recording.directory import SESSION_VARIABLE

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Programs, and modules run with -m, that start ranks.
_LAUNCHERS = {
    "deepspeed": "deepspeed",
    "torchrun": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "mpirun": "mpi",
    "mpiexec": "mpi",
    "orterun": "mpi",
    "srun": "slurm",
}
# The part of DeepSpeed's launcher on each node.
_MODULES = ("deepspeed.launcher", "accelerate.commands")
_RENDEZVOUS_NAMES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid")


@dataclass(frozen=True)
class FoundRank:
    """A rank of this node. ``rank`` is None for a process that no launcher numbered."""

    process: Process
    rank: int | None
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class FoundJob:
    """A job of this node."""

    root: Process  # the topmost launcher, or the first rank where there is none
    launcher: str  # "deepspeed", "torchrun", "accelerate", "mpi", "slurm", or "python"
    command: tuple[str, ...]  # of the root, not redacted
    ranks: tuple[FoundRank, ...]
    age_s: float

    @property
    def session_path(self) -> str:
        """Where ``zerotop run`` records it, or ""."""
        return next((found for rank in self.ranks if (found := rank.environment.get(SESSION_VARIABLE))), "")

    @property
    def working_directory(self) -> str:
        """Of its first rank; "" if that cannot be read."""
        try:
            return os.readlink(f"/proc/{self.ranks[0].process.pid}/cwd") if self.ranks else ""
        except OSError:
            return ""

    @property
    def script_path(self) -> str:
        """The file that its ranks run, as they were told; "" if none is named."""
        arguments = procfs.read_command_line(self.ranks[0].process.pid) if self.ranks else list(self.command)
        return next((argument for argument in arguments if argument.endswith(".py")), "")


def find_jobs() -> list[FoundJob]:
    """All jobs with a rank that a launcher numbered, the youngest first."""
    node = _NodeSnapshot()
    ranks = [rank for pid in procfs.list_pids() if (rank := node.find_rank(pid)) is not None]
    return sorted(node.group_ranks(ranks), key=lambda job: job.age_s)


def find_job(pid: int) -> FoundJob | None:
    """The job that a process belongs to: a rank, a launcher, a worker, or any Python, which then is a job by itself.

    None if there is no such process, or it is neither.
    """
    process = Process.from_pid(pid)
    if process is None:
        return None
    lineage = _list_ancestors(pid)
    for job in find_jobs():
        members = {job.root.pid, *(rank.process.pid for rank in job.ranks)}
        if members & set(lineage) or pid in procfs.find_family(job.root.pid):
            return job
    if not silent_ranks.is_python(procfs.read_command_line(pid)):
        return None
    return _make_lone_job(FoundRank(process, None, procfs.read_environment(pid)))


def _make_lone_job(rank: FoundRank) -> FoundJob:
    pid = rank.process.pid
    return FoundJob(rank.process, "python", tuple(procfs.read_command_line(pid)), (rank,), _compute_age(rank.process))


def _list_ancestors(pid: int) -> list[int]:
    """A process and those above it."""
    found: list[int] = []
    while pid > 1 and pid not in found:
        found.append(pid)
        facts = procfs.read_stat(pid)
        pid = facts.parent if facts is not None else 0
    return found


def _compute_age(process: Process) -> float:
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / _TICKS_PER_S)


class _NodeSnapshot:
    """One look at this node: what was read of a process is read once."""

    def __init__(self) -> None:
        self._environments: dict[int, dict[str, str]] = {}

    def _read_environment(self, pid: int) -> dict[str, str]:
        if pid not in self._environments:
            self._environments[pid] = procfs.read_environment(pid)
        return self._environments[pid]

    def find_rank(self, pid: int) -> FoundRank | None:
        """The process as a rank, None if it is none."""
        if not silent_ranks.is_python(procfs.read_command_line(pid)):
            return None
        facts, own = procfs.read_stat(pid), self._read_environment(pid)
        if facts is None or facts.is_dead:
            return None
        number = launchers.read_number(own, launchers.RANK, inherited=self._read_environment(facts.parent))
        if number is None or find_launcher(procfs.read_command_line(pid)):
            return None
        return FoundRank(Process(pid, facts.start), number, own)

    def group_ranks(self, ranks: Iterable[FoundRank]) -> list[FoundJob]:
        """The jobs that these ranks make up."""
        below: dict[Process, list[FoundRank]] = {}
        orphans: dict[tuple[str, ...], list[FoundRank]] = {}
        for rank in ranks:
            root = self._find_root(rank.process.pid)
            if root is not None:
                below.setdefault(root, []).append(rank)
            else:
                meeting = tuple(rank.environment.get(name, "") for name in _RENDEZVOUS_NAMES)
                orphans.setdefault(meeting, []).append(rank)
        jobs = [self._make_job(root, members) for root, members in below.items()]
        return jobs + [self._make_job(_choose_first(members).process, members) for members in orphans.values()]

    def _find_root(self, pid: int) -> Process | None:
        """The topmost of the launchers that follow each other above a rank. Shells between them do not matter."""
        above = [number for number in _list_ancestors(pid)[1:] if find_launcher(procfs.read_command_line(number))]
        return Process.from_pid(above[-1]) if above else None

    def _make_job(self, root: Process, ranks: list[FoundRank]) -> FoundJob:
        command = procfs.read_command_line(root.pid)
        ordered = sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank, rank.process.pid))
        launcher = find_launcher(command) or "python"
        return FoundJob(root, launcher, tuple(command), tuple(ordered), _compute_age(root))


def _choose_first(ranks: list[FoundRank]) -> FoundRank:
    return min(ranks, key=lambda rank: (rank.rank if rank.rank is not None else -1, rank.process.pid))


def find_launcher(arguments: list[str]) -> str:
    """The launcher that a command line runs; "" if it is something else."""
    words = arguments[:1]
    if silent_ranks.is_python(arguments):
        words = _find_script(arguments)
    for word in words:
        if word.startswith(_MODULES):
            return word.split(".")[0]
        found = _LAUNCHERS.get(os.path.basename(word))
        if found:
            return found
    return ""


def _find_script(arguments: list[str]) -> list[str]:
    """The script or module that a Python command line runs, with an option's value at most before it."""
    for position, argument in enumerate(arguments[1:], 1):
        if argument == "-m":
            return arguments[position + 1 : position + 2]
        if argument == "-c":
            return []
        if not argument.startswith("-") and arguments[position - 1] not in ("-W", "-X"):
            return [argument]
    return []


def read_zero_stage(job: FoundJob) -> int | None:
    """The ZeRO stage that the configuration named on the ranks' command line asks for; None where that is not readable."""
    for rank in job.ranks[:1]:
        for argument in procfs.read_command_line(rank.process.pid):
            path = argument.partition("=")[2] if argument.startswith("-") else argument
            if path.endswith(".json"):
                stage = _read_stage(f"/proc/{rank.process.pid}/root{os.path.join(job.working_directory, path)}")
                if stage is not None:
                    return stage
    return None


def _read_stage(path: str) -> int | None:
    try:
        stage = json.loads(procfs.read_file(path, 1 << 20))["zero_optimization"]["stage"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return stage if isinstance(stage, int) else None
