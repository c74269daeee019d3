"""What collecting many nodes costs, and how old the newest records are where they are collected.

The recording of a made-up node (tests/support/growing_recording.py) at a real job's rates is played as those of many nodes
(played_nodes.py), each with a host name of its own. A forwarder each, several
in a process, sends them through a real nats-server to one collector. "Player" and
"forwarder" are work that nodes do in reality.

    python benchmarks/nodes.py [--nodes 8] [--ranks 8] [--hertz 20] [--seconds 60] [--screen] [--lose 0]
        [--direct] [--template FILE]

``--lose N``: N times a node loses its power while Live is watched; the times are those until it is named on the screen.

``--direct``: all nodes are played into the recording that is watched, without forwarders, server and collector, for the
screen's own part of the age where this machine is too small for all of them. ``--template``: keep the made-up recording
in a file, or take it from there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import played_nodes
from played_nodes import record_template
from viewer_cost import SCREENS, Terminal, build_attach_command, measure_lateness_ms, read_fact_times

from nats_servers import TOKEN, NatsServer
from programs import ZEROTOP, make_environment
from zerotop.commands.common.node_orders import NODES_FILE
from zerotop_probe.recording import segments
from zerotop_probe.recording.tables import BEGINS, GPUS

_WARM_S, _WARM_NODE_S, _DIRECT_NODE_S = 10.0, 0.3, 0.03
# How much later nodes may take part on a busy machine.
_LATE_S = 60.0
_CATCH_UP_S = 10.0
# On another screen, and at the end.
_END_S = 20.0
_LOSE_S = 60.0
_LOOK_S = 0.02
_SETTLE_S = 3.0
# Forwarders in a process: 64 processes would only be busy with starting here.
_TOGETHER, _REDUCED_TOGETHER = 16, 128
# Played nodes in a process, which keeps their files open.
_PLAYED_TOGETHER = 384


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--hertz", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--full-nodes", type=int, default=64, help="how many send full detail")
    parser.add_argument("--screen", action="store_true", help="watch on a terminal, too")
    parser.add_argument("--lose", type=int, default=0, help="so many nodes, one after the other; with --screen")
    parser.add_argument("--direct", action="store_true", help="without sending anything")
    parser.add_argument("--template", type=Path)
    options = parser.parse_args()
    warm_s = _WARM_S + options.nodes * (_DIRECT_NODE_S if options.direct else _WARM_NODE_S)
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name), monitored=True) as server:
        seconds = warm_s + options.seconds + 2 * _END_S + options.lose * _LOSE_S
        template = options.template or Path(name, "template.pickle")
        if not template.exists():
            record_template(Path(name), template, options.ranks, options.hertz, seconds)
        running: list[subprocess.Popen[bytes]] = []
        try:
            _measure(options, Path(name), template, server, running, warm_s)
        finally:
            for process in running:
                process.kill()
                process.wait()


def _measure(
    options: argparse.Namespace,
    folder: Path,
    template: Path,
    server: NatsServer,
    running: list[subprocess.Popen[bytes]],
    warm_s: float,
) -> None:
    target = folder / played_nodes.COLLECTED
    hosts = [f"node{number:03}" for number in range(options.nodes)]
    watched = _start_programs(options, folder, template, server, running)
    begin, screen, seen, is_over = time.monotonic(), None, list[tuple[int, int]](), threading.Event()
    if options.screen:
        while not (target / "session.json").exists():
            time.sleep(0.1)
        screen = Terminal(build_attach_command(target), 200, 50)
        watched["screen"] = [screen.pid]
        watch = threading.Thread(target=_watch, args=(screen, seen, is_over), daemon=True)
        watch.start()
    _wait_for_nodes(target, hosts, begin, warm_s)
    time.sleep(max(_CATCH_UP_S, warm_s - (time.monotonic() - begin)))
    cpu = {name: sum(map(_read_cpu_s, pids)) for name, pids in watched.items()}
    sent, begin = _read_server_bytes(server), time.monotonic()
    rows = _look_at_ages(folder, hosts, options.seconds)
    seconds = time.monotonic() - begin
    costs = [f"load {os.getloadavg()[0]:.1f}"]
    for name, pids in watched.items():
        share = (sum(map(_read_cpu_s, pids)) - cpu[name]) / seconds / (options.nodes if name == "forwarder" else 1)
        memory = max(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6
        costs.append(f"{name}: {share:.1%} of a core, {memory:.0f} MB")
    if not options.direct:
        costs.append(f"each node sends {(_read_server_bytes(server) - sent) * 8 / 1e6 / seconds / options.nodes:.2f} Mbit/s")
    if screen is not None:
        screen.type_keys(str(SCREENS.index("output") + 1).encode())  # many ranks leave no room for it on Live
        begin = time.monotonic()
        time.sleep(min(_END_S, options.seconds))
        drawn = [one for one in list(seen) if one[1] > (begin + _SETTLE_S) * 1e9]
        late_ms = measure_lateness_ms(drawn, read_fact_times(target)) if drawn else ()
        rows["age on the screen"] = [late / 1e3 for late in late_ms]
        if options.lose:
            screen.type_keys(str(SCREENS.index("live") + 1).encode())
            is_over.set()
            watch.join()
            rows["a lost node is on the screen after"] = _lose_nodes(options, watched["forwarder"], screen)
        screen.close()
    print(f"{options.nodes} nodes x {options.ranks} ranks, {options.hertz} Hz, {seconds:.0f} s")
    for title, values in rows.items():
        if not values:
            print(f"{title}: unknown, since nothing new was drawn in {options.seconds:.0f} s")
            continue
        print(f"{title}: median {np.median(values):.2f} s, 99 % {np.percentile(values, 99):.2f} s, most {max(values):.2f} s")
    print("\n".join(costs))


def _wait_for_nodes(target: Path, hosts: list[str], begin: float, warm_s: float) -> None:
    while missing := set(hosts) - {name.split("-")[2] for name in _list_files(target) if name.startswith(f"{BEGINS.name}-")}:
        if time.monotonic() - begin > warm_s + _LATE_S:
            raise SystemExit(f"{len(missing)} nodes do not take part after {warm_s + _LATE_S:.0f} s")
        time.sleep(0.1)
    print(f"all nodes take part after {time.monotonic() - begin:.1f} s")


def _list_files(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


def _start_programs(
    options: argparse.Namespace,
    folder: Path,
    template: Path,
    server: NatsServer,
    running: list[subprocess.Popen[bytes]],
) -> dict[str, list[int]]:
    """Start all but the screen; return the processes of each kind."""
    program = [sys.executable, played_nodes.__file__]
    together = ["together"] if options.direct else []
    players = []
    for first in range(0, options.nodes, _PLAYED_TOGETHER):
        part = [str(first), str(min(first + _PLAYED_TOGETHER, options.nodes)), str(options.full_nodes)]
        players.append(subprocess.Popen([*program, "play", str(template), str(folder), *part, *together]))
    running += players
    played = {"player": [one.pid for one in players]}
    if options.direct:
        return played
    environment = make_environment(folder, ZEROTOP_TOKEN=TOKEN)
    limit = ["--full-nodes", str(options.full_nodes)]
    collected = ["--job", played_nodes.JOB, *limit, "--headless", "--recording", str(folder / played_nodes.COLLECTED)]
    collector = subprocess.Popen([*ZEROTOP, "collect", server.url, *collected], env=environment, stderr=subprocess.DEVNULL)
    running.append(collector)
    while len(list(folder.glob(f"node*/{BEGINS.name}-rank*"))) < options.nodes * options.ranks:
        time.sleep(0.1)
    forwarders = []
    for first, end in _divide_nodes(options):
        part = [str(first), str(end)]
        command = [*program, "send", str(folder), server.url, *part]
        forwarders.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        running.append(forwarders[-1])
        if end == options.full_nodes < options.nodes:  # those that play everything have to be the first ones that take part
            while _count_known(folder) < end:
                time.sleep(0.1)
    assert server.process is not None
    found = {"collector": [collector.pid], "server": [server.process.pid]}
    return found | played | {"forwarder": [one.pid for one in forwarders]}


def _divide_nodes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the nodes of each process of forwarders, as (first, end)."""
    full = min(options.nodes, options.full_nodes)
    parts = [(0, full, _TOGETHER), (full, options.nodes, _REDUCED_TOGETHER)]
    return [(first, min(first + size, end)) for begin, end, size in parts for first in range(begin, end, size)]


