"""A job on several nodes that ``zerotop run`` on the first of them records; the nodes are network namespaces."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nodes
from nodes import Cluster
from programs import ZEROTOP
from rank_recordings import Rank
from real_jobs import make_environment


class NodesJob:
    """A job that is recorded on the first of some nodes."""

    def __init__(self, cluster: Cluster, folder: Path, environment: dict[str, str]) -> None:
        self.cluster, self.folder = cluster, folder
        self.recording = folder / "state" / "recording"
        self.until = folder / "until"
        self.environment = environment
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, options: tuple[str, ...] = (), node: int = 0) -> subprocess.Popen[bytes]:
        """Start a command under zerotop on a node."""
        return self.start(*ZEROTOP, "run", "--headless", *options, "--", *command, node=node)

    def start(self, *words: str, node: int = 0) -> subprocess.Popen[bytes]:
        """Start a program on a node; what it prints is appended to ``output``."""
        with (self.folder / "output").open("ab") as file:
            process = subprocess.Popen(
                self.cluster.nodes[node].build_command("sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *words),
                env=self.environment,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def read_steps(self, rank: int) -> list[int]:
        """Return the steps of a rank that were recorded here so far; none before its files are here."""
        with suppress(ValueError):
            return [int(step) for step in Rank(self.recording, rank).select_phases("step")["step"]]
        return []

    def list_arguments(self) -> str:
        """Return the command lines of all processes of all nodes."""
        return "\n".join(node.run_command("ps", "-ww", "-eo", "args").stdout for node in self.cluster.nodes)

    def read_collector_variable(self, name: str) -> str:
        """Return a variable in the environment of the collector, such as the secret."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if b"--beside" in (path / "cmdline").read_bytes():
                    for word in (path / "environ").read_bytes().split(b"\0"):
                        if word.startswith(name.encode() + b"="):
                            return word.partition(b"=")[2].decode()
        raise AssertionError("no collector runs")

    def find_token(self) -> str:
        """Return the secret of the nodes, whose connections are encrypted."""
        address = self.read_collector_variable("ZEROTOP_COLLECTOR")
        assert address.startswith("tls://")
        assert "#" in address, "the certificate that alone is accepted"
        return self.read_collector_variable("ZEROTOP_TOKEN")


@contextmanager
def start_nodes(folder: Path, count: int, *, is_shared: bool) -> Iterator[NodesJob]:
    """Make machines, of which the others see the first one's recordings if ``is_shared``."""
    (folder / "nodes").mkdir()
    (folder / "state").mkdir()
    with nodes.some_nodes(folder / "nodes", count) as cluster:
        names = "".join(f"{node.address} {node.name}\n" for node in cluster.nodes)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        for node in cluster.nodes:
            node.run_command("mount", "--bind", str(folder / "hosts"), "/etc/hosts", check=True)
            if not is_shared and node is not cluster.nodes[0]:
                node.run_command("mount", "-t", "tmpfs", "none", str(folder / "state"), check=True)
        (folder / "hostfile").write_text("".join(f"{node.name} slots=1\n" for node in cluster.nodes))
        environment = make_environment() | {"XDG_STATE_HOME": str(folder / "state"), "GLOO_SOCKET_IFNAME": "eth0"}
        passed_on = ("TORCH_EXTENSIONS_DIR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "DS_ACCELERATOR", "PATH")
        lines = [f"{name}={environment[name]}\n" for name in passed_on]
        (folder / ".deepspeed_env").write_text("".join(lines))
        job = NodesJob(cluster, folder, environment)
        yield job
    for process in job.started:
        process.wait(20)
