"""Attaching to a job of two nodes: namespaces that meet in the network only, each with an sshd, and files in common."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import nodes
from agents import wait_for
from loop_runs import LOOPS
from node_jobs import PORT, Zerotop, attach_zerotop, find_first_pid, list_samplers, start_rank_on, wait_for_both
from nodes import Cluster, start_command, wait_for_exit
from programs import ZEROTOP, make_environment
from rank_recordings import Rank
from real_jobs import TIMEOUT_S
from real_jobs import make_environment as job_environment
from zerotop.analysis.live_view import JobState
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording.directory import SESSION_FILE

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(bool(nodes.explain_missing_nodes()), reason=nodes.explain_missing_nodes() or "-"),
]

OPTIONS = ("--stage", "3", "--offload")


def start_training(cluster: Cluster, folder: Path, stack: ExitStack, *options: str) -> list[subprocess.Popen[bytes]]:
    """A job of one rank on each node, as DeepSpeed's launcher starts it through pdsh."""
    world = json.dumps({node.name: [0] for node in cluster.nodes})
    told = ["--world_info", base64.urlsafe_b64encode(world.encode()).decode(), "--master_port", PORT]
    told += ["--master_addr", cluster.nodes[0].address]
    script = [str(LOOPS / "hand_written.py"), *OPTIONS, *options]
    processes = []
    for number, node in enumerate(cluster.nodes):
        command = [sys.executable, "-m", "deepspeed.launcher.launch", "--node_rank", str(number), *told, *script]
        variables = job_environment() | {"GLOO_SOCKET_IFNAME": "eth0"}
        processes.append(start_command(node, command, folder / f"output{number}", variables))
        stack.callback(processes[-1].wait)
        stack.callback(processes[-1].kill)
        stack.callback(node.run_command, "pkill", "-KILL", "-f", "hand_written.py")
    return processes


