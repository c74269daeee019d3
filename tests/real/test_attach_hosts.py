"""Attaching to a job of two nodes: namespaces that meet in the network only, each with an sshd, and files in common."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import nodes
import zerotop_probe
from agents import wait_for
from loop_runs import LOOPS, run
from nodes import Cluster, Node, ended, started
from programs import ZEROTOP, environment
from rank_recordings import Rank
from real_jobs import TIMEOUT_S
from real_jobs import environment as job_environment
from zerotop.analysis.source import RecordingSource
from zerotop.analysis.view import State
from zerotop.session.reader import Session
from zerotop_probe.recording.directory import SESSION_FILE

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not() or "-"),
]

BUSY = "import time\nwhile True: time.sleep(0.01)"
PORT = "29571"

Zerotop = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with nodes.two_nodes(tmp_path_factory.mktemp("cluster")) as both:
        yield both


@pytest.fixture
def zerotop(cluster: Cluster, tmp_path: Path) -> Zerotop:
    """The program on the first node."""

    def call(*arguments: str, node: Node = cluster.nodes[0], **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"ZEROTOP_SSH": cluster.ssh} | variables
        done = node.run(*ZEROTOP, *arguments, env=environment(tmp_path, **variables))
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


@contextmanager
def rank_on(node: Node, number: int, folder: Path, **told: str) -> Iterator[None]:
    """A rank that was started by hand, and only waits."""
    meeting = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "10.231.77.1", "MASTER_PORT": PORT} | told
    process = started(node, [sys.executable, "-c", BUSY], folder / f"rank{number}", environment(folder, **meeting))
    try:
        yield
    finally:
        node.run("pkill", "-KILL", "-f", "time.sleep.0.01")
        process.wait(30)


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """A rank on each node."""
    with rank_on(cluster.nodes[0], 0, tmp_path), rank_on(cluster.nodes[1], 1, tmp_path):
        yield


@contextmanager
def hidden(node: Node, folder: Path) -> Iterator[None]:
    """An empty folder of the node's own lies over this one."""
    node.run("mount", "-t", "tmpfs", "none", str(folder), check=True)
    try:
        yield
    finally:
        node.run("umount", str(folder), check=True)


def first_pid(zerotop: Zerotop) -> str:
    """A process of the only job on the first node."""
    found = wait_for(lambda: json.loads(zerotop("attach", "--json").stdout))
    assert len(found) == 1, (found, zerotop("attach").stdout)
    found = found[0]
    return str(found["pid"])


@contextmanager
def attached(
    zerotop: Zerotop,
    cluster: Cluster,
    folder: Path,
    *options: str,
    program: Sequence[str] = ZEROTOP,
    session: Path | None = None,
) -> Iterator[list[str]]:
    """``zerotop attach`` on the first node without a screen, until it has said all that it has to say: that."""
    what = first_pid(zerotop) if session is None else session.name
    command = cluster.nodes[0].command(*program, "attach", what, *options, "--headless")
    variables = environment(folder, ZEROTOP_SSH=cluster.ssh)
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = []
        for line in process.stderr:
            told.append(line.removeprefix("zerotop: ").strip())
            if told[-1].startswith("recording in "):
                break
        try:
            yield told
        finally:
            zerotop("detach", told[-1].partition("recording in ")[2])
            process.wait(60)


def samplers(node: Node) -> str:
    """The command lines of zerotop's processes on a node."""
    return "\n".join(line for line in node.run("ps", "-ww", "-eo", "args").stdout.splitlines() if "--daemon" in line)


def wait_for_both(session: Path) -> None:
    """Waits until processes of both nodes were sampled."""

    def hosts() -> set[str]:
        return {source.host for source in Session.open(session).sources["processes"] if len(source.array)}

    wait_for(lambda: hosts() == {"zt_node_1", "zt_node_2"})


@pytest.fixture(scope="module")
def _operators_are_built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """See test_attach.py."""
    run("hand_written", tmp_path_factory.mktemp("built"), "--torch-adam", "--steps", "1", session=Path(), bootstrap=False)


