"""``zerotop run`` on one of several nodes records all of them: real launchers, network namespaces as nodes."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import nodes
import zerotop_probe
from agents import wait_for
from nats_servers import SERVER, make_certificate
from nodes import Node
from nodes_job import NodesJob, start_nodes
from programs import ZEROTOP
from rank_recordings import Rank
from real_jobs import BIN
from slurm_nodes import explain_missing_slurm, start_slurm
from terminals import Terminal
from zerotop.analysis.findings import detect_findings
from zerotop.commands.common.live_recording import RunningRecording
from zerotop.commands.nodes import messages
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

LOOP = Path(__file__).with_name("loops") / "hand_written.py"
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(nodes.explain_missing_nodes()), reason=nodes.explain_missing_nodes() or "-"),
    pytest.mark.skipif(not SERVER, reason="there is no program nats-server"),
]


def require_program(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no program {name}")


def find_server(node: Node) -> int:
    """Return the pid of the server, as this machine counts."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            in_node = os.readlink(path.parent / "ns" / "net") == os.readlink(f"/proc/{node.pid}/ns/net")
            if in_node and os.path.basename(words[0]) == b"nats-server":
                return int(path.parent.name)
    return 0


def count_bytes(folder: Path, node: Node) -> int:
    """Return the bytes that came from a node."""
    host = node.name.replace("-", "_")
    return sum(path.stat().st_size for path in folder.glob(f"*-{host}-*"))


def test_a_deepspeed_job_of_four_nodes_is_one_live_recording_whatever_dies(tmp_path: Path) -> None:
    """By pdsh, without a folder in common. The server is killed, then frozen; at the end a node dies."""
    require_program("pdsh")
    with start_nodes(tmp_path, 4, is_shared=False) as job:
        first, *_, last = job.cluster.nodes
        deepspeed = (str(BIN / "deepspeed"), "--hostfile", str(tmp_path / "hostfile"), str(LOOP), "--steps", "100000")
        process = job.run(*deepspeed, options=("--recording", str(job.recording)))
        try:
            wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(4)))
            token, arguments = job.find_token(), job.list_arguments()
            assert "pdsh -S" in arguments
            assert token not in arguments
            assert not [path for path in job.recording.iterdir() if token.encode() in path.read_bytes()]
            live = RunningRecording.open(job.recording)
            assert live.is_live
            assert sorted({event.writer.host for event in live.events_of(events.Hello)}) == [
                f"zt_node_{n}" for n in range(1, 5)
            ]

            server = find_server(first)
            os.kill(server, signal.SIGKILL)
            wait_for(lambda: find_server(first) not in (0, server), 20)
            os.kill(find_server(first), signal.SIGSTOP)
            wait_for(lambda: len(Recording.open(job.recording).events_of(events.NodeLost)) == 1, 20)
            count = len(job.read_steps(3))
            time.sleep(5)
            os.kill(find_server(first), signal.SIGCONT)
            wait_for(lambda: Recording.open(job.recording).events_of(events.NodeReturned), 30)
            wait_for(lambda: len(job.read_steps(3)) > count + 20, 30)

            begin = time.monotonic()
            job.cluster.cut_off(last)
            last.shut_down()
            wait_for(lambda: "Node zt_node_4 has been silent" in job.output, 20)
            assert time.monotonic() - begin < 10
            recording = Recording.open(job.recording)
            (lost,) = (event for event in recording.events_of(events.NodeLost) if event.host)
            assert lost.host == "zt_node_4"
            found = [one for one in detect_findings(recording, recording.last_written_ns) if one.name == "lost_node"]
            assert found[-1].headline.startswith("Node zt_node_4 has sent nothing for")
            assert found[-1].details.startswith("Last seen in "), found[-1].details
            size = count_bytes(job.recording, job.cluster.nodes[1])
            wait_for(lambda: count_bytes(job.recording, job.cluster.nodes[1]) > size, 10)
        finally:
            first.run_command("pkill", "-INT", "-o", "-f", "run --headless")
        assert process.wait(90) != 0
        for rank in range(4):
            steps = job.read_steps(rank)
            assert steps == list(range(len(steps))), f"rank {rank} has gaps"
        for node in job.cluster.nodes[:3]:
            rest = node.run_command("sh", "-c", f"ls {tmp_path}/state; ps -ww -eo args | grep -c [n]ats").stdout.split()
            assert rest == (["recording", "0"] if node is first else ["0"]), job.output[-3000:]
    assert "Node zt_node_4 has not sent the end of its part" in job.output
    assert not json.loads((job.recording / "session.json").read_text()).get("collected")


