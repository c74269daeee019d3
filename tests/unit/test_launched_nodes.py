"""On which nodes a command starts ranks, what those nodes are told, and where they record."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerotop.commands.job.launch_script import find_launch
from zerotop.commands.nodes import hub, keys, ray_cluster
from zerotop.commands.nodes.launched_nodes import find_nodes, find_own_address
from zerotop_probe.recording import clock, directory, node_part
from zerotop_probe.recording.node_part import NODES_VARIABLE, NodesPlan

HERE = os.uname().nodename


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text(f"{HERE} slots=4\nworker-2 slots=4\nworker-3 slots=4  # the slow one\n")
    return str(path)


def list_names(command: str, **environment: str) -> list[str] | None:
    found = find_nodes(command.split(), environment)
    return None if found is None else found.names


def test_deepspeed_uses_the_hosts_of_its_hostfile_that_its_filters_leave(hosts: str) -> None:
    both = ["worker-2", "worker-3"]
    assert list_names(f"deepspeed --hostfile {hosts} train.py") == both
    assert list_names(f"deepspeed --hostfile={hosts} train.py --steps 2") == both
    assert list_names(f"python -m deepspeed.launcher.runner -H {hosts} train.py") == both
    assert list_names(f"deepspeed -H {hosts} --include {HERE}@worker-3:0,1 train.py") == ["worker-3"]
    assert list_names(f"deepspeed -H {hosts} --exclude worker-2@worker-3:0 train.py") == ["worker-3"]
    assert list_names(f"deepspeed -H {hosts} --num_nodes 2 train.py") == ["worker-2"]
    assert list_names(f"deepspeed -H {hosts} --num_nodes 1 train.py") is None
    assert list_names(f"deepspeed -H {hosts} --no_ssh --node_rank 1 train.py") is None
    assert list_names(f"deepspeed -H {hosts}.missing train.py") is None
    assert list_names(f"deepspeed --num_gpus 2 train.py --hostfile {hosts}") is None, "that is the script's option"


@pytest.mark.parametrize(
    ("launcher", "passes"),
    [
        ("", False),
        ("--launcher openmpi", False),
        ("--launcher mvapich", False),
        ("--launcher slurm", True),
        ("--launcher mpich", True),
        ("--launcher impi", True),
    ],
)
def test_some_of_deepspeeds_launchers_pass_no_secrets_on(hosts: str, launcher: str, passes: bool) -> None:
    found = find_nodes(f"deepspeed -H {hosts} {launcher} --ssh_port 2222 train.py".split(), {})
    assert found is not None
    assert found.passes_secrets is passes
    assert found.ssh == ["-p", "2222"]


def test_srun_may_start_ranks_on_several_nodes() -> None:
    assert list_names("srun -N2 -n 16 python train.py") == []
    assert list_names("srun --nodes=1-4 python train.py") == []
    assert list_names("srun -n 16 python train.py") == []
    assert list_names("srun python train.py", SLURM_NNODES="4") == []
    assert list_names("srun -N 1 -n 8 python train.py", SLURM_NNODES="4") is None
    assert list_names("srun -n 8 python train.py", SLURM_NNODES="1") is None
    assert list_names("srun python train.py") is None


def test_mpirun_names_hosts_in_several_ways(hosts: str) -> None:
    assert list_names(f"mpirun -np 8 -H {HERE}:4,worker-2:4 python train.py") == ["worker-2"]
    assert list_names("mpiexec.hydra -hosts a,b -ppn 4 python train.py") == ["a", "b"]
    assert list_names(f"mpirun -hostfile {hosts} python train.py") == ["worker-2", "worker-3"]
    for variable in ("PBS_NODEFILE", "OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE"):
        assert list_names("mpirun python train.py", **{variable: hosts}) == ["worker-2", "worker-3"]
    assert list_names("mpirun -n 8 python train.py", SLURM_NNODES="2") == []
    assert list_names("mpirun -n 8 python train.py") is None
    assert list_names("mpirun -H localhost -n 8 python train.py") is None


def test_other_commands_have_no_other_nodes(hosts: str) -> None:
    for command in ("torchrun --nnodes 2 train.py", f"python train.py --hostfile {hosts}", "bash run.sh"):
        assert list_names(command) is None


START = """\
#!/bin/bash
# srun -N 9 python old.py
set -e; export HOSTFILE={hosts}
PORT=29500
if [ -n "$X" ]; then srun hostname; fi
NCCL_DEBUG=INFO exec deepspeed --hostfile $HOSTFILE \\
    --master_port ${{PORT}} --num_nodes "${{COUNT:-3}}" train.py --text 'a b' | tee log
