"""Which nodes are meant, which ranks there are of the same job, and what is made of what ssh says."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotop_probe.outside.attaching import hostfile, ssh
from zerotop_probe.outside.attaching.found_ranks import FoundRank
from zerotop_probe.outside.attaching.jobs import FoundJob
from zerotop_probe.outside.attaching.rendezvous import Rendezvous, find_local_part
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import clock
from zerotop_probe.recording.tables import FORMAT_MAJOR, FORMAT_MINOR

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}


def make_job(*ranks: int, pid: int = 1, **environment: str) -> FoundJob:
    """One whose ranks have these numbers."""
    members = tuple(FoundRank(ProcessHandle(pid + number, 1), number, environment) for number in ranks)
    return FoundJob(members[0].process, "torchrun", (), members, 0.0)


def make_rendezvous(*ranks: int, **environment: str) -> Rendezvous:
    rendezvous = Rendezvous.from_job(make_job(*ranks, **environment))  # type: ignore[arg-type]
    assert rendezvous is not None
    return rendezvous


def test_ranks_of_one_job_meet_from_two_nodes() -> None:
    one, two = make_rendezvous(0, 1, **TORCHRUN), make_rendezvous(2, 3, **TORCHRUN)
    assert one.is_same_job(two)
    assert two.is_same_job(one)
    assert Rendezvous.from_json(json.loads(json.dumps(two.to_json()))) == two
    assert not one.is_complete
    assert make_rendezvous(0, 1, 2, 3, **TORCHRUN).is_complete


@pytest.mark.parametrize(
    "other",
    [
        {"MASTER_PORT": "29501"},
        {"MASTER_ADDR": "node-2"},
        {"WORLD_SIZE": "8"},
        {"TORCHELASTIC_RUN_ID": "night"},
        {"SLURM_JOB_ID": "2"},
    ],
)
def test_ranks_with_another_rendezvous_are_of_another_job(other: dict[str, str]) -> None:
    ours = TORCHRUN | {"TORCHELASTIC_RUN_ID": "day", "SLURM_JOB_ID": "1"}
    assert make_rendezvous(0, 1, **ours).is_same_job(make_rendezvous(2, 3, **ours))
    assert not make_rendezvous(0, 1, **ours).is_same_job(make_rendezvous(2, 3, **ours | other))


def test_jobs_of_one_node_each_that_use_the_same_port_do_not_meet() -> None:
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    assert not make_rendezvous(0, 1, **alone).is_same_job(make_rendezvous(0, 1, **alone))
    # Started by hand, the first node may well have been told the loopback address.
    assert make_rendezvous(0, **alone).is_same_job(make_rendezvous(1, **alone | {"MASTER_ADDR": "node-1"}))


def test_an_address_alone_is_no_meeting() -> None:
    assert not make_rendezvous(0, MASTER_ADDR="node-1").is_same_job(make_rendezvous(1, MASTER_ADDR="node-1"))
    assert Rendezvous.from_job(make_job(0)) is None


def test_the_parts_of_several_launchers_on_a_node_are_one() -> None:
    there = [make_job(3, pid=30, **TORCHRUN), make_job(2, pid=20, **TORCHRUN), make_job(0, pid=10, **TORCHRUN)]
    local_part = find_local_part(there, make_rendezvous(0, 1, **TORCHRUN))
    assert local_part is not None
    assert [rank.rank for rank in local_part.ranks] == [2, 3]
    assert find_local_part(there[2:], make_rendezvous(0, 1, **TORCHRUN)) is None


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "$(a)", "a\nb", "a@-b", "@", "ä"])
def test_invalid_node_names_are_refused(name: str) -> None:
    with pytest.raises(hostfile.NoHosts, match="is not a valid node name"):
        hostfile.parse_names(f"good,{name}")


def test_host_names_are_read_from_options_and_hostfiles(tmp_path: Path) -> None:
    assert hostfile.parse_names(" a.b-c ,me@10.0.0.1,fe80::1%eth0,a.b-c") == ["a.b-c", "me@10.0.0.1", "fe80::1%eth0"]
    path = tmp_path / "hostfile"
    path.write_text("# nodes\nworker-1 slots=4\n\n  worker-2 slots=4 # slow\nworker-1 slots=4\n")
    assert hostfile.read_file(str(path)) == ["worker-1", "worker-2"]
    path.write_text("# none\n")
    with pytest.raises(hostfile.NoHosts, match="is not a valid hostfile"):
        hostfile.read_file(str(path))


def test_the_nodes_that_a_launcher_was_given(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("c slots=1\nd slots=1\n")
    world = base64.urlsafe_b64encode(b'{"a": [0, 1], "b": [0]}').decode()
    wait = "import time; print(flush=True); time.sleep(60)"
    for told, names in (([f"--world_info={world}"], ["a", "b"]), (["--hostfile", "mine"], ["c", "d"]), (["x"], None)):
        with subprocess.Popen([sys.executable, "-c", wait, *told], stdout=subprocess.PIPE, cwd=tmp_path) as launcher:
            assert launcher.stdout is not None
            launcher.stdout.readline()
            process = ProcessHandle.from_pid(launcher.pid)
            assert process is not None
            job = FoundJob(process, "deepspeed", (), (FoundRank(process, 0, {}),), 0.0)
            try:
                if names is None:
                    with pytest.raises(hostfile.NoHosts, match="does not say which nodes"):
                        hostfile.find_job_hosts(job)
                else:
                    assert hostfile.find_job_hosts(job) == names
            finally:
                launcher.kill()


@pytest.fixture
def ask_node(tmp_path: Path) -> Callable[[str], ssh.Answer]:
    """Asks a node by a program that is called as ssh is."""

    def call_program(script: str) -> ssh.Answer:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        request = {"from": [clock.read_hostname(), clock.read_boot_id()], "quotes": "'\"$(exit 1)`\\"}
        asked = ssh.RemoteCalls(["there"], [str(program)], request)
        try:
            (answer,) = asked.collect_answers()
        finally:
            asked.kill_remaining()
        return answer

    return call_program


def test_this_node_knows_itself_under_any_name_whatever_its_shell_prints(ask_node: Callable[[str], ssh.Answer]) -> None:
    answer = ask_node('echo "Welcome!"; printf "{\\"zerotop_there\\""; for last; do :; done; exec "$last"')
    assert answer.said.here
    assert answer.why_not == ""
    assert (answer.said.host, answer.said.format) == (clock.read_hostname(), [FORMAT_MAJOR, FORMAT_MINOR])


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'ssh: connect to host there port 22: No route to host' >&2; exit 255", "ssh cannot connect (connect to"),
        ("echo 'me@there: Permission denied (publickey).' >&2; exit 255", "ssh cannot log in without a password (me@there"),
        ("echo 'Host key verification failed.' >&2; exit 255", "ssh does not know its host key"),
        ("echo 'zerotop: error: unrecognized arguments: --there' >&2; exit 2", "zerotop there is too old"),
        ("echo 'sh: not found' >&2; exit 127", "zerotop failed there (sh: not found)"),
        ("exit 3", "zerotop failed there (no error message)"),
    ],
)
def test_errors_of_ssh_become_sentences(ask_node: Callable[[str], ssh.Answer], script: str, why: str) -> None:
    assert ask_node(script).why_not.startswith(why)


def test_one_that_does_not_answer_is_not_waited_for_without_end(
    ask_node: Callable[[str], ssh.Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "PATIENCE_S", 0.5)
    assert ask_node("exec sleep 60").why_not == "it has not answered within 0 s"


def test_no_such_ssh() -> None:
    with pytest.raises(ssh.NoSsh, match="no-such-ssh cannot be executed"):
        ssh.RemoteCalls(["there"], ["no-such-ssh"], {})
