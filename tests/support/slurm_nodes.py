"""A real Slurm on some nodes of ``nodes``: its controller on the first, its daemon and munge on each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agents import wait_for
from nodes import Cluster

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_CONFIGURATION = """\
ClusterName=zt
SlurmctldHost={first}
AuthType=auth/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_MUNGE = """\
mkdir -p /run/munge /run/slurmd /run/slurmctld && chmod 755 /run/munge && munged --force --key-file={key} \
--socket=/run/munge/munge.socket.2 --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed
"""


def explain_missing_slurm() -> str:
    """Return the reason for which there can be no Slurm here, or an empty text."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"there is no {', '.join(missing)}" if missing else ""


def start_slurm(cluster: Cluster, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Start Slurm, until all nodes are idle; return the environment of its commands. It ends with the nodes."""
    key, configuration = folder / "munge.key", folder / "slurm.conf"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    first = cluster.nodes[0]
    lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs=2 State=UNKNOWN" for node in cluster.nodes]
    configuration.write_text(_CONFIGURATION.format(first=first.name, folder=folder, nodes="\n".join(lines)))
    path = f"{environment.get('PATH', os.defpath)}:/usr/sbin"
    environment = environment | {"SLURM_CONF": str(configuration), "PATH": path}
    for node in cluster.nodes:
        node.run_command("sh", "-c", _MUNGE.format(key=key), env=environment, check=True)
    first.run_command("slurmctld", env=environment, check=True)
    for node in cluster.nodes:
        node.run_command("slurmd", "-N", node.name, env=environment, check=True)

    def has_idle_nodes() -> bool:
        said = first.run_command("sinfo", "-h", "-o", "%D %t", env=environment).stdout
        return f"{len(cluster.nodes)} idle" in said

    wait_for(has_idle_nodes, 60)
    return environment
