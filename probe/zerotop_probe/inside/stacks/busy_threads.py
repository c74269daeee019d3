"""Find Python threads of the job that begin to use a core: they and the training thread take turns with Python's lock.

The names of all Python threads are recorded too, because the kernel shows them under the name of the program.

While there are none, their processor time is read every 0.7 s, and nothing else. A thread that begins to compute is sampled
for a second: the lines where it is, and how long the sampler itself waits for Python's lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from zerotop_probe.inside.guard import now
from zerotop_probe.inside.stacks.frames import StackReader
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.inside.stacks.tally import Tally
from zerotop_probe.inside.ticker import OWN_THREADS
from zerotop_probe.recording import events

NAME = "busy threads"
"""The watch's name in the probe's cost and errors."""

_LOOK_S = 0.7
_SAMPLES, _SAMPLE_S = 10, 0.08
# A thread is busy from this share of a core on, and idle again below the other.
_BUSY_SHARE, _IDLE_SHARE = 0.1, 0.03
_MOST_THREADS = 32
_MOST_EVENTS = 10
_MOST_NAMES = 128
_SCHEDULING = "/proc/thread-self/schedstat"


def can_watch() -> bool:
    """Whether this Python has a lock that its threads share."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class _Use:
    """Processor time of one thread."""

    __slots__ = ("cpu_ns", "idle_ns", "is_busy")

    def __init__(self, cpu_ns: int, time_ns: int) -> None:
        self.cpu_ns = cpu_ns
        self.idle_ns = time_ns  # when it was not busy last
        self.is_busy = False


class _Look:
    """Samples of a busy thread."""

    def __init__(self, thread: threading.Thread, idle_ns: int, cpu_ns: int, time_ns: int) -> None:
        self.thread = thread
        self.idle_ns = idle_ns
        self.begin_ns, self.begin_cpu_ns = time_ns, cpu_ns
        self.cpu_ns = cpu_ns
        self.waited_ns = 0  # for Python's lock
        self.held_ns = 0  # of that, while the job's other threads computed
        self.tally = Tally(time_ns, 0)