def train(cluster: Cluster, folder: Path, stack: ExitStack) -> list[subprocess.Popen[bytes]]:
    """A job of one rank on each node, as DeepSpeed's launcher starts it through pdsh."""
    world = json.dumps({node.name: [0] for node in cluster.nodes})
    told = ["--world_info", base64.urlsafe_b64encode(world.encode()).decode(), "--master_port", PORT]
    told += ["--master_addr", cluster.nodes[0].address]
    script = [str(LOOPS / "hand_written.py"), "--torch-adam", "--stage", "3", "--steps", "1500"]
    processes = []
    for number, node in enumerate(cluster.nodes):
        command = [sys.executable, "-m", "deepspeed.launcher.launch", "--node_rank", str(number), *told, *script]
        variables = job_environment() | {"GLOO_SOCKET_IFNAME": "eth0"}
        processes.append(started(node, command, folder / f"output{number}", variables))
        stack.callback(processes[-1].wait)
        stack.callback(processes[-1].kill)
        stack.callback(node.run, "pkill", "-KILL", "-f", "hand_written.py")
    return processes


def written(session: Path, pattern: str) -> int:
    """Bytes in these files."""
    return sum(path.stat().st_size for path in session.glob(pattern))


def counted(folder: Path, number: int) -> dict[str, object]:
    """What a rank counted itself."""
    lines = (folder / f"output{number}").read_text(errors="replace").splitlines()
    return dict(json.loads(next(line for line in lines if line.startswith("COUNTED "))[8:]))


@pytest.mark.usefixtures("_operators_are_built")
def test_both_nodes_of_a_deepspeed_job_are_entered_recorded_in_one_session_and_left(
    cluster: Cluster, zerotop: Zerotop, tmp_path: Path
) -> None:
    session = tmp_path / "session"
    with ExitStack() as stack:
        processes = train(cluster, tmp_path, stack)
        with attached(zerotop, cluster, tmp_path, "--hosts", "job", "--enter", "--session", str(session)) as told:
            while told[:-1]:
                assert [process.poll() for process in processes] == [None, None], told
                told = zerotop("attach", str(session), "--hosts", "job", "--enter").stderr.splitlines()
            wait_for(lambda: all(written(session, f"spans-rank{n}-zt_node_{n + 1}-*") > 5000 for n in (0, 1)), 60.0)
            assert [samplers(node).count(str(session)) for node in cluster.nodes] == [1, 1]
            assert "sshd: root" not in cluster.nodes[1].run("ps", "-eo", "args").stdout
            done = zerotop("detach", str(session))
        assert done.returncode == 0, done.stderr + done.stdout
        assert "on zt-node-2" in done.stdout
        assert [samplers(node) for node in cluster.nodes] == ["", ""]
        assert [process.poll() for process in processes] == [None, None]
        assert [ended(process, TIMEOUT_S) for process in processes] == [0, 0]
    for number in (0, 1):
        rank, own = Rank(session, number), counted(tmp_path, number)
        assert not rank.event("probe_error")
        assert len(rank.event("entered")) == len(rank.event("left")) == 1
        steps = rank.phase("step")["step"]
        assert len(steps) > 3
        assert steps.tolist() == list(range(int(steps[0]), int(steps[0]) + len(steps)))
        assert int(steps[-1]) < int(str(own["global_steps"]))
    recorded = Session.open(session)
    assert recorded.over
    view = RecordingSource(recorded).view(None)
    assert [(rank.rank, rank.host) for rank in view.ranks] == [(0, "zt_node_1"), (1, "zt_node_2")]
    assert np.isfinite([rank.cores_used for rank in view.ranks]).all()
    assert [host.name for host in view.hosts] == ["zt_node_1", "zt_node_2"]


