"""For tests of the process beside a job: starting real agents on little jobs, reading what they recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patience import lengthen
from zerotop_probe.recording.tables import STREAMS

AGENT = [sys.executable, "-m", "zerotop_probe.outside"]


def build_python_command(code: str) -> list[str]:
    """Return the command of a job: this interpreter with a program."""
    return [sys.executable, "-c", code]


def run_in_foreground(recording: Path, *command: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end under an agent in the foreground."""
    arguments = [*AGENT, "--foreground", str(recording), "--", *command]
    return subprocess.run(arguments, check=False, timeout=60, **options)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until a condition holds; return its value."""
    begin_s = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() - begin_s < lengthen(seconds), "waited in vain"
        time.sleep(0.02)
    return value


def read_node_events(recording: Path, *names: str) -> list[dict[str, Any]]:
    """Return the events of the recording's agents that have one of the names, or all."""
    paths = sorted(recording.glob("events-node-*.jsonl"))
    values = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [value for value in values if value.get("event") in names or (not names and "event" in value)]


def read_table_file(path: Path) -> NDArray[Any]:
    """Return the records of one file, with the dtype of its header."""
    with path.open("rb") as file:
        dtype = np.dtype([(name, code) for name, code in json.loads(file.readline())["dtype"]])
        content = file.read()
    return np.frombuffer(content[: len(content) - len(content) % dtype.itemsize], dtype)


def read_node_records(recording: Path, name: str) -> NDArray[Any]:
    """Wait for the file of the recording's only agent; return its records."""
    return read_table_file(wait_for(lambda: next(recording.glob(f"{name}-node-*.rec"), None)))


def join_output_bytes(recording: Path, stream: str) -> bytes:
    """Return the bytes of one stream, joined from the index and log of each segment of one agent."""
    text = b""
    for path in sorted(recording.glob("output-node-*.rec"), key=_first_byte):
        index, log = read_table_file(path), path.with_suffix(".log").read_bytes()
        assert np.all(np.diff(index["time_ns"]) >= 0)
        wanted = index[index["stream"] == STREAMS.index(stream)]
        text += b"".join(log[row["offset"] : row["offset"] + row["length"]] for row in wanted)
    return text


def _first_byte(index: Path) -> int:
    with index.open("rb") as file:
        return int(json.loads(file.readline())["first_byte"])
