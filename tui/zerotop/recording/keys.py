"""Identities of GPUs and processes."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.recording.table_files import Source

GpuKey = tuple[str, int]
"""Host and the sampler's index: NVML's, and after those the instances of GPUs divided by MIG."""

ProcessKey = tuple[str, int]
"""Host and pid."""


class RankProcess(NamedTuple):
    """A rank's process on its node."""

    host: str
    pid: int
    rank: int


def identify_process(source: Source) -> RankProcess:
    """Return the rank's process that writes a table."""
    return RankProcess(source.host, source.pid, source.rank)