def _count_known(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return len(json.loads((folder / played_nodes.COLLECTED / NODES_FILE).read_text()))
    return 0


def _look_at_ages(folder: Path, hosts: list[str], seconds: float) -> dict[str, list[float]]:
    """Return the ages of the newest samples of each node in turn, for so long."""
    ages: list[float] = []
    behind: list[float] = []
    until = time.monotonic() + seconds
    for host in itertools.cycle(random.Random(0).sample(hosts, len(hosts))):  # of a thousand, looking at all takes minutes
        if time.monotonic() > until:
            break
        newest_ns = _read_newest(folder / played_nodes.COLLECTED, host)
        ages.append((time.monotonic_ns() - newest_ns) / 1e9)
        if (folder / host).exists():
            behind.append(max(0.0, (_read_newest(folder / host, host) - newest_ns) / 1e9))
        time.sleep(_LOOK_S)
    return {"age on the collector": ages} | ({"of it behind the node's file": behind} if behind else {})


def _watch(screen: Terminal, seen: list[tuple[int, int]], is_over: threading.Event) -> None:
    """Note what is drawn, until the terminal is closed or somebody else reads it."""
    with contextlib.suppress(OSError):
        while not is_over.is_set():
            seen += screen.collect_facts(1.0)


def _lose_nodes(options: argparse.Namespace, forwarders: list[int], screen: Terminal) -> list[float]:
    """Take the last node of each process of forwarders away; return the seconds until the screen names it."""
    times = []
    for (_, end), process in list(zip(_divide_nodes(options), forwarders, strict=True))[: options.lose]:
        screen.collect_facts(_SETTLE_S)
        os.kill(process, signal.SIGUSR1)
        times.append(screen.measure_key(b"", f"node{end - 1:03} has sent nothing".encode(), _LOSE_S))
    return times


def _read_cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _read_server_bytes(server: NatsServer) -> int:
    with urllib.request.urlopen(f"http://{server.address}:{server.monitor_port}/varz", timeout=5) as answer:
        return int(json.load(answer)["in_bytes"])


def _read_newest(folder: Path, host: str) -> int:
    """Return the time of the newest record about a node's GPUs; of one that sends less, the begin of a rank's last phase."""
    found = [path for path in folder.glob(f"{GPUS.name}-node-{host}-*.rec") if ".coarse" not in path.name]
    table = GPUS if found else BEGINS
    paths = found or sorted(folder.glob(f"{BEGINS.name}-*-{host}-*.rec"))
    path = max(paths, key=lambda path: (segments.parse_name(path.name) or ("", 0))[1])
    record = table.record_struct
    with path.open("rb") as file:
        header = len(file.readline())
        count = (file.seek(0, os.SEEK_END) - header) // record.size
        file.seek(header + max(0, count - 1) * record.size)
        data = file.read(record.size)
    place = [field.name for field in table.fields].index("time_ns")
    return int(record.unpack(data)[place]) if len(data) == record.size else time.monotonic_ns()


if __name__ == "__main__":
    main()
