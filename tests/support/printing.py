"""A job that prints, recorded with the real writer."""

from __future__ import annotations

import os
import time
from pathlib import Path

from zerotop_probe.recording import directory
from zerotop_probe.recording.tables import OUTPUT, STREAMS
from zerotop_probe.recording.writer import Identity, RecordWriter, create_file


class Printing:
    """A job that prints; ``say`` returns the moment at which that was seen."""

    def __init__(self, folder: Path, pid: int = 1, path: Path | None = None) -> None:
        self.path = path or Path(directory.create_session(["train.py"], path=str(folder / "session")))
        identity = Identity.for_this_process("node")._replace(pid=pid)
        self._index = RecordWriter(str(self.path), OUTPUT, identity)
        self._log = create_file(str(self.path), f"output-{identity.file_stem}", ".log")
        self._offset = 0

    def write_unrecorded(self, data: bytes) -> None:
        """Write output without its record: a full disk may have room for the one and not for the other."""
        self._offset += os.write(self._log, data)

    def write_output(self, data: bytes, stream: str = "output", *, at_ns: int | None = None) -> int:
        """``at_ns``: when (CLOCK_MONOTONIC), if not now."""
        os.write(self._log, data)
        now = time.monotonic_ns() if at_ns is None else at_ns
        self._index.write(now, self._offset, len(data), STREAMS.index(stream), 0)
        self._offset += len(data)
        return now + time.time_ns() - time.monotonic_ns()
