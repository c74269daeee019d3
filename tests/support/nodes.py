"""Machines to attach to: namespaces of their own for processes, network and name, files in common, an sshd in each.

Only for root on Linux with OpenSSH's server and iproute2; ``explain_missing_nodes`` checks these needs.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import lengthen

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") or ""
# The first process of a machine: it buries whoever dies there.
_INIT = "import os, time\nprint('up', flush=True)\nwhile True:\n try: os.wait()\n except ChildProcessError: time.sleep(0.05)"
# What a machine has for itself.
_OWN = "mount -t tmpfs none /run && mkdir -m 755 /run/sshd && mount -t tmpfs none /dev/shm && ip link set lo up"
_SSHD = """
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_SSH = """
Host {name}
  HostName {address}
  User root
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile none
"""


@functools.cache
def explain_missing_nodes() -> str:
    """Return the reason for which this machine cannot make such nodes, or an empty text."""
    if os.geteuid():
        return "only root makes network namespaces"
    missing = [name for name in ("unshare", "nsenter", "ip", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing or not SSHD:
        return f"there is no {', '.join(missing or ['sshd'])}"
    tried = f"{_OWN} && ip link add zt0 type veth peer name zt1 && ip link add zt2 type bridge"
    done = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", tried], check=False, capture_output=True, text=True)
    return f"network namespaces cannot be made ({done.stderr.strip()})" if done.returncode else ""


class Node:
    """One machine."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        """Start the machine, without a network so far. ``folder`` is for its keys."""
        self.name = name
        self.address = address
        self.folder = folder
        folder.mkdir()
        start = f"hostname {name} && {_OWN} && exec {shlex.join([sys.executable, '-c', _INIT])}"
        spaces = ["--uts", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self._starter = subprocess.Popen(["unshare", *spaces, "sh", "-c", start], stdout=subprocess.PIPE)
        assert self._starter.stdout is not None
        assert self._starter.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._starter.pid}/task/{self._starter.pid}/children")
        self.pid = int(children.read_text())

    def build_command(self, *arguments: str) -> list[str]:
        """Return the command line that runs a command on the node."""
        return ["nsenter", "--target", str(self.pid), "--uts", "--net", "--pid", "--mount", "--", *arguments]

    def run_command(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the node to its end."""
        chosen: dict[str, Any] = {"check": False, "capture_output": True, "text": True, "timeout": 120}
        return subprocess.run(self.build_command(*arguments), **chosen | options)

    def start_sshd(self, key: Path) -> None:
        """Start its sshd, which accepts ``key``."""
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "host_key"], check=True)
        shutil.copy(f"{key}.pub", self.folder / "user_key.pub")
        settings = self.folder / "sshd_config"
        settings.write_text(_SSHD.format(address=self.address, folder=self.folder))
        subprocess.run(self.build_command(SSHD, "-f", str(settings), "-E", str(self.folder / "sshd.log")), check=True)

    def shut_down(self) -> None:
        """Shut the node down with all its processes; again does nothing."""
        self._starter.kill()
        self._starter.wait()
        assert self._starter.stdout is not None
        self._starter.stdout.close()


class Cluster:
    """Some machines on one wire, and how each reaches the others."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.folder = folder
        self.count = count
        self.nodes: list[Node] = []

    def start_nodes(self) -> None:
        """Start all nodes."""
        for number in range(1, self.count + 1):
            self.nodes.append(Node(f"zt-node-{number}", f"10.231.77.{number}", self.folder / f"node-{number}"))
        self._connect_nodes()
        key = self.folder / "user_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        for node in self.nodes:
            node.start_sshd(key)
        self._write_settings()
        for node in self.nodes:  # for programs that call ssh themselves
            places = ("~/.ssh", "~/.local/state/zerotop")
            own = "; ".join(f"mkdir -p {place} && mount -t tmpfs -o mode=700 none {place}" for place in places)
            own += f"; cp {self.folder}/ssh_config ~/.ssh/config"
            node.run_command("sh", "-c", own, check=True)

    def _connect_nodes(self) -> None:
        """Make the first node's interface the bridge that the others are at."""
        first = self.nodes[0]
        first.run_command("ip", "link", "add", "eth0", "type", "bridge", check=True)
        for node in self.nodes:
            if node is not first:
                peer = ("peer", "name", "eth0", "netns", str(node.pid))
                subprocess.run(
                    ["ip", "link", "add", f"port{node.pid}", "netns", str(first.pid), "type", "veth", *peer], check=True
                )
                first.run_command("ip", "link", "set", f"port{node.pid}", "master", "eth0", "up", check=True)
            up = f"ip address add {node.address}/24 dev eth0 && ip link set eth0 up"
            node.run_command("sh", "-c", up, check=True)

    def cut_off(self, node: Node) -> None:
        """Pull the cable of a node other than the first."""
        self.nodes[0].run_command("ip", "link", "set", f"port{node.pid}", "down", check=True)

    def connect(self, node: Node) -> None:
        """Plug it in again."""
        self.nodes[0].run_command("ip", "link", "set", f"port{node.pid}", "up", check=True)

    def _write_settings(self) -> None:
        known = [f"{node.address} {(node.folder / 'host_key.pub').read_text()}" for node in self.nodes]
        (self.folder / "known").write_text("".join(known))
        text = [_SSH.format(name=node.name, address=node.address, folder=self.folder) for node in self.nodes]
        (self.folder / "ssh_config").write_text("".join(text))

    @property
    def ssh(self) -> str:
        """The value for ZEROTOP_SSH."""
        return shlex.join(["ssh", "-F", str(self.folder / "ssh_config")])

    def shut_down(self) -> None:
        """Shut all nodes down."""
        for node in self.nodes:
            node.shut_down()


@contextmanager
def some_nodes(folder: Path, count: int = 2) -> Iterator[Cluster]:
    """Start machines; shut them down at the end of the block."""
    cluster = Cluster(folder, count)
    try:
        cluster.start_nodes()
        yield cluster
    finally:
        cluster.shut_down()


def start_command(node: Node, command: Sequence[str], output: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command on a node; do not wait for it."""
    with open(output, "wb") as file:
        return subprocess.Popen(node.build_command(*command), stdout=file, stderr=file, env=environment)


def wait_for_exit(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit code. Raise AssertionError if the process runs longer."""
    begin_s = time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - begin_s < lengthen(seconds)
        time.sleep(0.05)
    return int(process.returncode)
