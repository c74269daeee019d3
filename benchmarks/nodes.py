"""What collecting many nodes costs, and how old the newest records are where they are collected.

Made-up jobs (tests/support/growing_recording.py) write at a real job's rates, each on a node with a host name of its own on
this machine. A forwarder each sends them through a real nats-server to one collector. Root only, because of the host names.

    python benchmarks/nodes.py [--nodes 8] [--ranks 8] [--hertz 20] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import growing_recording
from nats_servers import TOKEN, NatsServer
from programs import ZEROTOP, make_environment
from zerotop_probe.recording import segments
from zerotop_probe.recording.tables import GPUS

_WARM_S = 10.0
_LOOK_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--hertz", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name), monitored=True) as server:
        running: list[subprocess.Popen[bytes]] = []
        try:
            _measure(options, Path(name), server, running)
        finally:
            for process in running:
                process.kill()
                process.wait()


def _measure(options: argparse.Namespace, folder: Path, server: NatsServer, running: list[subprocess.Popen[bytes]]) -> None:
    target = folder / "collected"
    environment = make_environment(folder, ZEROTOP_TOKEN=TOKEN)
    job = ["--job", "bench"]
    collect = [*ZEROTOP, "collect", server.url, *job, "--headless", "--recording", str(target)]
    collector = subprocess.Popen(collect, env=environment, stderr=subprocess.DEVNULL)
    running.append(collector)
    hosts = [f"node{number:03}" for number in range(options.nodes)]
    forwarders = []
    for host in hosts:
        source = str(folder / host)
        grow = [
            sys.executable,
            growing_recording.__file__,
            source,
            "--ranks",
            str(options.ranks),
            "--hertz",
            str(options.hertz),
        ]
        writer = subprocess.Popen(_on_host(host, grow), stdout=subprocess.PIPE)
        running.append(writer)
        assert writer.stdout is not None
        writer.stdout.readline()
        forward = [*ZEROTOP, "forward", source, "--collector", server.url, *job]
        forwarders.append(subprocess.Popen(_on_host(host, forward), env=environment, stderr=subprocess.DEVNULL))
        running.append(forwarders[-1])
    time.sleep(_WARM_S)
    assert server.process is not None
    watched = {"collector": [collector.pid], "server": [server.process.pid], "forwarder": [one.pid for one in forwarders]}
    cpu = {name: sum(map(_read_cpu_s, pids)) for name, pids in watched.items()}
    sent, begin = _read_server_bytes(server), time.monotonic()
    ages: list[float] = []
    behind: list[float] = []
    while time.monotonic() - begin < options.seconds:
        for host in hosts:
            newest_ns = _read_newest(target, host)
            ages.append((time.monotonic_ns() - newest_ns) / 1e9)
            behind.append(max(0.0, (_read_newest(folder / host, host) - newest_ns) / 1e9))
        time.sleep(_LOOK_S)
    seconds = time.monotonic() - begin
    print(
        f"{options.nodes} nodes x {options.ranks} ranks, {options.hertz} Hz, {seconds:.0f} s, load {os.getloadavg()[0]:.1f}"
    )
    for title, values in (("age on the collector", ages), ("of it behind the node's file", behind)):
        print(f"{title}: median {np.median(values):.2f} s, 99 % {np.percentile(values, 99):.2f} s, most {max(values):.2f} s")
    for name, pids in watched.items():
        share = (sum(map(_read_cpu_s, pids)) - cpu[name]) / seconds / len(pids)
        memory = max(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6
        print(f"{name}: {share:.1%} of a core, {memory:.0f} MB")
    mbits = (_read_server_bytes(server) - sent) * 8 / 1e6 / seconds / options.nodes
    print(f"each node sends {mbits:.2f} Mbit/s")


def _on_host(host: str, command: Sequence[str]) -> list[str]:
    return ["unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh", *command]


def _read_cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _read_server_bytes(server: NatsServer) -> int:
    with urllib.request.urlopen(f"http://{server.address}:{server.monitor_port}/varz", timeout=5) as answer:
        return int(json.load(answer)["in_bytes"])


def _read_newest(folder: Path, host: str) -> int:
    """Return the time of the newest record about a node's GPUs."""
    paths = [path for path in folder.glob(f"{GPUS.name}-node-{host}-*.rec") if ".coarse" not in path.name]
    path = max(paths, key=lambda path: (segments.parse_name(path.name) or ("", 0))[1])
    record = GPUS.record_struct
    with path.open("rb") as file:
        header = len(file.readline())
        count = (file.seek(0, os.SEEK_END) - header) // record.size
        file.seek(header + max(0, count - 1) * record.size)
        data = file.read(record.size)
    place = [field.name for field in GPUS.fields].index("time_ns")
    return int(record.unpack(data)[place]) if len(data) == record.size else time.monotonic_ns()


if __name__ == "__main__":
    main()
