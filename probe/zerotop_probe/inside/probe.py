"""The probe of one process: idle until something trains, and idle again in forked children."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from zerotop_probe.inside import native
from zerotop_probe.inside.changes.graph_replays import ReplayCounter
from zerotop_probe.inside.changes.setting_lines import SettingLines
from zerotop_probe.inside.changes.training_watch import TrainingWatch
from zerotop_probe.inside.costly_modes.cache_clearing import CacheClearing
from zerotop_probe.inside.costly_modes.debug_modes import DebugModes
from zerotop_probe.inside.costly_modes.unused_graphs import GraphWatch
from zerotop_probe.inside.counting import make_counting
from zerotop_probe.inside.device.allocator import ASYNC, NATIVE, AllocatorSampler, find_backend
from zerotop_probe.inside.device.cuda_events import DeviceClock
from zerotop_probe.inside.device.gpu import RankDevice
from zerotop_probe.inside.device.microscope import StepMicroscope
from zerotop_probe.inside.device.peak_counters import PeakCounters
from zerotop_probe.inside.device.stream_waits import StreamWaitCounter
from zerotop_probe.inside.engines import EngineRegistry
from zerotop_probe.inside.evaluation_detector import EvaluationDetector
from zerotop_probe.inside.growing_containers.container_finder import ContainerFinder
from zerotop_probe.inside.guard import CostMeter, Guard, now, remove_hooks
from zerotop_probe.inside.inspection import identity
from zerotop_probe.inside.inspection.training_library import TrainingLibrary
from zerotop_probe.inside.interpreter.prompt_lock import restore_interval
from zerotop_probe.inside.interpreter.quick_exit import watch_quick_exit
from zerotop_probe.inside.memory_lines.line_finder import LineFinder
from zerotop_probe.inside.node_start import start_part
from zerotop_probe.inside.oom_recorder import OomRecorder
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.stacks import busy_threads, stack_sampler
from zerotop_probe.inside.stacks.own_lines import OwnLines
from zerotop_probe.inside.stacks.paths import name_own_file
from zerotop_probe.inside.stacks.saving_lines import SavingLines
from zerotop_probe.inside.ticker import Ticker
from zerotop_probe.recording import directory, events, redact
from zerotop_probe.recording.interruptions import is_interruption
from zerotop_probe.recording.node_part import find_folder
from zerotop_probe.recording.tables import UNKNOWN
from zerotop_probe.recording.writer import Identity

_ERROR_LENGTH = 500


class Probe:
    """The state that all hooks share. ``recorder`` is None while idle."""

    def __init__(self) -> None:
        self.meter = CostMeter()
        self.meter.report_error = self._report_error
        self.meter.forget_phases = self._forget_phases
        self.counting = make_counting()
        self.engines = EngineRegistry()
        self.library = TrainingLibrary()
        self.debug_modes = DebugModes(self.meter)
        self.cache_clearing = CacheClearing(self.meter)
        self.saving_lines = SavingLines(self.meter)
        self.unused_graphs = GraphWatch(self.meter)
        self.setting_lines = SettingLines(self.meter)
        self.watch = TrainingWatch(self.meter, self.setting_lines)
        self.watch.find_thread = lambda: self.training_thread
        self.graph_replays = ReplayCounter(self.meter)
        # Called as soon as the process makes a DeepSpeed engine: the hooks on other loops remove themselves.
        self.retire_loops: Callable[[], None] = lambda: None
        self.recorder: Recorder | None = None
        self.evaluation: EvaluationDetector | None = None
        self.peaks: PeakCounters | None = None
        # The thread that trains. Calls in other threads (prefetching, background checkpoints) are no phases.
        self.training_thread = 0
        self.entered_late = False
        # Remove the probe as soon as no phase is in progress.
        self.leaving = False
        self._recording = ""
        self._identity: Identity | None = None
        self._stack_sampler: stack_sampler.StackSampler | None = None
        self._stack_ticker: Ticker | None = None
        self._thread_ticker: Ticker | None = None
        self._watches_exit = False
        self._ended: Recorder | None = None  # whose goodbye was written
        os.register_at_fork(after_in_child=self._reset_child)
        atexit.register(self._on_exit)

    def start_recording(self, recording: str | None = None, *, late: bool = False) -> bool:
        """Create this rank's files, once. Return False without a recording.

        ``late``: unknown engines may exist already. Each is adopted at its next whole step; nothing before that is a phase.
        """
        if self.recorder is not None:
            return True
        if recording is None:
            start_part(os.environ)  # here, if this rank got its number only after it had imported PyTorch, as on Ray
            recording = find_folder(os.environ)
        if not recording:
            return False
        time_ns = now()
        place = identity.read_identity(os.environ)
        self._recording, self._identity = recording, Identity.for_this_process("rank", place["rank"])
        self.entered_late, self.leaving = late, False
        self.training_thread = 0 if late else threading.get_ident()
        recorder = Recorder(recording, self._identity, self.meter, self.counting)
        self.evaluation = EvaluationDetector(recorder)
        self.recorder = recorder
        try:
            self._introduce(recorder, time_ns, place)
        except BaseException as error:
            if is_interruption(error):  # the next hook begins again
                self.recorder = self.evaluation = None
                self._stop_threads(recorder)
                recorder.close()
            raise
        if not late:  # else no hook is in progress
            self.meter.move_to_one_time(now() - time_ns)
        return True

    def _introduce(self, recorder: Recorder, time_ns: int, place: dict[str, Any]) -> None:
        watches = {"watches_threads": busy_threads.can_watch() and self._wants_stacks()}
        if not self._watches_exit:
            self._watches_exit = True
            watch_quick_exit(self._on_exit, self._note_exit)
        code = {"native": native.counted_steps is not None}
        recorder.write_event(time_ns, events.Hello, **place, **identity.read_software(), **watches, **code)
        Guard(stack_sampler.NAME, self.meter).run(self._sample_stacks, recorder)

    def _wants_stacks(self) -> bool:
        return directory.read_recording_info(self._recording).get(directory.STACKS_SETTING) is not False

    def _sample_stacks(self, recorder: Recorder) -> None:
        wants_stacks = self._wants_stacks()
        self.debug_modes.begin_recording(recorder.write_event, names_lines=wants_stacks)
        self.cache_clearing.begin_recording(recorder.write_event, names_lines=wants_stacks)
        self.saving_lines.begin_recording(recorder.write_event, names_lines=wants_stacks)
        self.unused_graphs.begin_recording(recorder.write_event, names_lines=wants_stacks)
        self.graph_replays.begin_recording(recorder.write_event, names_lines=wants_stacks)
        recorder.costs.write_more = self.debug_modes.write_changes
        recorder.costs.compilations.name_file = name_own_file
        self.watch.begin_recording(recorder.write_event, names_lines=wants_stacks)
        self.watch.read_memory = lambda: (
            (recorder.device.held_bytes, recorder.device.peak_bytes) if recorder.device is not None else (UNKNOWN, UNKNOWN)
        )
        recorder.followers.append(self.watch)
        if wants_stacks:
            recorder.followers.append(ContainerFinder(recorder.write_event, self.meter))
            threads = busy_threads.BusyThreads(recorder.write_event, lambda: self.training_thread)
            self._stack_sampler = sampler = stack_sampler.StackSampler(
                recorder, lambda: self.training_thread, self.meter, threads.may_be_busy
            )
            self._stack_ticker = Ticker(recorder.stack, stack_sampler.NAME, sampler.look, self.meter, wait=sampler.wait)
            self._stack_ticker.start()
            if busy_threads.can_watch():
                self._thread_ticker = Ticker(recorder.stack, busy_threads.NAME, threads.look, self.meter)
                self._thread_ticker.start()

    def _stop_threads(self, recorder: Recorder) -> None:
        if recorder.device is not None:
            recorder.device.stop_tickers()
        if self._stack_ticker is not None and self._stack_sampler is not None:
            self._stack_ticker.stop()
            self._stack_sampler.finish()
        if self._thread_ticker is not None:
            self._thread_ticker.stop()
        self._stack_ticker = self._stack_sampler = self._thread_ticker = None

    def claim_for_deepspeed(self) -> None:
        """Leave this process to the hooks on DeepSpeed's engines, which see everything."""
        if not self.engines.belongs_to_deepspeed:
            self.engines.belongs_to_deepspeed = True
            self.retire_loops()

    def is_training_thread(self) -> bool:
        """Return whether the caller runs in the thread that trains."""
        return threading.get_ident() == self.training_thread

    def watch_device(self, device: int | None) -> None:
        """Begin to sample the GPU of that ordinal, if there is one and CUDA is in use."""
        if self.recorder is None or self.recorder.device is not None or device is None:
            return
        assert self._identity is not None
        torch = sys.modules["torch"]
        kind = find_backend(torch)
        allocator = self._make_allocator(torch, device, kind) if kind in (NATIVE, ASYNC) else None
        clock = DeviceClock(self.recorder.files, device, torch.cuda, self.meter, torch._C)
        memory, write_event = torch.cuda.memory, self.recorder.write_event
        refusal = "" if kind == NATIVE else f"PyTorch keeps no history of this job's allocator ({kind})."
        microscope = StepMicroscope(self._recording, self._identity, device, memory, write_event, self.meter, refusal)
        can_find = kind == NATIVE and microscope.history.can_ask and self._wants_stacks()
        finder = LineFinder(device, memory, microscope.history, write_event, self.meter) if can_find else None
        waits = StreamWaitCounter(torch.cuda, device, write_event, self.meter)
        self.recorder.device = RankDevice(allocator, clock, microscope, finder, waits)
        self.recorder.is_quick = False
        self.counting.stop()
        if kind == NATIVE and self.peaks is not None:
            Guard("out of memory", self.meter).run(
                OomRecorder(self.recorder, self.peaks, self.watch, self.unused_graphs, self.meter).start_listening
            )
        self.recorder.device.start_tickers(self.recorder.stack, self.meter)

    def _make_allocator(self, torch: Any, device: int, kind: str) -> AllocatorSampler:
        assert self.recorder is not None
        windows = os.environ.get(directory.PHASE_PEAKS_VARIABLE) != "0"
        # Counters of an earlier entry are reused: the peaks that the job sees depend on them.
        existing = self.peaks
        self.peaks = peaks = existing or PeakCounters(torch._C, device)
        reads = (peaks.read_and_reset if windows else peaks.read_stats, peaks.read_stats)
        if windows and existing is None:
            peaks.install_functions()
        blocks = kind == NATIVE
        return AllocatorSampler(self.recorder.files, device, reads, self.meter, windows=windows, has_blocks=blocks)

    def _report_error(self, where: str, error: BaseException) -> None:
        if self.recorder is not None:
            # The hook that would end an outer phase may be disabled now: start again with an empty stack.
            self.recorder.stack.clear()
            self.counting.stop()
            self.recorder.last_forward = None
            self.recorder.write_event(now(), events.ProbeError, where=where, error=_format_error(error))
        if os.environ.get("PYTHONZEROTOP_DEBUG") == "1":
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            sys.stderr.write(f"zerotop: {where} is no longer measured\n" + "".join(lines))

    def _forget_phases(self, begin_ns: int, interrupted: bool) -> None:
        recorder = self.recorder
        if recorder is not None and self.is_training_thread():
            recorder.forget_phases(begin_ns, self.evaluation.span if self.evaluation is not None else None)
            if interrupted:
                recorder.write_all_spans()
        if interrupted:
            self.counting.stop()

    def _on_exit(self) -> None:
        if self.recorder is not None and self.recorder is not self._ended:
            self._ended = self.recorder
            Guard("exit", self.meter).run(self._write_goodbye, self.recorder)

    def _note_exit(self, status: int) -> None:
        recorder = self.recorder
        if recorder is not None and recorder is not self._ended:
            Guard("exit", self.meter).run(self._write_exit, recorder, status, sys._getframe())

    def _write_exit(self, recorder: Recorder, status: int, frame: FrameType) -> None:
        place = OwnLines().find_place(frame) if self._wants_stacks() else None
        recorder.write_event(now(), events.ExitCall, exit_code=status, **(place._asdict() if place is not None else {}))

    def _write_goodbye(self, recorder: Recorder) -> None:
        self._stop_threads(recorder)
        self.unused_graphs.end_series(now())
        if self.evaluation is not None:
            self.evaluation.close()
        recorder.write_all_spans()
        recorder.counted.read_peak(now())
        recorder.write_cost(now())
        recorder.write_event(now(), events.Goodbye, lost=recorder.lost_records, step=recorder.last_step)
        recorder.files.finish()

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is rank 0, or the only one."""
        return self._identity is not None and self._identity.rank <= 0

    @property
    def recording(self) -> str:
        """The recording folder of this process; empty while it is not recorded."""
        return self._recording if self.recorder is not None else ""

    def leave_process(self) -> None:
        """Remove the probe from this process, which continues. Call it while no phase is in progress.

        The replaced peak counters stay: the probe has reset the allocator's counters, so the job still needs the correction.
        """
        recorder, self.recorder = self.recorder, None
        self.counting.stop()
        errors = remove_hooks()
        self._watches_exit = False
        self.leaving, self.engines = False, EngineRegistry()
        if recorder is None:
            return
        self._stop_threads(recorder)
        self.unused_graphs.end_series(now())
        if self.evaluation is not None:
            self.evaluation.close()
            self.evaluation = None
        recorder.write_all_spans()
        recorder.counted.read_peak(now())
        recorder.write_cost(now())
        for error in errors:
            recorder.write_event(now(), events.ProbeError, where="leaving", error=_format_error(error))
        recorder.write_event(now(), events.Left, lost=recorder.lost_records, step=recorder.last_step)
        recorder.close()

    def _reset_child(self) -> None:
        """Close the inherited files in a forked child, which stays idle until it trains something itself."""
        restore_interval()
        recorder, self.recorder, self.evaluation = self.recorder, None, None
        self._stack_ticker = self._stack_sampler = self._thread_ticker = None
        if self.peaks is not None:
            self.peaks.restore_functions()
            self.peaks = None
        if recorder is not None:
            recorder.close()
            self.engines = EngineRegistry()


def _format_error(error: BaseException) -> str:
    return redact.redact_text(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]


def find_ordinal(device: Any) -> int | None:
    """Return the ordinal of a torch CUDA device if CUDA is initialized, else None. Never initializes CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", "") != "cuda" or not torch.cuda.is_initialized():
        return None
    return int(device.index if device.index is not None else torch.cuda.current_device())
