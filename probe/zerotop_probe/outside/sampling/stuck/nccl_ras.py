"""Ask NCCL how many operations each rank has launched, even if a rank's Python does not run.

From version 2.24 on, a thread of NCCL in each process answers such questions at a port of the node (RAS: reliability,
availability and serviceability). It lists ranks only if they have launched different numbers of operations. The format is
that of ``ncclras -v``.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_ADDRESS_VARIABLE, _DEFAULT_ADDRESS = "NCCL_RAS_ADDR", "localhost:28028"
_QUESTION = b"verbose status\n"
# It waits up to five seconds for processes that do not answer it.
_CONNECT_S, _PATIENCE_S = 1.0, 10.0
_MOST_BYTES = 1 << 20
_MOST_RANKS = 64

_COMMUNICATOR = re.compile(r"#\d+-\d+ \(\w+\)")
_DIFFERENT = re.compile(r"Communicator ranks have different (\w+) operation counts")
_MANY = re.compile(r"\d+ ranks have (?:launched up to operation (\d+)|not launched any operations)$")
_MEMBER = re.compile(r"Rank (\d+) -- .*managed by process (\d+) on node")
_SINGLE = re.compile(
    r"Rank (\d+) has (?:launched up to operation (\d+)|not launched any operations) -- .*managed by process (\d+) on node"
)


def read_launched(pids: Collection[int], environment: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Return NCCL's report on communicators with one of these processes: an entry for each rank that it lists.

    Empty if nothing answers, or if all ranks have launched the same number of operations.
    """
    host, _, port = environment.get(_ADDRESS_VARIABLE, _DEFAULT_ADDRESS).rpartition(":")
    try:
        text = _ask(host or "localhost", int(port))
    except (OSError, ValueError):
        return []
    return parse_status(text, pids)


def _ask(host: str, port: int) -> str:
    """Raises OSError if nothing answers."""
    end_s, parts, size = time.monotonic() + _PATIENCE_S, [], 0
    with socket.create_connection((host, port), _CONNECT_S) as connection:
        connection.sendall(_QUESTION)
        while size < _MOST_BYTES and (left_s := end_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            part = connection.recv(1 << 16)
            if not part:
                break
            parts.append(part)
            size += len(part)
    return b"".join(parts).decode(errors="replace")


def parse_status(text: str, pids: Collection[int]) -> list[dict[str, Any]]:
    """Return the entries of an answer, see the field ``launched`` of the event ``rank_stacks``."""
    communicators: list[list[dict[str, Any]]] = []
    for name, entry in _list_entries(text):
        if name:
            communicators.append([])
        elif communicators:
            communicators[-1].append(entry)
    # Other jobs of the node may answer, too.
    own = [entry for found in communicators if any(one["pid"] in pids for one in found) for entry in found]
    return own[:_MOST_RANKS]


def _list_entries(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each communicator, and after it the ranks that are listed for it with an empty name."""
    operation, count = "", 0
    for line in map(str.strip, text.splitlines()):
        if found := _COMMUNICATOR.match(line):
            yield found.group(), {}
            operation, count = "", 0
        elif found := _DIFFERENT.match(line):
            operation = found.group(1)
        elif found := _MANY.match(line):
            count = int(found.group(1) or 0)
        elif operation and (found := _SINGLE.match(line)):
            yield "", _make_entry(operation, found.group(1), found.group(3), int(found.group(2) or 0))
        elif operation and (found := _MEMBER.match(line)):
            yield "", _make_entry(operation, found.group(1), found.group(2), count)


def _make_entry(operation: str, rank: str, pid: str, count: int) -> dict[str, Any]:
    return {"operation": operation, "rank": int(rank), "pid": int(pid), "launched": count}
