"""Plays a recording of one node as those of many nodes, at its own pace: their ranks cost nothing but the writes.

    python played_nodes.py play TEMPLATE FOLDER FIRST LAST FULL [together]
    ZEROTOP_TOKEN=... python played_nodes.py send FOLDER URL FIRST LAST     # the forwarders of some of them, in one process

SIGUSR1 takes the last of these forwarders away, as if its node had lost its power.

``TEMPLATE`` was made by ``record_template``. Each node gets a folder ``nodeNNN``, host name, ranks and processes of its
own, and its times are those of the playing; ``together`` all of them write into ``collected``, as a collector does. The
first node alone has the job's output. Nodes after the first ``FULL`` get only the files that they send without being asked,
and these once a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import growing_recording
from zerotop.commands.nodes.forwarder import Forwarder
from zerotop.commands.nodes.link import Link, connect_nats
from zerotop.commands.nodes.local_job import LocalJob
from zerotop.commands.nodes.messages import TOKEN_VARIABLE, JobKey, is_reduced_file
from zerotop_probe.recording import segments
from zerotop_probe.recording.tables import TABLES
from zerotop_probe.recording.writer import Identity

PERIOD_S = 0.1
"""Between two writes to a file: samplers drain their ranks' memory so often."""
_REDUCED_TICKS = 10
_TIMES = {"time_ns", "begin_ns", "end_ns"}