LOCAL_LOOP = """\
import os, sys, time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not os.path.exists(sys.argv[-1]):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""


def write_loop(folder: Path) -> list[str]:
    """Return the command of a rank that trains by itself until a file is there."""
    (folder / "loop.py").write_text(LOCAL_LOOP)
    return [sys.executable, str(folder / "loop.py"), str(folder / "until")]


def build_mpich(job: NodesJob) -> list[str]:
    """Return the command of a rank on each node, by MPICH."""
    require_program("mpiexec.hydra")
    hosts = ",".join(node.name for node in job.cluster.nodes)
    return ["mpiexec.hydra", "-hosts", hosts, "-ppn", "1", "-n", str(len(job.cluster.nodes)), *write_loop(job.folder)]


def test_the_server_shows_the_sites_certificate(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "site")
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        job.environment |= {"ZEROTOP_TLS_CERT": str(certificate), "ZEROTOP_TLS_KEY": str(key)}
        started = job.run(*build_mpich(job), options=("--recording", str(job.recording)))
        wait_for(lambda: find_server(job.cluster.nodes[0]), 60)
        address = job.read_collector_variable("ZEROTOP_COLLECTOR")
        assert ssl.PEM_cert_to_DER_cert(certificate.read_text()) == base64.urlsafe_b64decode(address.partition("#")[2])
        check_two_nodes(job, started)


def test_a_certificate_that_is_not_fit_is_reported_and_the_job_goes_on(tmp_path: Path) -> None:
    """Nothing is sent without it: whoever names one wants no open connection."""
    certificate, _ = make_certificate(tmp_path, "site")
    _, key = make_certificate(tmp_path, "other")
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        job.environment |= {"ZEROTOP_TLS_CERT": str(certificate), "ZEROTOP_TLS_KEY": str(key)}
        started = job.run(*build_mpich(job), options=("--recording", str(job.recording)))
        wait_for(lambda: len(job.read_steps(0)) > 20, 60)
        job.until.touch()
        assert started.wait(60) == 0, job.output
    assert f"since {certificate} and {key} are not a certificate and its key without a password" in job.output


@pytest.mark.parametrize("kind", ["openmpi", "openmpi -x", "openmpi -x in a script", "mpich", "mpich in a script"])
def test_ranks_that_mpirun_starts_on_two_nodes_are_one_recording(tmp_path: Path, kind: str) -> None:
    program = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}[kind.split()[0]]
    require_program(program)
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        hosts = ",".join(node.name for node in job.cluster.nodes)
        base = ["--allow-run-as-root", "--mca", "oob_tcp_if_include", "eth0"]
        options = {
            "openmpi": [*base, "--host", hosts, "-np", "2"],
            "openmpi -x": [*base, "-x", "HOME", "-H", hosts, "-n", "2"],
            "mpich": ["-hosts", hosts, "-ppn", "1", "-n", "2"],
        }
        command = [program, *options[kind.partition(" in ")[0]], *write_loop(tmp_path)]
        if "script" in kind:
            (tmp_path / "start.sh").write_text(f"export HOSTS={hosts}\n{shlex.join(command).replace(hosts, '$HOSTS')}\n")
            command = ["bash", "start.sh"]
        check_two_nodes(job, job.run(*command, options=("--recording", str(job.recording))))


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi"])
def test_deepspeeds_other_launchers_make_one_recording(tmp_path: Path, launcher: str) -> None:
    """Intel MPI's mpirun is MPICH's, Hydra, with other defaults: MPICH's takes its place."""
    program = {"openmpi": "mpirun.openmpi"}.get(launcher, "mpiexec.hydra")
    require_program(program)
    (tmp_path / "bin").mkdir()
    for name, exec_line in (("mpirun", f'exec {program} "$@"'), ("ompi_info", "exit 0")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{exec_line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        job.environment |= {"PATH": f"{tmp_path / 'bin'}:{job.environment['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
        job.environment |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_oob_tcp_if_include": "eth0"}
        (tmp_path / ".deepspeed_env").write_text(f"PATH={job.environment['PATH']}\n")
        words = [str(BIN / "deepspeed"), "--hostfile", str(tmp_path / "hostfile"), "--launcher", launcher]
        started = job.run(*words, *write_loop(tmp_path)[1:], options=("--recording", str(job.recording)))
        check_two_nodes(job, started)


@pytest.mark.skipif(bool(explain_missing_slurm()), reason=explain_missing_slurm() or "-")
def test_ranks_that_srun_starts_on_two_nodes_are_one_recording(tmp_path: Path) -> None:
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        job.environment = start_slurm(job.cluster, tmp_path, job.environment)
        check_two_nodes(
            job, job.run("srun", "-N2", "-n2", *write_loop(tmp_path), options=("--recording", str(job.recording)))
        )


@pytest.mark.skipif(bool(explain_missing_slurm()), reason=explain_missing_slurm() or "-")
def test_one_zerotop_for_each_task_of_srun_makes_one_recording(tmp_path: Path) -> None:
    """The home folder is shared; the second tasks of each node only become their rank."""
    with start_nodes(tmp_path, 2, is_shared=True) as job:
        job.environment = start_slurm(job.cluster, tmp_path, job.environment)
        zerotop = [*ZEROTOP, "run", "--headless", "--recording", str(job.recording), "--"]
        started = job.start("srun", "-N2", "-n4", "--ntasks-per-node=2", *zerotop, *write_loop(tmp_path))
        check_two_nodes(job, started, ranks=4)
        samplers = [path.name for path in job.recording.glob("hosts-node-*.rec")]
        assert sorted(name.split("-")[2] for name in samplers) == ["zt_node_1", "zt_node_2"]
    assert not list((tmp_path / "state" / "zerotop" / "meetings").iterdir())


def build_torchrun(rank: int) -> list[str]:
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "zt-node-1:29400"]
    return [str(BIN / "torchrun"), *meeting]


def build_accelerate(rank: int) -> list[str]:
    machines = ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank), "--mixed_precision", "no"]
    place = ["--main_process_ip", "zt-node-1", "--main_process_port", "29400", "--dynamo_backend", "no"]
    return [str(BIN / "accelerate"), "launch", "--multi_gpu", *machines, *place]


