"""The environment variables in which launchers pass a process its rank.

Earlier names take precedence. In order: torchrun, deepspeed and accelerate; Open MPI; MPICH and its derivatives; Slurm. See
DeepSpeed's launcher_helper.py.
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
    """Return the value of the first of these variables that is a non-negative integer, or None.

    Variables with the same value in ``inherited`` are ignored: they come from the surroundings of the job, such as an
    sbatch script, not from its launcher.
    """
    for name in names:
        value = environment.get(name, "")
        if value.isdecimal() and (inherited is None or inherited.get(name) != value):
            return int(value)
    return None