def record_template(folder: Path, made: Path, ranks: int, hertz: int, seconds: float) -> None:
    """Record a made-up node for some seconds; write what it wrote in each period to a file."""
    source = folder / "template"
    command = [sys.executable, growing_recording.__file__, str(source), "--ranks", str(ranks), "--hertz", str(hertz)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    read: dict[str, int] = {}
    ticks: list[tuple[int, dict[str, bytes]]] = []
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        tick = {}
        for path in sorted(source.iterdir(), key=_order_files):  # all that are there already
            with path.open("rb") as file:
                file.seek(read.get(path.name, 0))
                if data := file.read():
                    tick[path.name] = data
                    read[path.name] = read.get(path.name, 0) + len(data)
        ticks.append((time.monotonic_ns(), tick))
        time.sleep(max(0.0, begin + len(ticks) * PERIOD_S - time.monotonic()))
    writer.kill()
    writer.wait()
    writer.stdout.close()
    made.write_bytes(pickle.dumps(ticks))


def _order_files(path: Path) -> tuple[bool, str, int]:
    """Return the place of a file: ``session.json`` first, then the segments of each table one after the other."""
    return (path.name != "session.json", *(segments.parse_name(path.name) or (path.name, 0)))


class _PlayedFile:
    """A file of the template: its pieces, of whole records, as each node writes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rest = b""
        table = TABLES.get(name.partition("-")[0]) if name.endswith(".rec") else None
        self._dtype = None if table is None else np.dtype([tuple(field) for field in table.dtype])
        self.header = b""

    def take_piece(self, data: bytes, later_ns: int) -> np.ndarray | bytes:
        """Return the next piece with its times moved; the header goes before."""
        data = self._rest + data
        if not self.header and not self.name.endswith((".log", ".json")):
            self.header, _, data = data.partition(b"\n")
        if self._dtype is None:
            return data
        whole = len(data) // self._dtype.itemsize * self._dtype.itemsize
        self._rest = data[whole:]
        rows = np.frombuffer(data[:whole], self._dtype).copy()
        for column in _TIMES.intersection(self._dtype.names or ()):
            rows[column] += later_ns * (rows[column] > 0)
        return rows


def _adapt(value: dict[str, Any], host: str, first: int, later_ns: int, own: Identity) -> dict[str, Any]:
    """Return a header, an event or the facts of a recording as this node writes it."""
    value = dict(value)
    if "writer" in value:
        value["writer"] = _adapt(value["writer"], host, first, 0, own)
    if "clock" in value:
        value["clock"] = {name: at + later_ns for name, at in value["clock"].items()}
    changed = {"host": host, "rank": value.get("rank", -1) + first if value.get("rank", -1) >= 0 else -1}
    if value.get("event") in ("job_started", "rank_found") or value.get("role") == "node":
        changed |= {"pid": own.pid, "start": own.start}
    if "time_ns" in value:
        changed["time_ns"] = value["time_ns"] + later_ns
    return value | {name: one for name, one in changed.items() if name in value}


def _name_file(name: str, host: str, first: int) -> str:
    parts = name.split("-")
    if parts[1].startswith("rank"):
        parts[1] = f"rank{int(parts[1][4:]) + first}"
    parts[2] = host
    return "-".join(parts)


class _Player:
    def __init__(self, folder: Path, nodes: range, ranks: int, later_ns: int, *, together: bool) -> None:
        self._hosts = [(f"node{number:03}", number * ranks) for number in nodes]
        self._folders = {host: folder / (COLLECTED if together else host) for host, _ in self._hosts}
        self._later_ns = later_ns
        self._own = Identity.for_this_process("node")
        self._files: dict[str, tuple[_PlayedFile, list[Any]]] = {}
        for own in set(self._folders.values()):
            own.mkdir(exist_ok=together)

    def write(self, name: str, data: bytes) -> None:
        """Write a piece of a file for each node."""
        hosts = [host for host in self._hosts if not host[1]] if name.startswith("output") else self._hosts
        if name == "session.json" and not hosts:
            return
        if name == "session.json":
            for host, first in hosts[::-1]:  # together: the first one's
                (self._folders[host] / name).write_text(self._adapt(data, host, first))
            return
        is_new = name not in self._files
        played, files = self._files.setdefault(name, (_PlayedFile(name), []))
        piece = played.take_piece(data, self._later_ns)
        for place, (host, first) in enumerate(hosts):
            if is_new:
                files.append((self._folders[host] / _name_file(name, host, first)).open("ab", buffering=0))
                header = self._adapt(played.header, host, first).encode() if played.header else b""
                files[place].write(segments.pad_header(header) if name.endswith(".rec") else header and header + b"\n")
            files[place].write(self._build_piece(name, piece, host, first))

    def _build_piece(self, name: str, piece: np.ndarray | bytes, host: str, first: int) -> bytes:
        if isinstance(piece, np.ndarray):
            if first and "rank" in (piece.dtype.names or ()):
                piece = piece.copy()
                piece["rank"] += first
            return piece.tobytes()
        if name.endswith(".jsonl"):
            return "".join(self._adapt(line, host, first) + "\n" for line in piece.splitlines()).encode()
        return piece

    def _adapt(self, line: bytes, host: str, first: int) -> str:
        return json.dumps(_adapt(json.loads(line), host, first, self._later_ns, self._own))


def play(template: Path, folder: Path, nodes: range, full: int, *, together: bool) -> None:
    """Play to the end of the template."""
    ticks: list[tuple[int, dict[str, bytes]]] = pickle.loads(template.read_bytes())
    ranks = len({name.split("-")[1] for _, tick in ticks for name in tick if "-rank" in name})
    later_ns = time.monotonic_ns() + 2_000_000_000 - ticks[0][0]
    first, end = nodes.start, nodes.stop
    player = _Player(folder, range(first, max(first, min(full, end))), ranks, later_ns, together=together)
    reduced = _Player(folder, range(max(full, first), end), ranks, later_ns, together=together)
    kept: dict[str, bytes] = {}
    for place, (at_ns, tick) in enumerate(ticks):
        time.sleep(max(0.0, (at_ns + later_ns - time.monotonic_ns()) / 1e9))
        for name, data in tick.items():
            player.write(name, data)
            if end > full and (name == "session.json" or is_reduced_file(name)):
                kept[name] = kept.get(name, b"") + data
        if place % _REDUCED_TICKS == 0:
            for name, data in kept.items():
                reduced.write(name, data)
            kept = {}


JOB = "bench"
COLLECTED = "collected"


class EndlessJob(LocalJob):
    def is_over(self) -> bool:
        return False

    def stop(self) -> None:
        raise AssertionError


async def send(folder: Path, url: str, hosts: list[str]) -> None:
    """Forward these nodes' recordings until killed; that of the last one until SIGUSR1."""
    key = JobKey(JOB, os.environ[TOKEN_VARIABLE])

    async def connect() -> Link:
        return await connect_nats(url, key)

    senders = [Forwarder(str(folder / host), host, key, connect, job=EndlessJob(folder), tell=print) for host in hosts]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tasks[-1].cancel)
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    verb, *words = sys.argv[1:]
    if verb == "play":
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        nodes = range(int(words[2]), int(words[3]))
        play(Path(words[0]), Path(words[1]), nodes, int(words[4]), together=words[5:] == ["together"])
    else:
        hosts = [f"node{number:03}" for number in range(int(words[2]), int(words[3]))]
        asyncio.run(send(Path(words[0]), words[1], hosts))


if __name__ == "__main__":
    main()
