"""Launchers: their programs, the variables in which they pass a process its rank, and what they print when ranks end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Launcher(NamedTuple):
    """One kind of launcher. Its patterns are regular expressions, which are searched in lines of output."""

    name: str
    title: str = ""  # in sentences about its output
    programs: tuple[str, ...] = ()  # commands, and modules run with -m; with a dot at the end all modules below it
    marks: tuple[str, ...] = ()  # variables that only its ranks have: one is enough, or all of several with spaces between
    rank: tuple[str, ...] = ("RANK",)
    local_rank: tuple[str, ...] = ("LOCAL_RANK",)
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    world_size: tuple[str, ...] = ("WORLD_SIZE",)
    job: tuple[str, ...] = ("MASTER_PORT",)  # variables with the same value in all ranks of a job
    ends: tuple[str, ...] = ()  # a rank ended: its ``code``, or ``signal`` in words; its ``rank``, ``local`` rank, ``pid``
    stops: tuple[str, ...] = ()  # it was asked to end, with its ranks
    kills: tuple[str, ...] = ()  # it ends the rank ``pid``, which is left
    passes_negative: bool = False  # it exits with the code of a rank, which is negative for a signal


# Names by which programs of several MPIs lie beside each other.
_MPI_KINDS = ("hydra", "openmpi", "mpich")
# Of the variables of MVAPICH2, and of MVAPICH 3 and later.
_MVAPICH = ("MV2", "MVP")

# In order of precedence. See DeepSpeed's launcher_helper.py for the variables of MPI.
LAUNCHERS = (
    Launcher(
        "accelerate",
        programs=("accelerate", "accelerate-launch", "accelerate.commands."),
        marks=("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED"),
    ),
    Launcher(
        "torchrun",
        "torchrun",
        programs=("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        marks=("TORCHELASTIC_RUN_ID",),
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        job=("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
        ends=(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\) of binary",),
        stops=(r"Received \w+ death signal, shutting down workers", r"SignalException: Process \d+ got signal: \d+"),
        kills=(r"Sending process (?P<pid>\d+) closing signal SIG\w+",),
    ),
    Launcher(
        "deepspeed",
        "DeepSpeed's launcher",
        programs=("deepspeed", "deepspeed.launcher.", "launcher_helper.py"),  # the last starts a rank under MPICH
        marks=("CROSS_SIZE RANK",),
        local_size=("LOCAL_SIZE",),
        node_rank=("CROSS_RANK",),
        # The command is always that of the last rank, even if another one has ended.
        ends=(r"\[launch\.py:\d+:\w+\] \[.*\] exits with return code = (?P<code>-?\d+)",),
        stops=(r"Main process received SIG\w+, exiting",),
        kills=(r"\[launch\.py:\d+:sigkill_handler\] Killing subprocess (?P<pid>\d+)",),
        passes_negative=True,
    ),
    Launcher(
        "mpi",
        programs=(
            "mpirun",
            "mpiexec",
            "orterun",
            "mpirun_rsh",
            *(f"mpi{verb}.{kind}" for verb in ("run", "exec") for kind in _MPI_KINDS),
        ),
        marks=("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", *(f"{kind}_COMM_WORLD_RANK" for kind in _MVAPICH)),
        rank=("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", *(f"{kind}_COMM_WORLD_RANK" for kind in _MVAPICH)),
        local_rank=(
            *("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
            *(f"{kind}_COMM_WORLD_LOCAL_RANK" for kind in _MVAPICH),
        ),
        local_size=(
            *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
            *(f"{kind}_COMM_WORLD_LOCAL_SIZE" for kind in _MVAPICH),
        ),
        world_size=("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *(f"{kind}_COMM_WORLD_SIZE" for kind in _MVAPICH)),
        job=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    Launcher(
        "slurm",
        "srun",
        programs=("srun",),
        marks=("SLURM_PROCID",),
        rank=("SLURM_PROCID",),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        world_size=("SLURM_NTASKS",),
        job=("SLURM_JOB_ID",),
        ends=(r"srun: error: \S+: task (?P<rank>\d+): (?:Exited with exit code (?P<code>\d+)|(?P<signal>.+))",),
        stops=(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT",),
    ),
    Launcher(
        "spawn",
        "torch.multiprocessing",
        rank=(),
        local_rank=(),
        world_size=(),
        job=(),
        # The number of a process is its rank only by custom.
        ends=(r"ProcessExitedException: process \d+ terminated with (?:exit code (?P<code>\d+)|signal (?P<signal>SIG\w+))",),
        kills=(r"Terminating process (?P<pid>\d+) via signal SIG\w+",),
    ),
)


def _join_names(field: str) -> tuple[str, ...]:
    """Return the variables of all launchers for one thing, the first of them first."""
    return tuple(dict.fromkeys(name for launcher in LAUNCHERS for name in getattr(launcher, field)))


RANK, LOCAL_RANK, LOCAL_SIZE = _join_names("rank"), _join_names("local_rank"), _join_names("local_size")
NODE_RANK, WORLD_SIZE, JOB = _join_names("node_rank"), _join_names("world_size"), _join_names("job")


def find_launcher(environment: Mapping[str, str]) -> str:
    """Return the launcher that started a rank with this environment; "python" if none did."""
    marked = (one.name for one in LAUNCHERS if any(environment.keys() >= set(mark.split()) for mark in one.marks))
    return next(marked, "python")


def find_program(word: str) -> str:
    """Return the launcher that a program's name or a module belongs to; "" if to none."""
    parents = tuple(word[: place + 1] for place, letter in enumerate(word) if letter == ".")
    return next((one.name for one in LAUNCHERS if not {word, *parents}.isdisjoint(one.programs)), "")


def read_number(
    environment: Mapping[str, str], names: tuple[str, ...], *, inherited: Mapping[str, str] | None = None
) -> int | None:
    """Return the value of the first of these variables that is a non-negative integer, or None.

    Variables with the same value in ``inherited`` are ignored: they come from the surroundings of the job, such as an
    sbatch script, not from its launcher.
    """
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal() and (inherited is None or inherited.get(name) != value):
            return int(value)
    return None
