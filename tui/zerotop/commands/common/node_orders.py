"""Orders to the nodes of a collected recording: a file in its folder, whose content the collector puts into its answers."""

from __future__ import annotations

import json
from pathlib import Path

from zerotop.recording.atomic_write import write_text_file

_FILE = "orders.json"
NODES_FILE = "nodes.json"
"""Which recording each node of the collected one has: {host: hash}."""


def has_nodes(folder: Path) -> bool:
    """Whether parts of other nodes came over the network into this recording."""
    return (folder / NODES_FILE).exists()


def order_stop(folder: Path) -> None:
    """Ask all nodes to stop the job; each further order is the next stronger signal. Raise OSError."""
    write_text_file(folder / _FILE, json.dumps({"stops": count_stops(folder) + 1}))


def count_stops(folder: Path) -> int:
    """Return how often the nodes were asked to stop the job."""
    try:
        return int(json.loads((folder / _FILE).read_text(encoding="utf-8"))["stops"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
