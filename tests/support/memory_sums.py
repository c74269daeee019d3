"""The sums of the memory screen."""

from __future__ import annotations

from zerotop.analysis.memory.memory_table import SUM_DEVICE, SUM_RESIDENT
from zerotop.analysis.views.memory_view import MemoryView


def check_memory_view(view: MemoryView) -> None:
    """Every line stands for bytes of its own, and every sum for all lines before it."""
    if view.gpu is not None:
        parts = [line for line in view.lines if not line.is_sum]
        assert sum(line.now_bytes for line in parts) == view.gpu.total_bytes
        assert (view.lines[-1].key, view.lines[-1].now_bytes) == (SUM_DEVICE, view.gpu.total_bytes)
        if view.peak is not None:
            assert sum(line.peak_bytes or 0 for line in parts) == view.peak.ledger.total_bytes == view.lines[-1].peak_bytes
        for place, line in enumerate(view.lines):
            if line.is_sum:
                assert line.now_bytes == sum(one.now_bytes for one in view.lines[:place] if not one.is_sum)
        assert view.gpu in view.gpus
    if view.host is not None:
        keys = [line.key for line in view.host_lines]
        place = keys.index(SUM_RESIDENT)
        assert sum(line.now_bytes for line in view.host_lines[:place]) == view.host.resident_bytes
        assert keys[place + 1 :] == (["workers"] if view.host.worker_bytes else [])
        assert view.host in view.hosts
