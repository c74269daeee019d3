"""A job that prints, recorded with the real writer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest import mock

from zerotop_probe.recording import clock, directory
from zerotop_probe.recording.tables import OUTPUT, STREAMS
from zerotop_probe.recording.writer import Identity, RecordWriter, create_file

# Its machine has run for a day longer: this one may have started a minute ago, and there is no time before that.
_LONGER_NS = 24 * 3600 * 10**9


def read_monotonic_ns() -> int:
    """Return CLOCK_MONOTONIC of the machine of a job that prints."""
    return time.monotonic_ns() + _LONGER_NS


def _read_clock_pair() -> dict[str, int]:
    return {"monotonic_ns": read_monotonic_ns(), "unix_ns": time.time_ns()}


class Printing:
    """A job that prints."""

    def __init__(self, folder: Path, pid: int = 1, path: Path | None = None) -> None:
        identity = Identity.for_this_process("node")._replace(pid=pid)
        with mock.patch.object(clock, "read_clock_pair", _read_clock_pair):
            self.path = path or Path(directory.create_recording(["train.py"], path=str(folder / "recording")))
            self._index = RecordWriter(str(self.path), OUTPUT, identity)
        self._log = create_file(str(self.path), f"output-{identity.file_stem}", ".log")
        self._offset = 0

    def write_unrecorded(self, data: bytes) -> None:
        """Write output without its record: a full disk may have room for the one and not for the other."""
        self._offset += os.write(self._log, data)

    def write_output(self, data: bytes, stream: str = "output", *, at_ns: int | None = None) -> int:
        """Return when that was seen (unix time). ``at_ns``: when (CLOCK_MONOTONIC), if not now."""
        os.write(self._log, data)
        now = read_monotonic_ns() if at_ns is None else at_ns
        self._index.write(now, self._offset, len(data), STREAMS.index(stream), 0)
        self._offset += len(data)
        return now + time.time_ns() - read_monotonic_ns()
