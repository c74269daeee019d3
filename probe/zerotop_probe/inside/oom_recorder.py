"""Record an out-of-memory error before its exception leaves PyTorch: the request, free memory and allocator counters."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from zerotop_probe.inside.changes.training_watch import TrainingWatch
from zerotop_probe.inside.costly_modes.unused_graphs import GraphWatch
from zerotop_probe.inside.device import allocator_snapshot
from zerotop_probe.inside.device.allocator import extract_counters
from zerotop_probe.inside.device.peak_counters import PeakCounters
from zerotop_probe.inside.growing_containers.names import list_variables
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.inspection.batch_shape import measure_batch
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording import events
from zerotop_probe.recording.interruptions import hide_frames
from zerotop_probe.recording.tables import PHASES

# A job that tries ever smaller batches may run out of memory many times; tensors are counted the first few times.
_MAX_EVENTS, _MAX_COUNTS = 100, 3


class OomRecorder:
    """An observer of PyTorch's allocator on one device, called when an allocation has finally failed."""

    def __init__(
        self, recorder: Recorder, peaks: PeakCounters, watch: TrainingWatch, graphs: GraphWatch, meter: CostMeter
    ) -> None:
        self._recorder = recorder
        self._peaks = peaks
        self._watch = watch
        self._graphs = graphs
        self._guard = Guard("out of memory", meter)
        self._count_guard = Guard("tensors at a failure", meter)
        self._event_count = 0

    def start_listening(self) -> None:
        """Register the observer, which PyTorch cannot remove again. Without effect in a torch without observers."""
        attach = getattr(sys.modules["torch"]._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._on_out_of_memory)

    def _on_out_of_memory(self, device: int, requested: int, limit: int, free: int) -> None:
        # An exception raised here would replace the one that the job may handle; only a signal handler of the job may do so.
        if self._recorder.is_open and self._event_count < _MAX_EVENTS:
            self._event_count += 1
            try:
                self._guard.run(self._record_failure, device, requested, limit, free)
            except BaseException as error:
                hide_frames(error)
                raise

    def _record_failure(self, device: int, requested: int, limit: int, free: int) -> None:
        recorder, span = self._recorder, self._recorder.current_span()
        counted = recorder.counted.unrecorded_step
        step = span.step if span else counted[1] if counted else None
        # In a counted step it is that of an earlier step: then the batch is looked for on the stack.
        # An evaluation is recorded in any step.
        forward, begun = recorder.last_forward, recorder.stack[0].begin_ns if recorder.stack else now()
        if counted and forward is not None and forward.begin_ns < begun:
            forward = None
        if forward is not None:
            forward.measure_batch()
            sizes: tuple[int, int, int] | None = (forward.rows, forward.sequence, forward.tokens)
        else:
            sizes = find_batch(self._watch.find_frame())
        if self._event_count <= _MAX_COUNTS and device == self._peaks.device:
            self._count_guard.run_once(self._watch.count_at_failure, step or 0)
        graphs = self._graphs.describe_evaluation(begun)
        recorder.write_event(
            now(),
            events.OutOfMemory,
            device=device,
            requested_bytes=requested,
            limit_bytes=limit,
            free_bytes=free,
            phase=PHASES[span.phase] if span else "",
            step=step,
            micro_step=span.micro_step if span else None,
            rows=sizes[0] if sizes else None,
            sequence=sizes[1] if sizes else None,
            tokens=sizes[2] if sizes else None,
            **({"evaluation_graphs": graphs} if graphs is not None else {}),
            **self._read_allocator(device),
        )

    def _read_allocator(self, device: int) -> dict[str, Any]:
        if device != self._peaks.device:
            return {}
        allocated, _, reserved, _, _, inactive, retries, ooms = extract_counters(self._peaks.read_stats())
        return {
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            "inactive_split_bytes": inactive,
            "largest_free_block_bytes": allocator_snapshot.find_largest_free(device),
            "retries": retries,
            "ooms": ooms,
        }


def find_batch(frame: FrameType | None) -> tuple[int, int, int] | None:
    """Return rows, sequence length and tokens of the token ids in variables on a stack; None unless all are of one size."""
    torch, paths = sys.modules["torch"], PathNames.for_this_process()
    sizes: set[tuple[int, int, int]] = set()
    while frame is not None:
        file = paths.name_file(frame.f_code.co_filename)
        if file is not None and file.is_own:
            for _, value in list_variables(frame):
                within = list(value.values()) if isinstance(value, dict) else [value]
                ids = [one for one in within if type(one) is torch.Tensor and one.dim() == 2 and one.dtype == torch.int64]
                sizes |= {measure_batch((one,), {}) for one in ids if one.is_cuda}
        frame = frame.f_back
    return next(iter(sizes)) if len(sizes) == 1 else None
