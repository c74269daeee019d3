"""The black box of an out-of-memory error: what was asked for and what there was, before the exception leaves PyTorch."""

from __future__ import annotations

import sys
from typing import Any

from zerotop_probe.inside.device import allocator_snapshot
from zerotop_probe.inside.device.allocator import counters
from zerotop_probe.inside.device.peak_counters import Peaks
from zerotop_probe.inside.guard import Meter, Part, now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import PHASES

# A job that tries smaller and smaller batches may run out of memory many times.
_MOST = 100


class BlackBox:
    """Listens to PyTorch's allocator of one device; it calls when an allocation has finally failed."""

    def __init__(self, recorder: Recorder, peaks: Peaks, meter: Meter) -> None:
        self._recorder = recorder
        self._peaks = peaks
        self._part = Part("out of memory", meter)
        self._count = 0

    def listen(self) -> None:
        """There is no way to stop listening again. Does nothing in a torch without such a call."""
        attach = getattr(sys.modules["torch"]._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._called)

    def _called(self, device: int, requested: int, limit: int, free: int) -> None:
        # An exception raised here would take the place of the one that the job may be waiting for.
        if self._recorder.open and self._count < _MOST:
            self._count += 1
            self._part.run(self._record, device, requested, limit, free)

    def _record(self, device: int, requested: int, limit: int, free: int) -> None:
        recorder, span = self._recorder, self._recorder.current()
        forward = recorder.last_forward
        recorder.event(
            now(),
            events.OUT_OF_MEMORY,
            device=device,
            requested_bytes=requested,
            limit_bytes=limit,
            free_bytes=free,
            phase=PHASES[span.phase] if span else "",
            step=span.step if span else None,
            micro_step=span.micro_step if span else None,
            rows=forward.rows if forward else None,
            sequence=forward.sequence if forward else None,
            tokens=forward.tokens if forward else None,
            **self._allocator(device),
        )

    def _allocator(self, device: int) -> dict[str, Any]:
        if device != self._peaks.device:
            return {}
        allocated, _, reserved, _, _, inactive, retries, ooms = counters(self._peaks.read())
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "inactive_split_bytes": inactive,
            "largest_free_block_bytes": allocator_snapshot.largest_free_block(device),
            "retries": retries,
            "ooms": ooms,
        }