@pytest.mark.usefixtures("job")
def test_the_other_node_is_sampled_until_it_is_detached_from_and_taken_up_again(
    cluster: Cluster, zerotop: Zerotop, tmp_path: Path
) -> None:
    session = None
    for _ in range(2):
        with attached(zerotop, cluster, tmp_path, "--hosts", "zt-node-1,zt-node-2", session=session) as told:
            (session,) = (tmp_path / "zerotop" / "sessions").iterdir()
            assert told == [f"recording in {session}"]
            wait_for_both(session)
            again = zerotop("attach", session.name, "--hosts", "zt-node-2")
            assert again.stderr == "zerotop: The live screen needs a terminal; --headless records without one\n"
            assert [samplers(node).count("--watch") for node in cluster.nodes] == [1, 1]
            done = zerotop("detach", session.name)
            assert (done.returncode, done.stdout) == (0, f"Recorded in {session}\n")
            assert [samplers(node) for node in cluster.nodes] == ["", ""]
            assert not list(session.glob("shared-*"))


@pytest.mark.usefixtures("job")
def test_ranks_that_have_no_deepspeed_are_named_with_their_node(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# ours\nzt-node-1 slots=1\n\nzt-node-2 slots=1\n")
    with attached(zerotop, cluster, tmp_path, "--hosts", f"@{hostfile}", "--enter") as told:
        early = "entered: it has not imported DeepSpeed yet: ask again when it trains."
        assert told[:2] == [f"Rank 0 is not {early}", f"Rank 1 on zt-node-2 is not {early}"]


        call = "import sys; from pathlib import Path; from zerotop.commands.controller import JobController as Job; "
        call += "print(Job(Path(sys.argv[1])).enter())"
        session = told[-1].partition("recording in ")[2]
        pressed = cluster.nodes[0].run(
            sys.executable, "-c", call, session, env=environment(tmp_path, ZEROTOP_SSH=cluster.ssh)
        )
        assert pressed.stdout == f"Rank 0 is not {early} Rank 1 on zt-node-2 is not {early}\n"


def test_the_end_of_one_node_s_part_is_not_that_of_the_job(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    one, two = cluster.nodes
    with ExitStack() as stack, rank_on(one, 0, tmp_path):
        with rank_on(two, 1, tmp_path):
            command = one.command(*ZEROTOP, "attach", first_pid(zerotop), "--hosts", "zt-node-2", "--headless")
            process = stack.enter_context(subprocess.Popen(command, env=environment(tmp_path, ZEROTOP_SSH=cluster.ssh)))
            stack.callback(process.kill)
            (session,) = wait_for(lambda: list(tmp_path.glob("zerotop/sessions/*")))
            wait_for(lambda: (session / SESSION_FILE).exists())
            wait_for_both(session)
        wait_for(lambda: samplers(two) == "")
        recorded = Session.open(session)
        assert not recorded.over
        assert [event.host for event in recorded.events if event.name == "parted"] == ["zt_node_2"]

        def alive() -> list[int]:
            return [rank.rank for rank in RecordingSource(Session.open(session)).view(None).ranks if rank.alive]

        wait_for(lambda: alive() == [0])
        assert RecordingSource(Session.open(session)).view(None).job.state is State.RUNNING
        assert process.poll() is None
        one.run("pkill", "-KILL", "-f", "time.sleep.0.01")
        assert process.wait(30) == 0
    ended_session = Session.open(session)
    assert ended_session.over
    assert RecordingSource(ended_session).view(None).job.state is State.ENDED


@pytest.mark.usefixtures("job")
def test_a_node_that_is_not_reached_any_more_is_detached_from_later(
    cluster: Cluster, zerotop: Zerotop, tmp_path: Path
) -> None:
    one, two = cluster.nodes
    with attached(zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as told:
        session = told[-1].partition("recording in ")[2]
        two.run("ip", "link", "set", "eth0", "down", check=True)
        done = zerotop("detach", session)
        assert done.returncode == 1
        assert "zt-node-2 is not detached: ssh does not reach it" in done.stdout
        assert [bool(samplers(node)) for node in (one, two)] == [False, True]
        two.run("ip", "link", "set", "eth0", "up", check=True)
        done = zerotop("detach", session)
        assert (done.returncode, done.stdout) == (0, f"Recorded in {session}\n")
        assert samplers(two) == ""


def test_nodes_of_no_job(zerotop: Zerotop) -> None:
    done = zerotop("attach", "--hosts", "zt-node-2")
    assert done.returncode == 2
    assert "Name a job of this node" in done.stderr


@pytest.mark.usefixtures("job")
def test_nodes_that_cannot_take_part_are_told_in_a_sentence_and_the_others_go_on(
    cluster: Cluster, zerotop: Zerotop, tmp_path: Path
) -> None:
    two = cluster.nodes[1]
    settings = Path(cluster.folder / "ssh_config")
    lost = "Host silent\n  HostName 10.231.77.99\n  ConnectTimeout 1\n"
    refused = f"Host refused\n  HostName {two.address}\n  Port 23\n"
    stranger = f"Host stranger\n  HostName {two.address}\n  UserKnownHostsFile none\n"
    locked = f"Host locked\n  HostName {two.address}\n  User root\n  UserKnownHostsFile {cluster.folder}/known\n"
    odd = tmp_path / "ssh_config"
    odd.write_text(lost + refused + stranger + locked + settings.read_text())
    ssh = ("--ssh", f"ssh -F {odd}")
    names = "refused,stranger,locked,zt-node-2,silent"
    with attached(zerotop, cluster, tmp_path, *ssh, "--hosts", names) as told:
        (session,) = (tmp_path / "zerotop" / "sessions").iterdir()
        assert told[0].startswith("refused takes no part: ssh does not reach it (connect to host 10.231.77.2 port 23: ")
        assert told[1] == (
            "stranger takes no part: ssh does not know its host key: connect once by hand, and accept it."
        )
        assert told[2].startswith("locked takes no part: ssh is not let in without a password (")
        assert told[3].startswith("silent takes no part: ssh does not reach it (connect to host 10.231.77.99 port 22: ")
        assert len(told) == 5
        wait_for_both(session)
        notices = RecordingSource(Session.open(session)).view(None).job.notices
        assert [line in notices for line in told[:4]] == [True] * 4


@pytest.mark.usefixtures("job")
def test_a_folder_that_is_not_shared(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    state = tmp_path / "zerotop"
    state.mkdir()
    with (
        hidden(cluster.nodes[1], state),
        attached(zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as told,
    ):
        assert "takes no part: it does not see the recording's folder" in told[0]
        assert "choose such a one with --session" in told[0]
        assert samplers(cluster.nodes[1]) == ""


@pytest.mark.usefixtures("job")
def test_a_node_without_zerotop(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    package = Path(zerotop_probe.__file__).parent / "outside" / "attaching"
    with (
        hidden(cluster.nodes[1], package),
        attached(zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as told,
    ):
        assert told[0] == (
            f"zt-node-2 takes no part: there is neither {sys.executable} with zerotop nor a zerotop on the PATH there."
        )


@pytest.mark.usefixtures("job")
def test_zerotop_at_another_place_is_found_by_the_path(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    one, two = cluster.nodes
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "bin").mkdir(parents=True)
    with hidden(one, elsewhere):
        prefix = Path(sys.executable).parent.parent
        for name in ("lib", "pyvenv.cfg"):
            if (prefix / name).exists():
                one.run("ln", "-s", str(prefix / name), str(elsewhere / name), check=True)
        one.run("mkdir", str(elsewhere / "bin"), check=True)
        python = elsewhere / "bin" / "python"
        one.run("ln", "-s", os.path.realpath(sys.executable), str(python), check=True)
        program = tmp_path / "program"
        program.write_text(f'#!/bin/sh\ntouch {tmp_path}/asked\nexec {sys.executable} -m zerotop "$@"\n')
        program.chmod(0o755)
        with bound(two, program, Path("/usr/bin/zerotop")):
            options = ("--hosts", "zt-node-2", "--session", f"{tmp_path}/session")
            with attached(zerotop, cluster, tmp_path, *options, program=[str(python), "-m", "zerotop"]) as told:
                assert told == [f"recording in {tmp_path}/session"]
                assert (tmp_path / "asked").exists()
                wait_for_both(tmp_path / "session")
    assert samplers(two) == ""


@contextmanager
def bound(node: Node, file: Path, place: Path) -> Iterator[None]:
    """A node has this file at that place too, in a folder of programs."""
    lower = f"lowerdir={_alone(file, place.name)}:{place.parent}"
    node.run("mount", "-t", "overlay", "none", "-o", lower, str(place.parent), check=True)
    assert node.run("test", "-x", str(place)).returncode == 0
    try:
        yield
    finally:
        node.run("umount", "--lazy", str(place.parent), check=True)


def _alone(file: Path, name: str) -> Path:
    folder = file.parent / "alone"
    folder.mkdir()
    shutil.copy(file, folder / name)
    return folder


@pytest.mark.parametrize("address", ["127.0.0.1", "10.231.77.1"])
def test_another_job_that_meets_at_the_same_port_is_not_taken_for_this_one(
    cluster: Cluster, zerotop: Zerotop, tmp_path: Path, address: str
) -> None:
    one, two = cluster.nodes
    with rank_on(one, 0, tmp_path, MASTER_ADDR=address), rank_on(two, 0, tmp_path, MASTER_ADDR=address):  # noqa: SIM117
        with attached(zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as told:
            assert told[0] == "zt-node-2 takes no part: no rank of this job runs there."
    assert samplers(two) == ""


@pytest.mark.usefixtures("job")
def test_another_format_of_recordings_is_said(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    two = cluster.nodes[1]
    with attached(zerotop, cluster, tmp_path) as told:
        session = told[-1].partition("recording in ")[2]
        assert (Path(session) / SESSION_FILE).exists()
        request = {"from": ["elsewhere", ""], "format": [99, 0], "session": session, "action": "join"}
        done = two.run(*ZEROTOP, "attach", "--there", json.dumps(request), env=environment(tmp_path))
    answer = json.loads(done.stdout)["zerotop_there"]
    assert "zerotop there records in format 1." in answer["why_not"]
    assert "this session is of 99.0: install the same version on both" in answer["why_not"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("-oProxyCommand=touch bad", "'-oProxyCommand=touch bad' is no name of a node"),
        ("zt-node-2;touch bad", "'zt-node-2;touch bad' is no name of a node"),
        (",", "No node is named"),
        ("@nowhere", "No such file or directory: nowhere"),
    ],
)
@pytest.mark.usefixtures("job")
def test_what_names_no_nodes(zerotop: Zerotop, tmp_path: Path, names: str, said: str) -> None:
    done = zerotop("attach", first_pid(zerotop), f"--hosts={names}", "--headless")
    assert done.returncode in (1, 2)
    assert done.stderr == f"zerotop: {said}\n"
    assert not (tmp_path / "zerotop").exists()


@pytest.mark.usefixtures("job")
def test_a_launcher_that_names_no_nodes_and_an_ssh_that_is_none(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    with attached(zerotop, cluster, tmp_path, "--hosts", "job") as told:
        assert told[0] == (
            "The job's launcher does not say which nodes it runs on: name them, or @FILE for a hostfile."
        )
        (session,) = (tmp_path / "zerotop" / "sessions").iterdir()
        said = zerotop("attach", session.name, "--hosts", "zt-node-2", "--ssh", "no-such-ssh").stderr.splitlines()
        assert said[0] == (
            "zerotop: no-such-ssh cannot be executed (No such file or directory): name another with --ssh or ZEROTOP_SSH."
        )


def test_a_job_of_one_node_asks_no_other(cluster: Cluster, zerotop: Zerotop, tmp_path: Path) -> None:
    with (
        rank_on(cluster.nodes[0], 0, tmp_path, WORLD_SIZE="1"),
        attached(zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as told,
    ):
        assert told[0] == "All ranks of the job run on this node: no other one was asked."
