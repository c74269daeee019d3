"""The identity of a process that writes to a recording."""

from __future__ import annotations

import os
from typing import NamedTuple

from zerotop_probe.recording import clock


class Identity(NamedTuple):
    """The writer of a file. ``role``: "rank" (a training process), "node" (a sampler) or "control" (a zerotop command)."""

    role: str
    rank: int
    host: str
    pid: int
    start: int
    boot: str

    @classmethod
    def for_this_process(cls, role: str, rank: int = -1) -> Identity:
        """Return the identity of the calling process; ``rank`` only for role "rank"."""
        pid = os.getpid()
        return cls(role, rank, clock.read_hostname(), pid, clock.read_process_start(pid), clock.read_boot_id())

    @property
    def file_stem(self) -> str:
        """The part of a file name that identifies the writer, for example ``rank3-node1-4711``."""
        role = f"rank{self.rank}" if self.role == "rank" else self.role
        return f"{role}-{self.host}-{self.pid}"
