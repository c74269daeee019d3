"""Ray's actors on two nodes become one recording. $ZEROTOP_RAY_PYTHON is a Python that has Ray and PyTorch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nodes
from agents import wait_for
from nats_servers import SERVER
from nodes_job import NodesJob, start_nodes
from programs import ZEROTOP
from rank_recordings import Rank
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

PYTHON = os.environ.get("ZEROTOP_RAY_PYTHON", "")
DRIVER = Path(__file__).with_name("loops") / "ray_driver.py"
TOKEN = "tok-of-the-tests-of-ray"
PORT = "6379"
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="ZEROTOP_RAY_PYTHON names no Python with Ray"),
    pytest.mark.skipif(bool(nodes.explain_missing_nodes()), reason=nodes.explain_missing_nodes() or "-"),
    pytest.mark.skipif(not SERVER, reason="there is no program nats-server"),
]


@contextmanager
def start_ray(folder: Path) -> Iterator[tuple[NodesJob, list[list[str]], str]]:
    """Make two nodes; yield the commands that start Ray on them, and its program."""
    ray = str(Path(PYTHON).with_name("ray"))
    with start_nodes(folder, 2, is_shared=False) as job:
        first, second = job.cluster.nodes
        state = folder / "home_state"
        state.mkdir()
        for node in job.cluster.nodes:
            node.run_command("sh", "-c", "mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray", check=True)
            node.run_command("mount", "-t", "tmpfs", "-o", "size=2g", "none", "/dev/shm", check=True)
            # They share the home folder, in which keys are.
            node.run_command("mount", "--bind", str(state), os.path.expanduser("~/.local/state/zerotop"), check=True)
        job.environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
        start = [ray, "start", "--block", "--num-cpus", "1", "--object-store-memory", "100000000"]
        heads = ["--head", "--include-dashboard", "false"], ["--address", f"{first.address}:{PORT}"]
        own = (["--node-ip-address", node.address] for node in (first, second))
        try:
            yield job, [[*start, *words, *address] for words, address in zip(heads, own, strict=True)], ray
        finally:
            for node in job.cluster.nodes:
                node.run_command(ray, "stop", "--force", env=job.environment)


def run_driver(job: NodesJob, ray: str, *before: str) -> subprocess.Popen[bytes]:
    """Start the driver once both nodes are there."""
    first = job.cluster.nodes[0]
    address = f"{first.address}:{PORT}"

    def count_nodes() -> int:
        return first.run_command(ray, "status", "--address", address, env=job.environment).stdout.count(" node_")

    wait_for(lambda: count_nodes() == 2, 180)
    job.environment["RAY_ADDRESS"] = address
    return job.start(*before, PYTHON, str(DRIVER), "200")


def check_both_ranks(recording: Path) -> None:
    """Both ranks took all steps, on their nodes."""
    recorded = Recording.open(recording)
    assert {event.writer.host: event.writer.rank for event in recorded.events_of(events.Hello)} == {
        "zt_node_1": 0,
        "zt_node_2": 1,
    }
    for rank in (0, 1):
        assert Rank(recording, rank).select_phases("step")["step"].tolist() == list(range(200))


def test_a_driver_on_a_cluster_that_runs_already_is_recorded_on_all_nodes(tmp_path: Path) -> None:
    with start_ray(tmp_path) as (job, commands, ray):
        for number, command in enumerate(commands):
            job.start(*command, node=number)
        driver = run_driver(job, ray, *ZEROTOP, "run", "--headless", "--recording", str(job.recording), "--")
        assert driver.wait(200) == 0, job.output
        token_files = [node.run_command("sh", "-c", "grep -rl ZEROTOP_TOKEN /tmp/ray").stdout for node in job.cluster.nodes]
        assert token_files == ["", ""], "Ray's logs are for everybody"
        assert job.output.count("kept") == 2, "the driver's own variables"
    check_both_ranks(job.recording)


def test_ray_that_was_started_by_zerotop_records_on_all_nodes(tmp_path: Path) -> None:
    with start_ray(tmp_path) as (job, commands, ray):
        job.environment["ZEROTOP_TOKEN"] = TOKEN
        (tmp_path / "nats.conf").write_text("authorization { token: $ZEROTOP_TOKEN }\n")
        job.start(SERVER, "-c", str(tmp_path / "nats.conf"))
        address = (f"nats://{job.cluster.nodes[0].address}:4222", "--job", "llama")
        job.start(*ZEROTOP, "collect", *address, "--headless", "--recording", str(tmp_path / "all"))
        for number, command in enumerate(commands):
            part = ("--recording", str(tmp_path / f"part{number}"))
            job.run(*command, options=("--collector", *address, *part), node=number)
        assert run_driver(job, ray).wait(200) == 0, job.output
        check_both_ranks(tmp_path / "all")
