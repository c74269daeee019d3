"""Orders to the nodes of a collected recording: a file in its folder, whose content the collector puts into its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path

from zerotop.recording.atomic_write import write_text_file

_FILE = "orders.json"
NODES_FILE = "nodes.json"
"""Which recording each node of the collected one has: {host: hash}."""
FULL_NODES = 64
"""So many nodes send full detail; of the others, as many that are wanted, and as many whose job has ended."""


def has_nodes(folder: Path) -> bool:
    """Whether parts of other nodes came over the network into this recording."""
    return (folder / NODES_FILE).exists()


_WANTED_FILE = "wanted-nodes.json"
_WANTED_S = 600.0
_MAX_BYTES = 1 << 20


def want_nodes(folder: Path, hosts: Collection[str]) -> None:
    """Ask nodes for full detail during the next ten minutes, where not all send it. Raise OSError."""
    now_s = time.time()
    wanted = _read_times(folder, now_s)
    # Written once a minute at most.
    if any(wanted.get(host, 0.0) < now_s + _WANTED_S - 60.0 for host in hosts):
        write_text_file(folder / _WANTED_FILE, json.dumps(wanted | dict.fromkeys(hosts, now_s + _WANTED_S)))


def read_wanted_nodes(folder: Path) -> Collection[str]:
    """Return the nodes that are asked for full detail."""
    return _read_times(folder, time.time())


def _read_times(folder: Path, now_s: float) -> dict[str, float]:
    try:
        with (folder / _WANTED_FILE).open("rb") as file:
            times = json.loads(file.read(_MAX_BYTES))
        return {host: float(until_s) for host, until_s in times.items() if now_s < float(until_s) <= now_s + _WANTED_S}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def order_stop(folder: Path) -> None:
    """Ask all nodes to stop the job; each further order is the next stronger signal. Raise OSError."""
    write_text_file(folder / _FILE, json.dumps({"stops": count_stops(folder) + 1}))


def count_stops(folder: Path) -> int:
    """Return how often the nodes were asked to stop the job."""
    try:
        return int(json.loads((folder / _FILE).read_text(encoding="utf-8"))["stops"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
