"""Jobs on two nodes, and ``zerotop`` on the first of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agents import wait_for
from nodes import Cluster, Node, start_command
from programs import ZEROTOP, make_environment
from zerotop.recording.reader import Recording

BUSY = "import time\nwhile True: time.sleep(0.01)"
PORT = "29571"

Zerotop = Callable[..., subprocess.CompletedProcess[str]]


def bind_zerotop(cluster: Cluster, folder: Path) -> Zerotop:
    """Return a function that runs zerotop on the first node, unless another is named."""

    def call_zerotop(*arguments: str, node: Node = cluster.nodes[0], **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"ZEROTOP_SSH": cluster.ssh} | variables
        done = node.run_command(*ZEROTOP, *arguments, env=make_environment(folder, **variables))
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call_zerotop


@contextmanager
def start_rank_on(node: Node, number: int, folder: Path, **told: str) -> Iterator[None]:
    """Start an idle rank by hand on a node; kill it at the end of the block."""
    meeting = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "10.231.77.1", "MASTER_PORT": PORT} | told
    process = start_command(
        node, [sys.executable, "-c", BUSY], folder / f"rank{number}", make_environment(folder, **meeting)
    )
    try:
        yield
    finally:
        node.run_command("pkill", "-KILL", "-f", "time.sleep.0.01")
        process.wait(30)


@contextmanager
def hide_folder(node: Node, folder: Path) -> Iterator[None]:
    """Mount an empty folder over this one on the node."""
    node.run_command("mount", "-t", "tmpfs", "none", str(folder), check=True)
    try:
        yield
    finally:
        node.run_command("umount", str(folder), check=True)


def find_first_pid(zerotop: Zerotop) -> str:
    """Return the pid of a process of the only job on the first node."""
    found = wait_for(lambda: json.loads(zerotop("attach", "--json").stdout))
    assert len(found) == 1, (found, zerotop("attach").stdout)
    found = found[0]
    return str(found["pid"])


@contextmanager
def attach_zerotop(
    zerotop: Zerotop,
    cluster: Cluster,
    folder: Path,
    *options: str,
    program: Sequence[str] = ZEROTOP,
    recording: Path | None = None,
) -> Iterator[list[str]]:
    """Run ``zerotop attach`` headless on the first node; yield its messages, up to the name of the recording."""
    what = find_first_pid(zerotop) if recording is None else recording.name
    command = cluster.nodes[0].build_command(*program, "attach", what, *options, "--headless")
    variables = make_environment(folder, ZEROTOP_SSH=cluster.ssh)
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


def list_samplers(node: Node) -> str:
    """Return the command lines of zerotop's processes on a node."""
    return "\n".join(line for line in node.run_command("ps", "-ww", "-eo", "args").stdout.splitlines() if "--daemon" in line)


def count_samples(recording: Path) -> Counter[str]:
    """Return the number of samples of processes by host."""
    counts: Counter[str] = Counter()
    if recording.exists():
        for source in Recording.open(recording).sources["processes"]:
            counts[source.host] += len(source.array)
    return counts


def wait_for_both(recording: Path, known: Counter[str] | None = None) -> None:
    """Wait until processes of both nodes are sampled, more often than what is known of it."""
    wait_for(lambda: set(count_samples(recording) - (known or Counter())) == {"zt_node_1", "zt_node_2"})


@contextmanager
def bind_file(node: Node, file: Path, place: Path) -> Iterator[None]:
    """Mount a file into a folder of programs on a node."""
    lower = f"lowerdir={_copy_alone(file, place.name)}:{place.parent}"
    node.run_command("mount", "-t", "overlay", "none", "-o", lower, str(place.parent), check=True)
    assert node.run_command("test", "-x", str(place)).returncode == 0
    try:
        yield
    finally:
        node.run_command("umount", "--lazy", str(place.parent), check=True)


def _copy_alone(file: Path, name: str) -> Path:
    folder = file.parent / "alone"
    folder.mkdir()
    shutil.copy(file, folder / name)
    return folder
