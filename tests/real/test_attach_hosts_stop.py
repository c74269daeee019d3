"""Stopping a job that is attached to on two nodes, and a recording's folder that is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import nodes
from agents import build_python_command, wait_for
from node_jobs import PORT, Zerotop, attach_zerotop, find_first_pid, list_samplers, wait_for_both
from nodes import Cluster, start_command, wait_for_exit
from programs import ZEROTOP, make_environment
from terminals import Terminal
from zerotop.recording.reader import Recording

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(nodes.explain_missing_nodes()), reason=nodes.explain_missing_nodes() or "-"),
]

# A rank that says what it is asked, and ends then.
RANK = """
import signal, time
def asked(number, frame):
    print(signal.Signals(number).name, flush=True)
    raise SystemExit(4)
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, asked)
while True: time.sleep(0.05)
"""
STOP = """
import sys
from pathlib import Path
from zerotop.commands.job.controller import JobController
print(JobController(Path(sys.argv[1])).stop_job())
"""


@pytest.fixture(scope="module", autouse=True)
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of little room, which both nodes see, for it is there before them."""
    folder = tmp_path_factory.mktemp("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def start_ranks(cluster: Cluster, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a rank on each node; they write the signals that they get to ``rank0`` and ``rank1``."""
    found = []
    with ExitStack() as stack:
        for number, node in enumerate(cluster.nodes):
            told = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": cluster.nodes[0].address, "MASTER_PORT": PORT}
            found.append(
                start_command(node, build_python_command(RANK), folder / f"rank{number}", make_environment(folder, **told))
            )
            stack.callback(found[-1].wait)
            stack.callback(node.run_command, "pkill", "-KILL", "-f", "signal.Signals")
        yield found


@pytest.fixture
def watched_job(
    cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path
) -> Iterator[tuple[Terminal, Path, list[subprocess.Popen[bytes]]]]:
    """The live screen on the first node, of a job on both; its recording and its ranks."""
    with start_ranks(cluster, tmp_path) as processes:
        arguments = cluster.nodes[0].build_command(*ZEROTOP, "attach", find_first_pid(call_zerotop), "--hosts", "zt-node-2")
        program = [shutil.which(arguments[0]) or "", *arguments[1:]]
        terminal = Terminal(program, environment=make_environment(tmp_path, ZEROTOP_SSH=cluster.ssh), folder=tmp_path)
        try:
            terminal.wait_for("E enter ranks")
            (recording,) = tmp_path.glob("zerotop/sessions/*")
            wait_for_both(recording)
            yield terminal, recording, processes
        finally:
            terminal.close()


def test_a_job_is_asked_to_stop_on_both_nodes_and_gently(
    cluster: Cluster, watched_job: tuple[Terminal, Path, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    terminal, recording, processes = watched_job
    terminal.type_keys("q")
    terminal.wait_for("Stops it gracefully here and on zt-node-2; again forces it")
    assert [process.poll() for process in processes] == [None, None]
    terminal.type_keys("s")
    assert [wait_for_exit(process, 30) for process in processes] == [4, 4]
    assert [(tmp_path / f"rank{number}").read_text() for number in (0, 1)] == ["SIGINT\n"] * 2
    terminal.wait_for("The job has ended.")
    terminal.type_keys("l")
    terminal.exit_code()
    wait_for(lambda: [list_samplers(node) for node in cluster.nodes] == ["", ""])
    sent = [event for event in Recording.open(recording).events if event.event_name == "stop_sent"]
    assert sorted((event.writer.host, event.facts["signal"]) for event in sent) == [
        ("zt_node_1", "SIGINT"),
        ("zt_node_2", "SIGINT"),
    ]


def test_a_node_that_is_not_reached_is_named_and_the_others_are_stopped(
    cluster: Cluster, watched_job: tuple[Terminal, Path, list[subprocess.Popen[bytes]]]
) -> None:
    terminal, _, processes = watched_job
    two = cluster.nodes[1]
    two.run_command("ip", "link", "set", "eth0", "down", check=True)
    try:
        terminal.type_keys("q")
        terminal.wait_for("here and on zt-node-2")
        terminal.type_keys("s")
        assert wait_for_exit(processes[0], 30) == 4
        terminal.wait_for("zt-node-2 was not asked to stop")
        assert processes[1].poll() is None
    finally:
        two.run_command("ip", "link", "set", "eth0", "up", check=True)
    terminal.wait_for("The job has ended.")
    terminal.type_keys("l")
    terminal.exit_code()
    assert "Its ranks may wait for the others: stop again, or end them there." in terminal.text
    assert list_samplers(two)


def test_a_joined_part_says_from_where_the_whole_is_stopped(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path) -> None:
    with start_ranks(cluster, tmp_path), attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2") as messages:
        recording = messages[-1].partition("recording in ")[2]
        means = f"import sys; {STOP.replace('.stop_job()', '.stop_description')}"
        done = cluster.nodes[1].run_command(sys.executable, "-c", means, recording, env=make_environment(tmp_path))
        assert done.stdout == "Stops the ranks of this node gracefully; stop the whole job from zt_node_1.\n", done.stderr


def test_a_full_folder(cluster: Cluster, call_zerotop: Zerotop, tmp_path: Path, small_folder: Path) -> None:
    one, two = cluster.nodes
    full = small_folder / "full"
    with start_ranks(cluster, tmp_path) as processes:
        full.write_bytes(bytes(os.statvfs(small_folder).f_bavail * os.statvfs(small_folder).f_frsize - 8192))
        recording = small_folder / "early"
        done = call_zerotop(
            "attach", find_first_pid(call_zerotop), "--hosts", "zt-node-2", "--headless", "--recording", str(recording)
        )
        assert done.returncode == 1
        assert f"nothing can be written to {recording}: make room there" in done.stderr
        assert [list_samplers(one), list_samplers(two)] == ["", ""]

        full.unlink()
        recording = small_folder / "late"
        with attach_zerotop(call_zerotop, cluster, tmp_path, "--hosts", "zt-node-2", "--recording", str(recording)):
            wait_for_both(recording)
            with pytest.raises(OSError, match="No space left"):
                full.write_bytes(bytes(1 << 20))
            asked = one.run_command(
                sys.executable,
                "-c",
                STOP,
                str(recording),
                env=make_environment(tmp_path, ZEROTOP_SSH=cluster.ssh),
                check=True,
            )
            assert asked.stdout == "\n"
            assert [wait_for_exit(process, 30) for process in processes] == [4, 4]
            wait_for(lambda: [list_samplers(one), list_samplers(two)] == ["", ""])
            full.unlink()
