"""The nodes on which a command line starts ranks: DeepSpeed's launcher with a hostfile, srun, or mpirun with hosts."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from zerotop.commands.job.remote_nodes import is_this_host
from zerotop_probe.outside.attaching import hostfile
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher

_HOSTFILE = "/job/hostfile"  # DeepSpeed's default
_HOSTFILE_OPTIONS = ("-H", "--hostfile", "--deepspeed_hostfile")
# Of Open MPI, MPICH and Intel MPI, whose programs have the same names.
_MPI_FILES = ("-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f", "--default-hostfile", "-default-hostfile")
# Of Open MPI, Intel MPI and MPICH, which an MPIJob of Kubernetes sets, and of PBS.
_MPI_FILE_VARIABLES = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE", "PBS_NODEFILE")
_MPI_HOSTS = ("-H", "-host", "--host", "-hosts", "--hosts")
# DeepSpeed's launchers that log in on each node by ssh and pass no variables but those on their command lines.
_BY_SSH = ("pdsh", "openmpi", "mvapich")
_SLURM_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_COMMAND_S = 5.0


class LaunchedNodes(NamedTuple):
    """The other nodes of a command."""

    names: list[str]  # as the launcher has them; empty if not known before it has started
    passes_secrets: bool  # whether the launcher passes our environment on without showing it to others
    ssh: list[str]  # options of the ssh by which it reaches them


def find_nodes(command: Sequence[str], environment: Mapping[str, str]) -> LaunchedNodes | None:
    """Return the other nodes of a command; None if it starts ranks on this node only."""
    find = {"deepspeed": _find_deepspeed, "slurm": _find_slurm, "mpi": _find_mpi}.get(find_launcher(command))
    words = list(command)
    script = next((place for place, word in enumerate(words) if word.endswith(".py") and place), len(words))
    with suppress(hostfile.NoHosts, OSError):
        return find(words[1:script], environment) if find is not None else None
    return None


def _find_deepspeed(words: list[str], environment: Mapping[str, str]) -> LaunchedNodes | None:
    if "--no_ssh" in words:
        return None
    names = hostfile.read_file(next(_iter_values(words, _HOSTFILE_OPTIONS), _HOSTFILE))
    for text in _iter_values(words, ("-i", "--include")):
        names = [name for name in names if name in {part.partition(":")[0] for part in text.split("@")}]
    for text in _iter_values(words, ("-e", "--exclude")):
        names = [name for name in names if name not in text.split("@")]
    for text in _iter_values(words, ("--num_nodes",)):
        names = names[: int(text)] if text.isdecimal() else names
    others = _drop_this_host(names)
    launcher = next(_iter_values(words, ("--launcher",)), "pdsh").lower()
    ssh = [word for port in _iter_values(words, ("--ssh_port",)) for word in ("-p", port)]
    ssh += shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
    return LaunchedNodes(others, launcher not in _BY_SSH, ssh) if others else None


def _find_slurm(words: list[str], environment: Mapping[str, str]) -> LaunchedNodes | None:
    allocated = next((environment[name] for name in _SLURM_NODES if name in environment), "")
    wanted = next(_iter_values(words, ("-N", "--nodes")), allocated)
    most = wanted.rpartition("-")[2]
    is_single = most == "1" or (not wanted and next(_iter_values(words, ("-n", "--ntasks")), "1") == "1")
    if is_single:
        return None
    return LaunchedNodes(expand_nodes(environment.get("SLURM_JOB_NODELIST", "")), True, [])


def expand_nodes(text: str) -> list[str]:
    """Return the other nodes in a list of Slurm's, such as ``gpu[1-4]``."""
    if not text:
        return []
    command = ["scontrol", "show", "hostnames", text]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True).stdout
        return _drop_this_host(said.split())
    return []


def _find_mpi(words: list[str], environment: Mapping[str, str]) -> LaunchedNodes | None:
    names = [name for text in _iter_values(words, _MPI_HOSTS) for name in hostfile.parse_names(text)]
    for path in _iter_values(words, _MPI_FILES):
        names += hostfile.read_file(path)
    path = next((environment[name] for name in _MPI_FILE_VARIABLES if name in environment), "")
    if not names and path:
        names = hostfile.read_file(path)
    if not names:
        return _find_slurm(["-n", "1", *words], environment)
    others = _drop_this_host(re.sub(r":\d+$", "", name) for name in names)
    return LaunchedNodes(others, True, []) if others else None


def _iter_values(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield the values of options: ``--nodes 2``, ``--nodes=2`` or ``-N2``."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        short = word[:2]
        if name in options:
            yield value if equals else following
        elif short in options and len(short) == 2 and short[1] != "-" and word[2:3].isdigit():
            yield word[2:]


def _drop_this_host(names: Iterator[str] | Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if not is_this_host(name)]


def find_own_address(names: Sequence[str]) -> str:
    """Return this node's address as the others see it: that of the interface towards the first of them."""
    for name in [name.rpartition("@")[2] for name in names[:3]] + [os.uname().nodename]:
        with suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
                    probe.connect(address)  # sends nothing
                    own = str(probe.getsockname()[0])
                    if not own.startswith("127.") and own != "::1":
                        return own
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # reserved for documentation: the way that all addresses without another one take
        return str(probe.getsockname()[0])
    return ""