@pytest.mark.parametrize("build", [build_torchrun, build_accelerate])
def test_zerotop_run_typed_on_each_node_makes_one_recording(tmp_path: Path, build: Callable[[int], list[str]]) -> None:
    with start_nodes(tmp_path, 2, is_shared=True) as job:
        rest = write_loop(tmp_path)[1:]
        first = job.run(*build(0), *rest, options=("--job", "llama", "--recording", str(job.recording)))
        wait_for(lambda: list(job.recording.glob("events-node-*")))
        second = job.run(*build(1), *rest, options=("--job", "llama"), node=1)
        check_two_nodes(job, first)
        assert second.wait(60) == 0, job.output
        assert "goes on" not in job.output, "what sends a part is no process of the job"


def check_two_nodes(job: NodesJob, started: subprocess.Popen[bytes], *, ranks: int = 2, has_server: bool = True) -> None:
    """Wait for steps of both nodes' ranks, end them, and check that nothing is missing and no secret was shown."""
    wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(ranks)), 60)
    assert not has_server or job.find_token() not in job.list_arguments()
    job.until.touch()
    assert started.wait(60) == 0, job.output
    assert "eof_received" not in job.output, "Python's own words about nats-py"
    for rank in range(ranks):
        steps = job.read_steps(rank)
        assert steps == list(range(len(steps)))
        assert Rank(job.recording, rank).find_events("goodbye")[0]["step"] == steps[-1]
    recording = Recording.open(job.recording)
    assert {event.writer.host for event in recording.events_of(events.Hello)} == {"zt_node_1", "zt_node_2"}
    assert recording.is_over
    rest = job.cluster.nodes[1].run_command(
        "sh", "-c", f"ls {job.folder}/state | grep @; ps -ww -eo args | grep -c [f]orward"
    )
    assert rest.stdout.split() == ["0"], "its part was sent, and is removed there"


