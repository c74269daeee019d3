"""How launchers tell a process its place in the job: in its environment, each in its own words.

A name that stands first counts before those after it. By launcher: torchrun, deepspeed and accelerate; Open MPI; MPICH
and its kin; Slurm. See DeepSpeed's launcher_helper.py.
"""

from __future__ import annotations

from collections.abc import Mapping

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
NODE_RANK = ("GROUP_RANK", "CROSS_RANK", "SLURM_NODEID")
WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def read_number(
    environment: Mapping[str, str], names: tuple[str, ...], *, inherited: Mapping[str, str] | None = None
) -> int | None:
    """The first of these variables that is set to a whole number of 0 or more, or None.

    A variable that has the same value in ``inherited`` says nothing: the process has it from there, as in an sbatch
    script, and not from its launcher.
    """
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal() and (inherited is None or inherited.get(name) != value):
            return int(value)
    return None
