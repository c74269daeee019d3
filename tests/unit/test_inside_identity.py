"""Who a rank is, from what its launcher leaves in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_recordings import Rank
from zerotop_probe.inside.inspection import identity
from zerotop_probe.recording import launchers

DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "LOCAL_SIZE": "4",
}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
# What the Hydra of MPICH 4.0.2 sets; Intel MPI's has the same names, and more.
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
INTEL_MPI = MPICH | {"I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile"}
# Of mpirun_rsh, and of the same library started by srun.
MVAPICH2 = {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items()} | {"PMI_ID": "5", "MPIRUN_RANK": "5"}
MVAPICH3 = {name.replace("OMPI", "MVP"): value for name, value in OPENMPI.items()}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NODEID": "1"}
SLURM_MVAPICH = SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "11", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
# The pod of a PyTorchJob says which pod it is, in PET_* and RANK, which torchrun replaces in its ranks.
PYTORCHJOB = TORCHRUN | {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "MASTER_ADDR": "llama-master-0"}
# A pod of a JobSet says its number only, and a worker of an MPIJob its role: ranks have their launcher's variables.
JOBSET = TORCHRUN | {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "llama-workers-0-0.llama"}
MPIJOB = OPENMPI | {"K_MPI_JOB_ROLE": "worker", "OMPI_MCA_orte_keep_fqdn_hostnames": "true"}
ENVIRONMENTS = [DEEPSPEED, TORCHRUN, OPENMPI, MPICH, INTEL_MPI, MVAPICH2, MVAPICH3, SLURM, SLURM_MVAPICH]


@pytest.mark.parametrize("environment", [*ENVIRONMENTS, PYTORCHJOB, JOBSET, MPIJOB])
def test_every_launcher_says_the_same_in_its_words(environment: dict[str, str]) -> None:
    rank_identity = identity.read_identity(environment)
    del rank_identity["launcher"]
    assert rank_identity == {"rank": 5, "local_rank": 1, "node_rank": 1, "world_size": 8}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        (DEEPSPEED, "deepspeed"),
        (TORCHRUN, "torchrun"),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "bf16"}, "accelerate"),
        (OPENMPI, "mpi"),
        (MPICH, "mpi"),
        (INTEL_MPI, "mpi"),
        (MPIJOB, "mpi"),
        (JOBSET, "torchrun"),
        (MVAPICH2, "mpi"),
        (MVAPICH3, "mpi"),
        (PYTORCHJOB, "torchrun"),
        (SLURM, "slurm"),
        ({}, "python"),
    ],
)
def test_launchers_by_name(environment: dict[str, str], name: str) -> None:
    assert launchers.find_launcher(environment) == name


def test_without_a_launcher_the_process_is_rank_0() -> None:
    rank_identity = identity.read_identity({"RANK": "", "LOCAL_RANK": "none"})
    assert rank_identity | {"launcher": ""} == {
        "rank": 0,
        "local_rank": None,
        "node_rank": None,
        "world_size": None,
        "launcher": "",
    }


# An engine stands for DeepSpeed's here: what is tested is the process around it.
SCRIPT = """
import os, sys
from zerotop_probe.inside.hooks.hook_installer import PROBE
assert PROBE.start_recording() and PROBE.start_recording()
PROBE.recorder.end_span(PROBE.recorder.begin_span(1, "forward", (0, 0, 0)), 2)
child = os.fork()
if child == 0:
    assert PROBE.recorder is None
    {child}
    sys.stdout.flush()
    sys.exit(0)
os.waitpid(child, 0)
PROBE.recorder.end_span(PROBE.recorder.begin_span(3, "forward", (0, 0, 0)), 4)
"""


def run_script(tmp_path: Path, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONZEROTOP_SESSION": str(tmp_path), "RANK": "0"} | more
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_a_forked_child_writes_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    run_script(tmp_path, SCRIPT.format(child="pass"))
    rank = Rank(tmp_path, 0)
    assert rank.spans["begin_ns"].tolist() == [1, 3]
    # Since the first nanoseconds, in which these phases are, the rank has been silent: it may say where it is.
    told = [event["event"] for event in rank.events if event["event"] not in ("stacks", "thread_names")]
    assert told == ["hello", "goodbye"]


def test_a_forked_child_that_makes_an_engine_has_files_of_its_own(tmp_path: Path) -> None:
    run_script(tmp_path, SCRIPT.format(child='os.environ["RANK"] = "1"; assert PROBE.start_recording()'))
    assert [event["event"] for event in Rank(tmp_path, 1).events] == ["hello", "goodbye"]
    assert Rank(tmp_path, 0).spans["begin_ns"].tolist() == [1, 3]


def test_without_a_recording_it_stays_asleep(tmp_path: Path) -> None:
    code = "from zerotop_probe.inside.hooks.hook_installer import PROBE; print(PROBE.start_recording(), PROBE.recorder)"
    assert run_script(tmp_path, code, PYTHONZEROTOP_SESSION="").stdout == "False None\n"
    assert list(tmp_path.iterdir()) == []


def test_hello_has_what_matters_and_no_secret(tmp_path: Path) -> None:
    code = "from zerotop_probe.inside.hooks.hook_installer import PROBE; PROBE.start_recording()"
    secret = "hf_abcdefghijklmnop"
    more = {"OMP_NUM_THREADS": "3", "HF_TOKEN": secret, "WORLD_SIZE": "1"}
    run_script(tmp_path, code, "--steps", "3", "--hub_token", secret, f"--api-key={secret}", **more)
    (hello,) = Rank(tmp_path, 0).find_events("hello")
    assert secret not in json.dumps(hello)
    assert hello["arguments"][1:3] == ["--steps", "3"]
    assert hello["environment"]["OMP_NUM_THREADS"] == "3"
    assert (hello["rank"], hello["world_size"]) == (0, 1)
    assert hello["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert "torch" not in hello  # it was not imported


def test_an_internal_error_is_recorded_once_with_its_place(tmp_path: Path) -> None:
    code = (
        "from zerotop_probe.inside.hooks.hook_installer import PROBE\n"
        "from zerotop_probe.inside.guard import Guard\n"
        "PROBE.start_recording()\n"
        "part = Guard('somewhere', PROBE.meter)\n"
        "for _ in range(3): part.run(lambda: {}['a key of hf_abcdefghijklmnop'])\n"
    )
    done = run_script(tmp_path, code)
    assert (done.stdout, done.stderr) == ("", "")
    (error,) = Rank(tmp_path, 0).find_events("probe_error")
    assert error["where"] == "somewhere"
    assert error["error"] == "KeyError: 'a key of <redacted>'"
    loud: Any = run_script(tmp_path, code, PYTHONZEROTOP_DEBUG="1", RANK="1")
    assert "somewhere is no longer measured" in loud.stderr
