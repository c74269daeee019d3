"""Record the stacks of all threads of a rank that is silent, and the collectives it waits in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from zerotop_probe.inside.guard import now
from zerotop_probe.inside.recorder import Recorder
from zerotop_probe.inside.stacks.collectives import read_calls, read_collectives
from zerotop_probe.inside.stacks.frames import Stack, StackReader
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.inside.stacks.tally import format_stacks
from zerotop_probe.inside.ticker import OWN_THREADS
from zerotop_probe.recording import events
from zerotop_probe.recording.event_values import SILENT

SILENT_NS = 5_000_000_000
"""A rank is silent if nothing begins or ends for at least so long."""

_LONGEST_PAUSE_NS = 300_000_000_000
_MOST_THREADS = 24


class SilenceRecorder:
    """Writes the stacks of each silence of one process."""

    def __init__(self, recorder: Recorder, find_thread: Callable[[], int], reader: StackReader, paths: PathNames) -> None:
        """``find_thread`` returns the ident of the thread that trains."""
        self._recorder = recorder
        self._find_thread = find_thread
        self._reader = reader
        self._paths = paths
        self._begin_ns = self._next_ns = 0  # of the last silence, and when its threads are looked at next

    def record(self, where: str, begin_ns: int, step: int, time_ns: int) -> None:
        """Write the stacks of a silence at ``where`` since ``begin_ns``: the first time at once, then ever more rarely."""
        is_known = begin_ns == self._begin_ns
        if is_known and time_ns < self._next_ns:
            return
        pause_ns = min(_LONGEST_PAUSE_NS, max(SILENT_NS, (time_ns - begin_ns) // 2))
        self._begin_ns, self._next_ns = begin_ns, time_ns + pause_ns
        facts = format_stacks(self._read_threads())
        times = {"begin_ns": begin_ns, "end_ns": time_ns, "step": step, "samples": 1}
        facts["collectives"] = read_collectives()
        if is_known and any(group["waits_for"] >= 0 for group in facts["collectives"]):
            facts["calls"] = read_calls(self._paths)
        device = self._recorder.device
        facts["allocations"] = device.allocations if device is not None else None
        self._recorder.write_event(now(), events.Stacks, where=where, why=SILENT, **times, **facts)

    def _read_threads(self) -> list[tuple[Stack, dict[str, Any]]]:
        """Return the stacks of all threads but the probe's own, that of the training thread first."""
        # threading.enumerate() takes a lock, for which a rank that hangs may wait.
        known = dict(getattr(threading, "_active", {}))
        trainer, frames = self._find_thread(), sys._current_frames()
        stacks: list[tuple[Stack, dict[str, Any]]] = []
        try:
            for ident in sorted(frames, key=lambda ident: ident != trainer)[:_MOST_THREADS]:
                thread = known.get(ident)
                name = thread.name if thread is not None else f"thread {ident}"
                if not name.startswith(OWN_THREADS):
                    facts: dict[str, Any] = {"count": 1}
                    if ident != trainer:
                        facts["thread"] = name
                        # Not the property: a subclass in the job's code may override it.
                        is_daemon = getattr(thread, "_daemonic", None)
                        if is_daemon is not None:
                            facts["daemon"] = bool(is_daemon)
                    stacks.append((self._reader.read_stack(frames[ident]), facts))
        finally:
            frames.clear()  # this function's own frame is in it: a circle that would keep all others alive
        return stacks
