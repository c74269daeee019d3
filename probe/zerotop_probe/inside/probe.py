"""The probe of one process: asleep until a DeepSpeed engine is made in it, and in forked children."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import Any

from zerotop_probe.inside import identity
from zerotop_probe.inside.device.allocator import ASYNC, NATIVE, Allocator, backend
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.gpu import Device
from zerotop_probe.inside.device.microscope import Microscope
from zerotop_probe.inside.device.oom_recorder import BlackBox
from zerotop_probe.inside.device.peak_counters import Peaks
from zerotop_probe.inside.engines import Engines
from zerotop_probe.inside.evaluation_detector import Guess
from zerotop_probe.inside.guard import Meter, Part, now, remove_all
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.recording import directory, events, redact
from zerotop_probe.recording.directory import ENVIRONMENT
from zerotop_probe.recording.writer import Identity

_ERROR_LENGTH = 500


class Probe:
    """State that every hook shares. ``recorder`` is None while asleep."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.meter.report = self._report
        self.engines = Engines()
        self.recorder: Recorder | None = None
        self.guess: Guess | None = None
        self.peaks: Peaks | None = None
        # The thread that trains. Boundaries in others (prefetching, checkpoints in the background) are not
        # its phases.
        self.thread = 0
        self.late = False
        # The probe is to be taken out when no phase is in progress.
        self.leaving = False
        self._session = ""
        self._identity: Identity | None = None
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._leave)

    def wake(self, session: str | None = None, *, late: bool = False) -> bool:
        """Creates this rank's files, once. False without a session.

        ``late``: engines may exist of which we know nothing. They are known from their next whole step on, and nothing
        is a phase before.
        """
        if self.recorder is not None:
            return True
        session = session or os.environ.get(ENVIRONMENT)
        if not session:
            return False
        time_ns = now()
        who = identity.who(os.environ)
        self._session, self._identity = session, Identity.of_this_process("rank", who["rank"])
        self.late, self.leaving = late, False
        self.thread = 0 if late else threading.get_ident()
        recorder = Recorder(session, self._identity, self.meter)
        self.guess = Guess(recorder)
        self.recorder = recorder
        recorder.event(time_ns, events.HELLO, **who, **identity.software())
        return True

    def in_training_thread(self) -> bool:
        """Whether the caller runs in the thread whose phases are recorded."""
        return threading.get_ident() == self.thread

    def watch_device(self, device: int | None) -> None:
        """Begins to ask the GPU of that ordinal, if there is one and CUDA is in use."""
        if self.recorder is None or self.recorder.device is not None or device is None:
            return
        assert self._identity is not None
        torch = sys.modules["torch"]
        kind = backend(torch)
        allocator = self._read_allocator(torch, device, kind) if kind in (NATIVE, ASYNC) else None
        clock = DeviceClock(self._session, self._identity, device, torch.cuda, self.meter)
        memory, write_event = torch.cuda.memory, self.recorder.event
        refusal = "" if kind == NATIVE else f"PyTorch keeps no history of this job's allocator ({kind})."
        microscope = Microscope(self._session, self._identity, device, memory, write_event, self.meter, refusal)
        self.recorder.device = Device(allocator, clock, microscope)
        if kind == NATIVE and self.peaks is not None:
            Part("out of memory", self.meter).run(BlackBox(self.recorder, self.peaks, self.meter).listen)
        self.recorder.device.start_ticker(self.recorder.stack, self.meter)

    def _read_allocator(self, torch: Any, device: int, kind: str) -> Allocator:
        assert self._identity is not None
        windows = os.environ.get(directory.PHASE_PEAKS) != "0"
        # Those of an entry before are kept: what the job sees of its peaks rests on them.
        kept = self.peaks
        self.peaks = peaks = kept or Peaks(torch._C, device)
        reads = (peaks.read_and_reset if windows else peaks.read, peaks.read)
        if windows and kept is None:
            peaks.install()
        blocks = kind == NATIVE
        return Allocator(self._session, self._identity, device, reads, self.meter, windows=windows, has_blocks=blocks)

    def _report(self, where: str, error: BaseException) -> None:
        if self.recorder is not None:
            # An outer phase may never hear of its end now; what follows begins with a clean stack.
            self.recorder.stack.clear()
            self.recorder.event(now(), events.PROBE_ERROR, where=where, error=_text(error))
        if os.environ.get("PYTHONZEROTOP_DEBUG") == "1":
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            sys.stderr.write(f"zerotop: {where} is no longer measured\n" + "".join(lines))

    def _leave(self) -> None:
        """The interpreter ends in good order."""
        if self.recorder is not None:
            Part("exit", self.meter).run(self._say_goodbye, self.recorder)

    def _say_goodbye(self, recorder: Recorder) -> None:
        if recorder.device is not None:
            recorder.device.stop_ticker()
        if self.guess is not None:
            self.guess.close()
        recorder.cost(now(), at_once=True)
        recorder.event(now(), events.GOODBYE, lost=recorder.lost)

    @property
    def session(self) -> str:
        """Where this process is recorded, "" while it is not."""
        return self._session if self.recorder is not None else ""

    def leave(self) -> None:
        """Takes the probe out of this process, which goes on. To be called while no phase is in progress.

        What the job sees of the allocator's peaks goes on being put right, for ours have begun anew in between.
        """
        recorder, self.recorder = self.recorder, None
        errors = remove_all()
        self.leaving, self.engines = False, Engines()
        if recorder is None:
            return
        if recorder.device is not None:
            recorder.device.stop_ticker()
        if self.guess is not None:
            self.guess.close()
            self.guess = None
        recorder.cost(now(), at_once=True)
        for error in errors:
            recorder.event(now(), events.PROBE_ERROR, where="leaving", error=_text(error))
        recorder.event(now(), events.LEFT, lost=recorder.lost)
        recorder.close()

    def _forked(self) -> None:
        """A child has these descriptors too; it sleeps until it makes an engine of its own."""
        recorder, self.recorder, self.guess = self.recorder, None, None
        if self.peaks is not None:
            self.peaks.remove()
            self.peaks = None
        if recorder is not None:
            recorder.close()
            self.engines = Engines()


def _text(error: BaseException) -> str:
    return redact.text(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]


def attribute_device(device: Any) -> int | None:
    """The ordinal of a torch CUDA device once CUDA is in use here, else None. Never initializes CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", "") != "cuda" or not torch.cuda.is_initialized():
        return None
    return int(device.index if device.index is not None else torch.cuda.current_device())
