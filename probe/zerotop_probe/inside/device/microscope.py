"""Record every allocation and free of the next steps on request: PyTorch's memory history, with Python stacks if requested.

The request is a file of this user in the recording folder. The steps cost next to nothing more; the result is written after
them on the training thread, which then pauses for a moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.device.memory_history import MOST_ENTRIES, MOST_STACK_ENTRIES, MemoryHistory
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.recording import events
from zerotop_probe.recording.clock import read_clock_pair
from zerotop_probe.recording.directory import MICROSCOPE_FILE
from zerotop_probe.recording.plain_files import is_trusted_owner, open_plain_file
from zerotop_probe.recording.tables import HISTORY, HISTORY_ACTIONS
from zerotop_probe.recording.writer import Identity, RecordWriter

_ACTION_CODES = {name: code for code, name in enumerate(HISTORY_ACTIONS)}
_MAX_STEPS = 100
_POLL_S = 0.2
_MAX_REQUEST_BYTES = 1 << 12
_IN_USE = "The job records PyTorch's memory history itself."


class StepMicroscope:
    """A tracer of one device's allocator, for a few steps at a time."""

    def __init__(
        self,
        recording: str,
        identity: Identity,
        device: int,
        memory: Any,
        write_event: Callable[..., None],
        meter: CostMeter,
        refusal: str = "",
    ) -> None:
        """``device`` is the CUDA ordinal in this process, ``memory`` is ``torch.cuda.memory``.

        ``refusal``: the reason to refuse every request, as a sentence, if PyTorch records no history of this allocator.
        """
        self._refusal = refusal
        self._recording = recording
        self._identity = identity
        self._device = device
        self._memory = memory
        self.history = MemoryHistory(memory)
        self._write_event = write_event
        self._guard = Guard("microscope", meter)
        self._request_path = os.path.join(recording, MICROSCOPE_FILE)
        # A request older than this probe is ignored: it may be hours old, from an earlier attempt of the job.
        self._request_ns = self._read_request_ns()
        self._request: tuple[int, int, bool] | None = None
        self._trace: _Trace | None = None
        self._writer: RecordWriter | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or a trace is in progress."""
        return self._trace is not None or self._request is not None

    @property
    def lost_records(self) -> int:
        """Number of records lost so far."""
        return self._writer.lost if self._writer is not None else 0

    def _read_request_ns(self) -> int:
        """Return the time of the last request in unix nanoseconds; 0 without one."""
        try:
            return os.lstat(self._request_path).st_mtime_ns
        except OSError:
            return 0

    def poll(self, step: int, micro_step: int, phase: int) -> float:
        """Read a new request, if there is one; a task of a ticker."""
        request_ns = self._read_request_ns()
        if request_ns not in (0, self._request_ns):
            self._read_request(request_ns)
        return _POLL_S

    def _read_request(self, request_ns: int) -> None:
        self._request_ns = request_ns
        # A file with any other content, or of somebody else, is ignored.
        errors = (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError)
        with contextlib.suppress(*errors), open(open_plain_file(self._request_path), "rb") as file:
            if not is_trusted_owner(os.fstat(file.fileno()).st_uid, self._recording):
                return
            request = json.loads(file.read(_MAX_REQUEST_BYTES))
            steps = min(max(1, int(request["steps"])), _MAX_STEPS)
            self._request = (int(request["request"]), steps, bool(request.get("stacks")))

    def end_step(self, step: int) -> None:
        """Begin or continue a trace at the end of every optimizer step, on the training thread."""
        if self._trace is not None:
            self._guard.run_once(self._continue_trace, self._trace, step)
        elif self._request is not None and not self.history.is_on:
            request, self._request = self._request, None
            self._guard.run_once(self._begin_trace, step, *request)

    def _begin_trace(self, step: int, request: int, steps: int, stacks: bool) -> None:
        trace = _Trace(request, steps, stacks, step + 1, now())
        why = self._refusal
        if not why and self.history.is_in_use():
            why = _IN_USE
        if why:
            self._write_outcome(trace, "refused", why=why)
            return
        trace.baseline = self._read_baseline()
        self.history.start(stacks=stacks, most_entries=MOST_STACK_ENTRIES if stacks else MOST_ENTRIES)
        self._trace = trace

    def _continue_trace(self, trace: _Trace, step: int) -> None:
        if step + 1 < trace.first_step + trace.steps:
            return
        self._trace = None
        trace.end_ns = now()
        snapshot = self.history.stop()
        if snapshot is None:
            self._write_outcome(trace, "refused", why=_IN_USE)
            return
        history = snapshot["device_traces"][self._device]
        self._write_history(trace, history)
        file = self._write_snapshot(trace, snapshot) if trace.stacks else None
        self._write_outcome(trace, "recorded", entries=len(history), snapshot=file, seconds=(now() - trace.end_ns) / 1e9)

    def _read_baseline(self) -> dict[str, int]:
        stats = self._memory.memory_stats(self._device)
        return {
            "allocated_bytes": int(stats["allocated_bytes.all.current"]),
            "requested_bytes": int(stats.get("requested_bytes.all.current", -1)),
            "reserved_bytes": int(stats["reserved_bytes.all.current"]),
        }

    def _write_history(self, trace: _Trace, history: list[dict[str, Any]]) -> None:
        if self._writer is None:
            self._writer = RecordWriter(self._recording, HISTORY, self._identity)
        pair = read_clock_pair()
        offset_ns = pair["unix_ns"] - pair["monotonic_ns"]
        for entry in history:
            code = _ACTION_CODES.get(entry["action"])
            if code is not None:
                time_ns = entry["time_us"] * 1000 - offset_ns
                self._writer.write(time_ns, entry["addr"], entry["size"], trace.request, code, self._device)

    def _write_snapshot(self, trace: _Trace, snapshot: Any) -> str | None:
        """Write the file of PyTorch's memory viewer beside the recording. zerotop itself never reads it."""
        name = f"microscope-{self._identity.file_stem}-{trace.request}.pickle"
        try:
            with open(os.path.join(self._recording, name), "xb") as file:
                pickle.dump(snapshot, file)
        except OSError:
            return None
        return name

    def _write_outcome(self, trace: _Trace, state: str, **outcome: Any) -> None:
        end_ns = trace.end_ns or trace.begin_ns
        facts = {"first_step": trace.first_step, "steps": trace.steps, "begin_ns": trace.begin_ns, "end_ns": end_ns}
        self._write_event(
            now(), events.Microscope, request=trace.request, state=state, **facts, baseline=trace.baseline, **outcome
        )

    def finish(self) -> None:
        """Give up the trace in progress, because the recording ends."""
        if self._trace is not None:
            self._trace = None
            self._guard.run(self.history.stop, False)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Trace:
    """A request in progress."""

    def __init__(self, request: int, steps: int, stacks: bool, first_step: int, begin_ns: int) -> None:
        self.request = request
        self.steps = steps
        self.stacks = stacks
        self.first_step = first_step
        self.begin_ns = begin_ns
        self.end_ns = 0
        self.baseline: dict[str, int] = {}