def test_a_sites_own_server_is_used_by_all_nodes_of_a_launcher(tmp_path: Path) -> None:
    """The nodes send to ``zerotop collect``, which runs on another machine than ``zerotop run``; the token comes by ssh."""
    require_program("pdsh")
    with start_nodes(tmp_path, 3, is_shared=False) as job:
        *_, third = job.cluster.nodes
        (tmp_path / "hostfile").write_text("zt-node-1 slots=1\nzt-node-2 slots=1\n")
        (tmp_path / "nats.conf").write_text(f"listen: {third.address}:4222\nauthorization {{ token: $ZEROTOP_TOKEN }}\n")
        job.environment["ZEROTOP_TOKEN"] = token = messages.make_token()
        server = job.start(SERVER, "-c", str(tmp_path / "nats.conf"), node=2)
        address = ("--job", "llama", "--collector", f"nats://{third.address}:4222")
        collect = (*ZEROTOP, "collect", address[3], *address[:2], "--headless", "--recording", str(tmp_path / "collected"))
        collector = job.start(*collect, node=2)
        command = (str(BIN / "deepspeed"), "--hostfile", str(tmp_path / "hostfile"), *write_loop(tmp_path)[1:])
        started = job.run(*command, options=(*address, "--recording", str(job.recording)))
        job.recording = tmp_path / "collected"
        wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(2)), 60)
        assert token not in job.list_arguments()
        job.until.touch()
        assert (started.wait(60), collector.wait(60)) == (0, 0), job.output
        for node in job.cluster.nodes:
            assert not node.run_command("sh", "-c", "ls ~/.local/state/zerotop/keys").stdout
        third.run_command("pkill", "nats-server")
        server.wait(20)
    hosts = {event.writer.host for event in Recording.open(job.recording).events_of(events.Hello)}
    assert hosts == {"zt_node_1", "zt_node_2"}


def test_the_screen_shows_all_nodes_and_stops_them(tmp_path: Path) -> None:
    """MPICH may have ended the other node's rank before the order comes there; all that was recorded there comes anyway."""
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        first = job.cluster.nodes[0]
        enter, *zerotop = first.build_command(*ZEROTOP, "run", "--recording", str(job.recording), "--", *build_mpich(job))
        environment = job.environment | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        screen = Terminal([shutil.which(enter) or enter, *zerotop], environment=environment, folder=tmp_path, rows=40)
        screen.wait_for("ode_1", "ode_2")
        wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(2)), 60)
        screen.type_keys("q")
        screen.wait_for("Stops it gracefully")
        screen.type_keys("s")
        screen.wait_for("The job has ended")
        screen.type_keys("l")
        screen.exit_code()
        screen.close()
        wait_for(lambda: "--beside" not in job.list_arguments(), 40)
        assert "loop.py" not in job.list_arguments()
    recording = Recording.open(job.recording)
    assert "zt_node_1" in {event.writer.host for event in recording.events_of(events.StopSent)}
    for kind in (events.RankGone, events.SamplerEnded):
        assert {event.writer.host for event in recording.events_of(kind)} == {"zt_node_1", "zt_node_2"}
    for rank in range(2):
        assert Rank(job.recording, rank).find_events("goodbye")[0]["step"] == job.read_steps(rank)[-1]


def test_a_run_detaches_from_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        started = job.run(*build_mpich(job), options=("--recording", str(job.recording)))
        wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(2)), 60)
        first = job.cluster.nodes[0]
        said = first.run_command(*ZEROTOP, "detach", str(job.recording), env=job.environment).stdout.splitlines()
        ours, theirs = ([line for line in said if line.startswith(start)] for start in ("Process ", "zt_node_2: Process "))
        assert len(ours) == len(theirs) == 1, said
        assert all("removes the probe" in line or "has removed the probe" in line for line in ours + theirs), said
        job.until.touch()
        assert started.wait(60) == 0, job.output