class BusyThreads:
    """The watch of one process; :meth:`look` is the task of a ticker."""

    def __init__(self, write_event: Callable[..., None], find_thread: Callable[[], int]) -> None:
        """``find_thread`` returns the ident of the thread that trains."""
        self._write_event = write_event
        self._find_thread = find_thread
        self._reader: StackReader | None = None
        self._uses: dict[int, _Use] = {}  # by the kernel's id
        self._looked_ns = self._due_ns = 0
        self._look: _Look | None = None
        self._core_wait_ns = 0
        self._events_left = _MOST_EVENTS
        self._named: set[int] = set()  # threads whose names are recorded, by the kernel's id

    def may_be_busy(self) -> bool:
        """Whether a thread computes, or it is not known that none does. Any thread may ask."""
        is_watched = bool(self._looked_ns and self._events_left and self._look is None)
        return not is_watched or any(use.is_busy for use in list(self._uses.values()))

    def look(self, step: int = 0, micro_step: int = 0, phase: int = 0) -> float:
        """Look at all threads, or sample the busy one; return the seconds until the next look."""
        time_ns = now()
        if not self._events_left or sys.is_finalizing():
            return _LOOK_S
        if self._look is None:
            self._find_busy(time_ns)
        else:
            self._sample(self._look, time_ns)
        wait_s = _LOOK_S if self._look is None else _SAMPLE_S
        self._core_wait_ns = _read_core_wait() if self._look is not None else 0
        self._due_ns = now() + round(wait_s * 1e9)
        return wait_s

    def _find_busy(self, time_ns: int) -> None:
        is_first, elapsed_ns, self._looked_ns = not self._looked_ns, time_ns - self._looked_ns, time_ns
        self._write_names(time_ns)
        uses: dict[int, _Use] = {}
        for thread in self._list_threads():
            cpu_ns, known = _read_cpu(thread.native_id or 0), self._uses.get(thread.native_id or 0)
            use = uses[thread.native_id or 0] = known or _Use(cpu_ns, time_ns - elapsed_ns)
            # A new thread has used all of its time since the last look.
            before_ns = known.cpu_ns if known is not None else cpu_ns if is_first else 0
            share = (cpu_ns - before_ns) / max(1, elapsed_ns)
            use.cpu_ns = cpu_ns
            if share < _BUSY_SHARE:
                use.idle_ns = time_ns
            if share < _IDLE_SHARE:
                use.is_busy = False
            elif share >= _BUSY_SHARE and not use.is_busy and self._look is None:
                use.is_busy = True
                self._look = _Look(thread, use.idle_ns, cpu_ns, time_ns)
        self._uses = uses

    def _write_names(self, time_ns: int) -> None:
        """Record the names of threads that are new."""
        main, names = os.getpid(), {}
        for thread in _list_active().values():
            tid = thread.native_id
            if tid and tid != main and tid not in self._named and len(self._named) < _MOST_NAMES:
                self._named.add(tid)
                names[str(tid)] = thread.name
        if names:
            self._write_event(time_ns, events.ThreadNames, pid=main, python=names)

    def _list_threads(self) -> list[threading.Thread]:
        """Return the threads that Python code has started, without the training thread and the probe's own."""
        trainer = self._find_thread()
        threads = [thread for ident, thread in _list_active().items() if ident != trainer]
        chosen = [thread for thread in threads if thread.native_id and not thread.name.startswith(OWN_THREADS)]
        return chosen[:_MOST_THREADS]

    def _sample(self, look: _Look, time_ns: int) -> None:
        frame = sys._current_frames().get(look.thread.ident or 0)
        cpu_ns = _read_cpu(look.thread.native_id or 0)
        if frame is not None and look.thread.native_id in self._uses:
            if self._reader is None:
                self._reader = StackReader(PathNames.for_this_process())
            look.tally.add(self._reader.read_stack(frame), time_ns, 0, max(0, cpu_ns - look.cpu_ns))
        del frame
        look.cpu_ns = max(look.cpu_ns, cpu_ns)
        # A core may be waited for, too.
        waited_ns = max(0, time_ns - self._due_ns - (_read_core_wait() - self._core_wait_ns))
        look.waited_ns += waited_ns
        look.held_ns += min(waited_ns, self._read_others())
        if look.tally.samples >= _SAMPLES or not cpu_ns:
            self._look, self._looked_ns = None, time_ns
            self._uses = {tid: use for tid, use in self._uses.items() if tid != look.thread.native_id or cpu_ns}
            self._write(look, time_ns)

    def _read_others(self) -> int:
        """Return how long (ns) the job's other threads have computed since the last reading; the probe's are not known."""
        computed_ns = 0
        for tid, use in self._uses.items():
            cpu_ns = _read_cpu(tid)
            computed_ns += max(0, cpu_ns - use.cpu_ns)
            use.cpu_ns = cpu_ns
        return computed_ns

    def _write(self, look: _Look, time_ns: int) -> None:
        cores = (look.cpu_ns - look.begin_cpu_ns) / max(1, time_ns - look.begin_ns)
        if not look.tally.samples or cores < _BUSY_SHARE / 2:
            return
        self._events_left -= 1
        facts = look.tally.make_facts()
        stacks = {name: facts[name] for name in ("end_ns", "samples", "frames", "stacks")}
        times = {"begin_ns": look.idle_ns, "busy_ns": look.begin_ns}
        waited_s, held_s = (each / look.tally.samples / 1e9 for each in (look.waited_ns, look.held_ns))
        who = {"thread": look.thread.name, "tid": look.thread.native_id, "cores": cores}
        who |= {"lock_wait_s": waited_s, "held_s": held_s}
        self._write_event(time_ns, events.BusyThread, **who, **times, **stacks)


def _list_active() -> dict[int, threading.Thread]:
    """Return the threads that Python code has started, by ident. ``threading.enumerate()`` would take a lock."""
    return dict(getattr(threading, "_active", {}))


def _read_cpu(tid: int) -> int:
    """Return the processor time of a thread of this process; 0 if it has ended."""
    try:
        # The kernel's id of another thread's CPU clock: see linux/posix-timers_types.h.
        return time.clock_gettime_ns((~tid << 3) | 6)
    except OSError:
        return 0


def _read_core_wait() -> int:
    """Return how long (ns) this thread has been runnable without a core; 0 if the kernel does not count it."""
    try:
        with open(_SCHEDULING, "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