@contextmanager
def train_until_done(cluster: Cluster, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A job that trains until the test is done with it, and then ends by itself."""
    with ExitStack() as stack:
        processes = start_training(
            cluster, folder, stack, "--steps", "20000", "--pause", "0.05", "--until", str(folder / "done")
        )
        yield processes
        assert [process.poll() for process in processes] == [None, None]
        (folder / "done").touch()
        assert [wait_for_exit(process, TIMEOUT_S) for process in processes] == [0, 0]


def count_written(recording: Path, pattern: str) -> int:
    """Bytes in these files."""
    return sum(path.stat().st_size for path in recording.glob(pattern))


def read_counted(folder: Path, number: int) -> dict[str, object]:
    """Return a rank's own counts."""
    lines = (folder / f"output{number}").read_text(errors="replace").splitlines()
    return dict(json.loads(next(line for line in lines if line.startswith("COUNTED "))[8:]))


def wait_until_entered(recording: Path, count: int) -> None:
    """Waits until both ranks have recorded for a while, in so many files."""

    def read_sizes(number: int) -> list[int]:
        return [path.stat().st_size for path in recording.glob(f"spans-rank{number}-*")]

    wait_for(lambda: all(sum(size > 5000 for size in read_sizes(number)) == count for number in (0, 1)), 60.0)


def trains_alike_alone(cluster: Cluster, folder: Path) -> bool:
    """Whether a job that nobody attaches to has the losses in as many steps, and the weights and classes at the end."""
    own = [read_counted(folder, number) for number in (0, 1)]
    alone = folder / "alone"
    alone.mkdir()
    with ExitStack() as stack:
        processes = start_training(cluster, alone, stack, "--steps", str(own[0]["global_steps"]))
        assert [wait_for_exit(process, TIMEOUT_S) for process in processes] == [0, 0]
    names = ("losses", "weights", "strange_methods")
    others = [read_counted(alone, number) for number in (0, 1)]
    return all(here[name] == there[name] for here, there in zip(own, others, strict=True) for name in names)


def test_both_nodes_of_a_deepspeed_job_are_entered_recorded_in_one_recording_and_left(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    recording = tmp_path / "recording"
    with train_until_done(cluster, tmp_path) as processes:
        with attach_zerotop(
            call_zerotop, cluster, tmp_path, "--hosts", "job", "--enter", "--recording", str(recording)
        ) as messages:
            while messages[:-1]:
                assert [process.poll() for process in processes] == [None, None], messages
                messages = call_zerotop("attach", str(recording), "--hosts", "job", "--enter").stderr.splitlines()
            wait_for(lambda: all(count_written(recording, f"spans-rank{n}-zt_node_{n + 1}-*") > 5000 for n in (0, 1)), 60.0)
            assert [list_samplers(node).count(str(recording)) for node in cluster.nodes] == [1, 1]
            assert "sshd: root" not in cluster.nodes[1].run_command("ps", "-eo", "args").stdout
            done = call_zerotop("detach", str(recording))
        assert done.returncode == 0, done.stderr + done.stdout
        assert "on zt-node-2" in done.stdout
        wait_for(lambda: [list_samplers(node) for node in cluster.nodes] == ["", ""])
    for number in (0, 1):
        rank, own = Rank(recording, number), read_counted(tmp_path, number)
        assert not rank.find_events("probe_error")
        assert len(rank.find_events("entered")) == len(rank.find_events("left")) == 1
        steps = rank.select_phases("step")["step"]
        assert len(steps) > 3
        assert steps.tolist() == list(range(int(steps[0]), int(steps[0]) + len(steps)))
        assert int(steps[-1]) < int(str(own["global_steps"]))
    assert trains_alike_alone(cluster, tmp_path)
    recorded = Recording.open(recording)
    assert recorded.is_over
    view = RecordingSource(recorded).view_at(None)
    assert [(rank.rank, rank.host) for rank in view.ranks] == [(0, "zt_node_1"), (1, "zt_node_2")]
    assert np.isfinite([rank.cores_used for rank in view.ranks]).all()
    assert [host.name for host in view.hosts] == ["zt_node_1", "zt_node_2"]


def test_a_job_of_two_nodes_that_is_entered_left_and_entered_again_trains_as_if_alone(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    recording = None
    with train_until_done(cluster, tmp_path) as processes:
        for count in (1, 2):
            with attach_zerotop(
                call_zerotop, cluster, tmp_path, "--hosts", "job", "--enter", recording=recording
            ) as messages:
                (recording,) = tmp_path.glob("zerotop/sessions/*")
                while messages[:-1]:
                    assert [process.poll() for process in processes] == [None, None], messages
                    messages = call_zerotop("attach", recording.name, "--hosts", "job", "--enter").stderr.splitlines()
                wait_until_entered(recording, count)
                again = call_zerotop("attach", recording.name, "--hosts", "job", "--enter")
                assert again.stderr == "zerotop: The live screen needs a terminal; --headless records without one\n"
                assert [list_samplers(node).count("--watch") for node in cluster.nodes] == [1, 1]
                assert [len(list(recording.glob(f"spans-rank{number}-*"))) for number in (0, 1)] == [count, count]
    assert recording is not None
    names = [event.event_name for event in Recording.open(recording).events]
    said = [name for name in names if name in ("entered", "left", "probe_error")]
    assert sorted(said) == ["entered"] * 4 + ["left"] * 4
    assert trains_alike_alone(cluster, tmp_path)


@pytest.mark.usefixtures("cluster_job")
def test_the_other_node_is_sampled_until_it_is_detached_from_and_taken_up_again(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    recording = None
    for _ in range(2):
        with attach_zerotop(
            call_zerotop, cluster, tmp_path, "--hosts", "zt-node-1,zt-node-2", recording=recording
        ) as messages:
            (recording,) = (tmp_path / "zerotop" / "sessions").iterdir()
            assert messages == [f"recording in {recording}"]
            wait_for_both(recording)
            again = call_zerotop("attach", recording.name, "--hosts", "zt-node-2")
            assert again.stderr == "zerotop: The live screen needs a terminal; --headless records without one\n"
            assert [list_samplers(node).count("--watch") for node in cluster.nodes] == [1, 1]
            done = call_zerotop("detach", recording.name)
            assert (done.returncode, done.stdout) == (0, f"Recorded in {recording}\n")
            wait_for(lambda: [list_samplers(node) for node in cluster.nodes] == ["", ""])
            assert not list(recording.glob("shared-*"))


@pytest.mark.usefixtures("cluster_job")
def test_ranks_that_have_no_deepspeed_are_named_with_their_node(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# ours\nzt-node-1 slots=1\n\nzt-node-2 slots=1\n")
    with attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", f"@{hostfile}", "--enter") as messages:
        early = "entered: it has not imported PyTorch yet. Try again when it trains."
        assert messages[:2] == [f"Rank 0 is not {early}", f"Rank 1 on zt-node-2 is not {early}"]

        call = "import sys; from pathlib import Path; from zerotop.commands.job.controller import JobController as Job; "
        call += "print(Job(Path(sys.argv[1])).enter_ranks())"
        recording = messages[-1].partition("recording in ")[2]
        pressed = cluster.nodes[0].run_command(
            sys.executable, "-c", call, recording, env=make_environment(tmp_path, ZEROTOP_SSH=cluster.ssh)
        )
        assert pressed.stdout == f"Rank 0 is not {early} Rank 1 on zt-node-2 is not {early}\n"


def test_the_end_of_one_node_s_part_is_not_that_of_the_job(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    one, two = cluster.nodes
    with ExitStack() as stack, start_rank_on(one, 0, tmp_path):
        with start_rank_on(two, 1, tmp_path):
            command = one.build_command(
                *ZEROTOP, "attach", find_first_pid(call_zerotop), "--hosts", "zt-node-2", "--headless"
            )
            process = stack.enter_context(subprocess.Popen(command, env=make_environment(tmp_path, ZEROTOP_SSH=cluster.ssh)))
            stack.callback(process.kill)
            (recording,) = wait_for(lambda: list(tmp_path.glob("zerotop/sessions/*")))
            wait_for(lambda: (recording / SESSION_FILE).exists())
            wait_for_both(recording)
        wait_for(lambda: list_samplers(two) == "")
        recorded = Recording.open(recording)
        assert not recorded.is_over
        assert [event.writer.host for event in recorded.events if event.event_name == "parted"] == ["zt_node_2"]

        def list_alive() -> list[int]:
            return [rank.rank for rank in RecordingSource(Recording.open(recording)).view_at(None).ranks if rank.alive]

        wait_for(lambda: list_alive() == [0])
        assert RecordingSource(Recording.open(recording)).view_at(None).job.state is JobState.RUNNING
        assert process.poll() is None
        one.run_command("pkill", "-KILL", "-f", "time.sleep.0.01")
        assert process.wait(30) == 0
    ended_recording = Recording.open(recording)
    assert ended_recording.is_over
    assert RecordingSource(ended_recording).view_at(None).job.state is JobState.ENDED


@pytest.mark.usefixtures("cluster_job")
def test_a_node_that_is_not_reached_any_more_is_detached_from_later(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> None:
    one, two = cluster.nodes
    with attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as messages:
        recording = messages[-1].partition("recording in ")[2]
        two.run_command("ip", "link", "set", "eth0", "down", check=True)
        done = call_zerotop("detach", recording)
        assert done.returncode == 1
        assert "zt-node-2 is not detached: ssh cannot connect" in done.stdout
        assert [bool(list_samplers(node)) for node in (one, two)] == [False, True]
        two.run_command("ip", "link", "set", "eth0", "up", check=True)
        done = call_zerotop("detach", recording)
        assert (done.returncode, done.stdout) == (0, f"Recorded in {recording}\n")
        wait_for(lambda: list_samplers(two) == "")  # its process ends a moment after the recording


def test_nodes_of_no_job(call_zerotop: Zerotop) -> None:
    done = call_zerotop("attach", "--hosts", "zt-node-2")
    assert done.returncode == 2
    assert "--hosts needs a PID or RECORDING" in done.stderr