def test_records_that_a_killed_collector_lacks_are_fetched_afterwards(tmp_path: Path) -> None:
    """The server dies with it, the job goes on, and a sentence says what to do."""
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        first = job.cluster.nodes[0]
        started = job.run(*build_mpich(job), options=("--recording", str(job.recording)))
        wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(2)), 60)
        first.run_command("pkill", "-KILL", "-f", "collect --beside", check=True)
        wait_for(lambda: not find_server(first), 10)
        count = len(job.read_steps(1))  # nothing fetches more of them now
        wait_for(lambda: len(job.read_steps(0)) > count + 20)
        job.until.touch()
        assert started.wait(60) == 0, job.output
        assert "The collector of the other nodes was killed. The rest of their parts is on them" in job.output
        assert len(job.read_steps(1)) == count

        (tmp_path / "nats.conf").write_text(f"listen: {first.address}:4222\nauthorization {{ token: $ZEROTOP_TOKEN }}\n")
        job.environment["ZEROTOP_TOKEN"] = messages.make_token()
        address = ("--collector", f"nats://{first.address}:4222", "--job", "later")
        server = job.start(SERVER, "-c", str(tmp_path / "nats.conf"))
        collect = (*ZEROTOP, "collect", *address[1:], "--headless", "--recording", str(job.recording))
        collector = job.start(*collect)
        part = f"{job.recording}@zt_node_2"
        assert job.start(*ZEROTOP, "forward", part, *address, node=1).wait(60) == 0, job.output
        assert collector.wait(60) == 0, job.output
        first.run_command("pkill", "nats-server")
        server.wait(20)
    steps = job.read_steps(1)
    assert steps == list(range(len(steps)))
    assert Rank(job.recording, 1).find_events("goodbye")[0]["step"] == steps[-1]


def test_a_node_without_zerotop_is_reported_and_the_job_goes_on(tmp_path: Path) -> None:
    """Its ranks run as if nobody watched."""
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        probe = Path(zerotop_probe.__file__).parent
        job.cluster.nodes[1].run_command("mount", "-t", "tmpfs", "none", str(probe), check=True)
        started = job.run(*build_mpich(job), options=("--recording", str(job.recording)))
        wait_for(lambda: len(job.read_steps(0)) > 20, 60)
        job.until.touch()
        assert started.wait(90) == 0, job.output
        assert len(Recording.open(job.recording).events_of(events.Hello)) == 1
    assert "0 of 1 other nodes take part. On the others zerotop must be installed" in job.output


def test_without_a_server_nodes_write_to_the_folder_that_they_share(tmp_path: Path) -> None:
    with start_nodes(tmp_path, 2, is_shared=True) as job:
        for node in job.cluster.nodes:
            node.run_command("mount", "--bind", "/dev/null", SERVER, check=True)
        started = job.run(*build_mpich(job), options=("--recording", str(job.recording)))
        wait_for(lambda: all(len(job.read_steps(rank)) > 20 for rank in range(2)), 60)
        wait_for(lambda: len(list(job.recording.glob("hosts-node-*.rec"))) == 2)
        job.until.touch()
        assert started.wait(60) == 0, job.output
        samplers = [path.name.split("-")[2] for path in job.recording.glob("hosts-node-*.rec")]
        assert sorted(samplers) == ["zt_node_1", "zt_node_2"]
        wait_for(lambda: Recording.open(job.recording).is_over, 20)
    assert "Other nodes use no server, since there is no nats-server on the PATH: install it" in job.output


def test_without_a_server_and_a_shared_folder_nodes_send_their_parts_by_ssh(tmp_path: Path) -> None:
    with start_nodes(tmp_path, 2, is_shared=False) as job:
        for node in job.cluster.nodes:
            node.run_command("mount", "--bind", "/dev/null", SERVER, check=True)
        check_two_nodes(job, job.run(*build_mpich(job), options=("--recording", str(job.recording))), has_server=False)
    assert "and send it by ssh (zt-node-2)" in job.output
