"""Unpacked recordings with changed tables, and the findings in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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