"""


@pytest.mark.parametrize("form", ["bash {}", "bash -e {}", "{}", "sh -c '. x; {}'"])
def test_a_launcher_in_a_shell_script_is_found(tmp_path: Path, hosts: str, form: str) -> None:
    script = tmp_path / "start.sh"
    script.write_text(START.format(hosts=hosts))
    launch = f"deepspeed --hostfile {hosts} --master_port 29500 --num_nodes 3 train.py --text".split()
    if "-c" in form:
        form = form.format("srun -N2 python train.py && true")
        launch = ["srun", "-N2", "python", "train.py"]
    found = find_launch(shlex.split(form.format(script)), {})
    assert found[: len(launch)] == launch
    nodes = find_nodes(found, {})
    assert nodes is not None
    assert nodes.names == ([] if "-c" in form else ["worker-2", "worker-3"])


def test_scripts_without_such_a_launcher_start_on_this_node_only(tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    for text in ("torchrun train.py", "echo deepspeed", "X='\nsrun -N2 x\n'", "", "\0\xff"):
        script.write_text(text)
        assert find_launch(["bash", str(script)], {}) == [], text
    script.write_text("#!/usr/bin/python\nsrun -N2")
    for command in ([str(script)], ["bash"], ["bash", "missing"], ["bash", str(tmp_path)], ["bash", "-c"], ["/dev/zero"]):
        assert find_launch(command, {}) == [], command


def test_arguments_of_a_script_are_known(tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text("mpirun -H a,$1 python train.py")
    assert find_launch(["bash", str(script), "b"], {})[2] == "a,b"


def test_the_address_is_one_that_others_can_reach() -> None:
    address = find_own_address(["127.0.0.1", HERE])
    assert not address.startswith("127.")


def make_plan(**changes: Any) -> NodesPlan:
    plan = NodesPlan("elsewhere", "boot", "nats://head:1", "llama", ["python", "-c", "x = \"'$`\\n"], {"stacks": False})
    return plan._replace(**changes)


def test_the_plan_passes_through_any_shell() -> None:
    plan = make_plan()
    value = plan.encode()
    assert re.fullmatch(r"[\w@%+=:,./-]*", value), "DeepSpeed quotes other letters"
    said = subprocess.run(["sh", "-c", f"export P={value}; echo $P"], capture_output=True, text=True, check=True).stdout
    assert NodesPlan.read({NODES_VARIABLE: said.strip()}) == plan


@pytest.mark.parametrize("value", ["", "x", "bm90IGpzb24=", "WzFd", "e30="])
def test_a_damaged_plan_is_none(value: str) -> None:
    assert NodesPlan.read({NODES_VARIABLE: value}) is None


def test_only_other_nodes_have_folders_of_their_own(tmp_path: Path) -> None:
    recording = directory.create_recording(["train"], path=str(tmp_path / "run1"))
    here = make_plan(host=clock.read_hostname(), boot=clock.read_boot_id())

    def find(plan: NodesPlan, path: str = recording) -> str:
        return node_part.find_folder({directory.SESSION_VARIABLE: path, NODES_VARIABLE: plan.encode(), "TMPDIR": "/tmp/zt"})

    own = f"run1@{clock.read_hostname()}"
    assert find(here) == recording
    assert find(make_plan()) == str(tmp_path / own)
    assert find(here._replace(url="")) == recording
    assert find(make_plan(url="")) == str(tmp_path / own), "what it sees is another recording"
    assert node_part.find_folder({}) == ""
    assert node_part.find_folder({directory.SESSION_VARIABLE: recording}) == recording
    assert find(make_plan(), "/proc/nowhere/run1").endswith(own)


def test_without_a_server_a_node_that_sees_the_recording_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = directory.create_recording(["train"], path=str(tmp_path / "run1"))
    plan = make_plan(host=clock.read_hostname(), boot=clock.read_boot_id(), url="")
    monkeypatch.setattr(clock, "read_hostname", lambda: "worker_2")
    environment = {directory.SESSION_VARIABLE: recording, NODES_VARIABLE: plan.encode()}
    assert NodesPlan.read(environment) == plan
    assert node_part.find_folder(environment) == recording


def test_processes_of_a_part_have_the_whole_recordings_name(tmp_path: Path) -> None:
    part = directory.create_recording(["train"], path=str(tmp_path / "a@b"), part_of="/far/a")
    assert node_part.read_session_value(part) == "/far/a"
    assert node_part.read_session_value("/far/a") == "/far/a"


def test_a_key_is_private_and_comes_by_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keys.read_key("llama") == ""
    keys.write_key("llama", "secret-of-tests")
    (path,) = tmp_path.rglob("llama")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read_key("llama") == "secret-of-tests"
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" >> "$HOME/arguments"\nexec sh\n')
    ssh.chmod(0o700)
    assert keys.share_key("llama", "secret-of-tests", ["worker"], [str(ssh)], ["-p", "22"]) == []
    assert not list(tmp_path.rglob("llama.sent")), "the home is shared: it has the key"
    keys.remove_key("llama", sent=False)
    assert keys.share_key("llama", "secret-of-tests", ["worker"], [str(ssh)], []) == []
    assert keys.read_key("llama") == "secret-of-tests"
    assert "secret" not in (tmp_path / "arguments").read_text()
    keys.remove_key("llama", sent=True)
    assert keys.read_key("llama") == ""
    ssh.write_text("#!/bin/sh\necho 'ssh: no route.' >&2\nexit 255\n")
    assert keys.share_key("llama", "x", ["worker"], [str(ssh)], []) == ["Node worker cannot take part: ssh: no route."]


def make_mpirun(folder: Path, said: str) -> Path:
    """Return a program that says its version and shows its PATH and arguments."""
    path = folder / "mpirun"
    path.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exec echo \'{said}\'\nprintf \'%s\\n\' "$PATH" "$@"\n')
    path.chmod(0o700)
    return path


NAMES = ["PYTHONPATH", "PYTHONZEROTOP_SESSION", "PYTHONZEROTOP_NODES", "ZEROTOP_TOKEN"]
WAYS_OF_NAMING = pytest.mark.parametrize(
    ("said", "given", "is_changed"),
    [
        ("mpirun (Open MPI) 4.1.4", [], True),
        ("mpirun (Open MPI) 4.1.4", ["-x", "HOME"], True),
        ("mpirun (Open MPI) 4.1.4", ["--mca", "mca_base_env_list", "HOME"], False),
        ("HYDRA build details", [], False),
    ],
)


@WAYS_OF_NAMING
def test_open_mpi_gets_names_only(tmp_path: Path, said: str, given: list[str], is_changed: bool) -> None:
    program = str(make_mpirun(tmp_path, said))
    command = [program, *given, sys.executable]
    hub._pass_on(command, is_in_script=False)
    added = [word for name in NAMES for word in ("-x", name)] if is_changed else []
    assert command == [program, *added, *given, sys.executable]


@WAYS_OF_NAMING
def test_open_mpi_in_a_script_gets_names_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, given: list[str], is_changed: bool
) -> None:
    make_mpirun(tmp_path, said)
    monkeypatch.setenv("PATH", path := f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("ZEROTOP_PASS_ON", "")
    command = ["sh", "-c", f"mpirun {shlex.join(given)} 'a  b*'"]
    hub._pass_on(command, is_in_script=True)
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0] == path, "what the job starts finds the true program"
    added = {"-x", *NAMES} if is_changed else set()
    assert set(shown[1:]) == {*added, *given, "a  b*"}
    assert shown[len(shown) - 1 - len(given) :] == [*given, "a  b*"]


def test_a_python_program_on_a_ray_cluster_gives_its_workers_what_is_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, in_folder = ["python3", "train.py"], {"RAY_TMPDIR": str(tmp_path)}
    assert not ray_cluster.is_for_cluster(python, in_folder)
    (tmp_path / "ray" / "ray_current_cluster").mkdir(parents=True)
    assert all(ray_cluster.is_for_cluster(python, one) for one in (in_folder, {"RAY_ADDRESS": "auto"}))
    for command, variables in (
        (python, in_folder | {"RAY_ADDRESS": "local"}),
        (python, {"RAY_ADDRESS": "auto", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}),
        (["torchrun", "train.py"], {"RAY_ADDRESS": "auto"}),
    ):
        assert not ray_cluster.is_for_cluster(command, variables), (command, variables)

    monkeypatch.setattr(os, "environ", os.environ | {"ZEROTOP_TOKEN": "secret", NODES_VARIABLE: "plan"})
    ray_cluster.pass_on("/recordings/run1", [NODES_VARIABLE, "PYTHONZEROTOP_NOTHING"])
    variables = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]["env_vars"]
    assert variables.pop("PYTHONPATH").endswith("bootstrap:${PYTHONPATH}")
    assert variables == {directory.SESSION_VARIABLE: "/recordings/run1", NODES_VARIABLE: "plan"}
