"""The probe of one process: asleep until a DeepSpeed engine is made in it, and in forked children."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import Any

from zerotop_probe.inside import identity
from zerotop_probe.inside.device.allocator import ASYNC, NATIVE, AllocatorSampler, find_backend
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.device.microscope import Microscope
from zerotop_probe.inside.device.oom_recorder import OomRecorder
from zerotop_probe.inside.device.peak_counters import PeakCounters
from zerotop_probe.inside.engines import EngineRegistry
from zerotop_probe.inside.evaluation_detector import EvaluationDetector
from zerotop_probe.inside.guard import CostMeter, Guard, now, remove_hooks
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording import directory, events, redact
from zerotop_probe.recording.directory import SESSION_VARIABLE
from zerotop_probe.recording.writer import Identity

_ERROR_LENGTH = 500


class Probe:
    """State that every hook shares. ``recorder`` is None while asleep."""

    def __init__(self) -> None:
        self.meter = CostMeter()
        self.meter.report_error = self._report_error
        self.engines = EngineRegistry()
        self.recorder: Recorder | None = None
        self.evaluation: EvaluationDetector | None = None
        self.peaks: PeakCounters | None = None
        # The thread that trains. Boundaries in others (prefetching, checkpoints in the background) are not
        # its phases.
        self.training_thread = 0
        self.entered_late = False
        # The probe is to be taken out when no phase is in progress.
        self.leaving = False
        self._session = ""
        self._identity: Identity | None = None
        os.register_at_fork(after_in_child=self._reset_child)
        atexit.register(self._on_exit)

    def start_recording(self, session: str | None = None, *, late: bool = False) -> bool:
        """Creates this rank's files, once. False without a session.

        ``late``: engines may exist of which we know nothing. They are known from their next whole step on, and nothing
        is a phase before.
        """
        if self.recorder is not None:
            return True
        session = session or os.environ.get(SESSION_VARIABLE)
        if not session:
            return False
        time_ns = now()
        who = identity.read_identity(os.environ)
        self._session, self._identity = session, Identity.for_this_process("rank", who["rank"])
        self.entered_late, self.leaving = late, False
        self.training_thread = 0 if late else threading.get_ident()
        recorder = Recorder(session, self._identity, self.meter)
        self.evaluation = EvaluationDetector(recorder)
        self.recorder = recorder
        recorder.write_event(time_ns, events.HELLO, **who, **identity.read_software())
        return True

    def is_training_thread(self) -> bool:
        """Whether the caller runs in the thread whose phases are recorded."""
        return threading.get_ident() == self.training_thread

    def watch_device(self, device: int | None) -> None:
        """Begins to ask the GPU of that ordinal, if there is one and CUDA is in use."""
        if self.recorder is None or self.recorder.device is not None or device is None:
            return
        assert self._identity is not None
        torch = sys.modules["torch"]
        kind = find_backend(torch)
        allocator = self._make_allocator(torch, device, kind) if kind in (NATIVE, ASYNC) else None
        clock = DeviceClock(self._session, self._identity, device, torch.cuda, self.meter)
        memory, write_event = torch.cuda.memory, self.recorder.write_event
        refusal = "" if kind == NATIVE else f"PyTorch keeps no history of this job's allocator ({kind})."
        microscope = Microscope(self._session, self._identity, device, memory, write_event, self.meter, refusal)
        self.recorder.device = RankDevice(allocator, clock, microscope)
        if kind == NATIVE and self.peaks is not None:
            Guard("out of memory", self.meter).run(OomRecorder(self.recorder, self.peaks, self.meter).start_listening)
        self.recorder.device.start_ticker(self.recorder.stack, self.meter)

    def _make_allocator(self, torch: Any, device: int, kind: str) -> AllocatorSampler:
        assert self._identity is not None
        windows = os.environ.get(directory.PHASE_PEAKS_VARIABLE) != "0"
        # Those of an entry before are kept: what the job sees of its peaks rests on them.
        kept = self.peaks
        self.peaks = peaks = kept or PeakCounters(torch._C, device)
        reads = (peaks.read_and_reset if windows else peaks.read_stats, peaks.read_stats)
        if windows and kept is None:
            peaks.install_functions()
        blocks = kind == NATIVE
        return AllocatorSampler(self._session, self._identity, device, reads, self.meter, windows=windows, has_blocks=blocks)

    def _report_error(self, where: str, error: BaseException) -> None:
        if self.recorder is not None:
            # An outer phase may never hear of its end now; what follows begins with a clean stack.
            self.recorder.stack.clear()
            self.recorder.write_event(now(), events.PROBE_ERROR, where=where, error=_format_error(error))
        if os.environ.get("PYTHONZEROTOP_DEBUG") == "1":
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            sys.stderr.write(f"zerotop: {where} is no longer measured\n" + "".join(lines))

    def _on_exit(self) -> None:
        """The interpreter ends in good order."""
        if self.recorder is not None:
            Guard("exit", self.meter).run(self._write_goodbye, self.recorder)

    def _write_goodbye(self, recorder: Recorder) -> None:
        if recorder.device is not None:
            recorder.device.stop_ticker()
        if self.evaluation is not None:
            self.evaluation.close()
        recorder.write_cost(now(), at_once=True)
        recorder.write_event(now(), events.GOODBYE, lost=recorder.lost_records)

    @property
    def session(self) -> str:
        """Where this process is recorded, "" while it is not."""
        return self._session if self.recorder is not None else ""

    def leave_process(self) -> None:
        """Takes the probe out of this process, which goes on. To be called while no phase is in progress.

        What the job sees of the allocator's peaks goes on being put right, for ours have begun anew in between.
        """
        recorder, self.recorder = self.recorder, None
        errors = remove_hooks()
        self.leaving, self.engines = False, EngineRegistry()
        if recorder is None:
            return
        if recorder.device is not None:
            recorder.device.stop_ticker()
        if self.evaluation is not None:
            self.evaluation.close()
            self.evaluation = None
        recorder.write_cost(now(), at_once=True)
        for error in errors:
            recorder.write_event(now(), events.PROBE_ERROR, where="leaving", error=_format_error(error))
        recorder.write_event(now(), events.LEFT, lost=recorder.lost_records)
        recorder.close()

    def _reset_child(self) -> None:
        """A child has these descriptors too; it sleeps until it makes an engine of its own."""
        recorder, self.recorder, self.evaluation = self.recorder, None, None
        if self.peaks is not None:
            self.peaks.restore_functions()
            self.peaks = None
        if recorder is not None:
            recorder.close()
            self.engines = EngineRegistry()


def _format_error(error: BaseException) -> str:
    return redact.redact_text(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]


def find_ordinal(device: Any) -> int | None:
    """The ordinal of a torch CUDA device once CUDA is in use here, else None. Never initializes CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", "") != "cuda" or not torch.cuda.is_initialized():
        return None
    return int(device.index if device.index is not None else torch.cuda.current_device())
