"""How exactly the clocks of many nodes are aligned when all of them begin at once.

Each node is a process in a time namespace of its own, so that its CLOCK_MONOTONIC is off by a known time, and runs the real
forwarder; they send made-up recordings through a real nats-server to a real collector. All run on one machine, so that the
true alignment is known. *Error* is how far the alignment in the collected recording is from it, *stated* how far it may be
as the recording says itself. Needs root and Linux 5.6.

    python benchmarks/node_clocks.py [--nodes 64] [--ranks 8] [--rounds 3] [--busy 0] [--before FOLDER]

``--before``: a folder with another version of ``probe`` and ``tui``, whose forwarders take turns with this version's.
``--busy``: so many processes compute meanwhile, at the priority of a training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import played_nodes

from nats_servers import TOKEN, NatsServer
from programs import ZEROTOP, make_environment
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.link import Link, connect_nats
from zerotop.commands.nodes.messages import TOKEN_VARIABLE, JobKey

_CLONE_NEWTIME = 0x80  # linux/sched.h
_NICENESS = 10  # as zerotop forward
_TEMPLATE_S = 3.0
_MOST_SHIFT_NS = 1_000_000_000_000
_ROUND_S = 120.0
_SETTLE_S = 3.0


class Row(NamedTuple):
    error_ms: float
    stated_ms: float
    after_s: float  # from the begin of all until this node was aligned


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--send", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send is not None:
        send_from_nodes(Path(options.send[0]), options.send[1])
        return
    versions = {"now": Path(__file__).parents[1]} | ({} if options.before is None else {"before": options.before.resolve()})
    rows: dict[str, list[Row]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as name:
        template = Path(name, "template.pickle")
        played_nodes.record_template(Path(name), template, options.ranks, 20, _TEMPLATE_S)
        for number in range(options.rounds):
            for version, root in list(versions.items())[:: -1 if number % 2 else 1]:
                folder = Path(name, f"{number}-{version}")
                folder.mkdir()
                found = measure_round(folder, template, options, root)
                print_rows(f"round {number + 1}, {version}", found)
                rows[version] += found
    for version, found in rows.items():
        print_rows(f"all, {version}", found)


def measure_round(folder: Path, template: Path, options: argparse.Namespace, root: Path) -> list[Row]:
    """Return how exactly each node was aligned when all began at once."""
    played_nodes.play(template, folder, range(options.nodes), options.nodes, together=False)
    shifts = [random.Random(number).randrange(_MOST_SHIFT_NS) for number in range(options.nodes)]
    (folder / "shifts.json").write_text(json.dumps(shifts))
    for number, shift_ns in enumerate(shifts):
        _shift_clock(folder / f"node{number:03}" / "session.json", shift_ns)
    target = folder / played_nodes.COLLECTED
    sources = os.pathsep.join(str(root / part) for part in ("probe", "tui"))
    environment = make_environment(folder, ZEROTOP_TOKEN=TOKEN, PYTHONPATH=sources)
    with NatsServer(folder) as server, contextlib.ExitStack() as running:
        collecting = [*ZEROTOP, "collect", server.url, "--job", played_nodes.JOB, "--headless", "--recording", str(target)]
        sending = [sys.executable, __file__, "--send", str(folder), server.url]
        collector = subprocess.Popen(collecting, env=environment, stderr=subprocess.DEVNULL)
        running.callback(_end, collector)
        time.sleep(_SETTLE_S)
        truth_ns = _read_truth()
        for _ in range(options.busy):
            running.callback(_end, subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"]))
        nodes = subprocess.Popen(sending, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.callback(_end, nodes)
        assert nodes.stdout is not None
        begin_s = float(nodes.stdout.readline())
        while len(paths := sorted(target.glob("events-control-node*.jsonl"))) < options.nodes:
            if time.time() - begin_s > _ROUND_S:
                raise SystemExit(f"{options.nodes - len(paths)} nodes do not take part")
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        moved_ns = _read_truth() - truth_ns  # by NTP, meanwhile
    if abs(moved_ns) > 50_000:
        print(f"this machine's own clock was corrected by {moved_ns / 1e3:.0f} us")
    return [_read_row(path, shifts, truth_ns, begin_s) for path in paths]


def _shift_clock(path: Path, shift_ns: int) -> None:
    """Have a node's recording say that its CLOCK_MONOTONIC is ahead."""
    info = json.loads(path.read_text())
    info["clock"]["monotonic_ns"] += shift_ns
    path.write_text(json.dumps(info))


def _read_truth() -> int:
    """Return by how much this machine's time is ahead of its CLOCK_MONOTONIC, from the least disturbed of some readings."""
    found = []
    for _ in range(1000):
        before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
    return min(found)[1]


def _read_row(path: Path, shifts: list[int], truth_ns: int, begin_s: float) -> Row:
    with path.open() as file:
        header = json.loads(file.readline())
    number = int(path.name.split("-")[2].removeprefix("node"))
    found_ns = header["clock"]["unix_ns"] - header["clock"]["monotonic_ns"]
    error_ns = found_ns - (truth_ns - shifts[number])
    return Row(abs(error_ns) / 1e6, header["error_ns"] / 1e6, path.stat().st_mtime - begin_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def send_from_nodes(folder: Path, url: str) -> None:
    """Be all nodes, until killed: each forwarder is a process with a clock of its own, and all begin at once."""
    key = JobKey(played_nodes.JOB, os.environ[TOKEN_VARIABLE])
    asyncio.run(_connect_once(url, key))  # what is imported and read only then
    pipe, starting = os.pipe()
    for number, shift_ns in enumerate(json.loads((folder / "shifts.json").read_text())):
        _shift_children(shift_ns)
        if os.fork() == 0:
            os.close(starting)
            os.read(pipe, 1)
            _send(folder / f"node{number:03}", url, key)
    time.sleep(1.0)
    print(time.time(), flush=True)
    os.close(starting)
    sys.stdin.buffer.read()  # until the benchmark has ended


async def _connect_once(url: str, key: JobKey) -> None:
    await (await connect_nats(url, key)).close()


def _shift_children(shift_ns: int) -> None:
    """Have the next child's CLOCK_MONOTONIC be ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "no time namespace can be made")
    seconds, nanoseconds = divmod(shift_ns, 1_000_000_000)
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} {nanoseconds}")


def _send(source: Path, url: str, key: JobKey) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # end with the parent
    os.nice(_NICENESS)

    async def connect() -> Link:
        return await connect_nats(url, key)

    try:
        sender = Forwarder(str(source), source.name, key, connect, job=played_nodes.EndlessJob(source), tell=lambda _: None)
        asyncio.run(sender.run())
    finally:
        os._exit(1)


def print_rows(title: str, rows: list[Row]) -> None:
    errors, stated, after = (np.array(column) for column in zip(*rows, strict=True))
    parts = [
        f"{name}: median {np.median(values):.3f}, 99 % {np.percentile(values, 99):.3f}, most {values.max():.3f} ms"
        for name, values in (("error", errors), ("stated", stated))
    ]
    beyond = int((errors > stated).sum())
    print(
        f"{title}, {len(rows)} nodes, load {os.getloadavg()[0]:.1f}: {'; '.join(parts)}; error beyond stated: {beyond};"
        f" aligned after {np.median(after):.1f} s, the last after {after.max():.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
