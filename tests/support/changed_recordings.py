"""Unpacked recordings with changed tables, and the findings in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recordings import unpack_to_folder
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.recording.reader import Recording

Rows = np.ndarray[Any, Any]


def change_table(folder: Path, name: str, write: Callable[[Rows], None]) -> None:
    """Let ``write`` change the records of a table, by the begin of its file's name: ``spans-rank1``, ``hosts``."""
    (path,) = folder.glob(f"{name}-*.rec")
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]]).copy()
    write(rows)
    path.write_bytes(header + b"\n" + rows.tobytes())


def find_named(folder: Path, name: str) -> list[Finding]:
    """Return the findings of that name."""
    recording = Recording.open(folder)
    return [finding for finding in detect_findings(recording, recording.end_ns) if finding.name == name]


def open_with_nodes(name: str, nodes: int, into: Path) -> Recording:
    """Return a recording of one node as that of a job on several nodes, all of which do the same."""
    folder = unpack_to_folder(name, into)
    tables = [path for path in folder.glob("*-*") if not path.name.startswith("output-")]
    ranks = len([*folder.glob("spans-*")])
    for path, node in ((path, node) for path in tables for node in range(1, nodes)):
        header, _, content = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        writer = facts["writer"]
        copied = path.with_name(path.name.replace(f"-{writer['host']}-", f"-{writer['host']}{node}-"))
        writer["host"] += str(node)
        writer["rank"] += ranks * node if writer["rank"] >= 0 else 0
        if path.suffix == ".rec":
            rows = np.frombuffer(content, [tuple(field) for field in facts["dtype"]]).copy()
            if "rank" in (rows.dtype.names or ()):
                rows["rank"][rows["rank"] >= 0] += ranks * node
            content = rows.tobytes()
        else:
            content = b"".join(_move_event(line, ranks * node) for line in content.splitlines())
        copied.write_bytes(json.dumps(facts).encode() + b"\n" + content)
    return Recording.open(folder)


def _move_event(line: bytes, ranks: int) -> bytes:
    event = json.loads(line)
    if event.get("rank", -1) >= 0:
        event["rank"] += ranks
    return json.dumps(event).encode() + b"\n"
