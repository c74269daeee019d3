"""Threads that a rank starts during the run: of a library, as by ``torch.set_num_threads()``, or Python's own."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Process
from zerotop.recording.moments.at import find_cores
from zerotop.recording.samples import Samples
from zerotop_probe.recording.events import BusyThread

# The least number of new threads, also as a share of those that wait for a core: loaders and loggers start a few.
_FEWEST, _WAITING_SHARE = 2, 0.5

# Pools have a fixed number of threads.
_POOLS = ("concurrent/futures/thread.py", "multiprocessing/pool.py")

FEWEST_ALIKE = 3
"""Python threads of one function that the job starts again and again."""
ADVICE = "The script starts them in mid-run, for example by torch.set_num_threads(): set it to the rank's number of cores."


class ThreadPlace(NamedTuple):
    """A function of the job's own that a thread runs, and a line in it at which the thread was sampled."""

    file: str
    line: int
    function: str


class StartedThreads(NamedTuple):
    """The number of a rank's threads before and after."""

    before: int
    after: int

    def find_begin(self, samples: Samples) -> int:
        """Return when the number of threads first rose (unix nanoseconds)."""
        is_more = samples.rows["thread_count"] > (self.before + self.after) / 2
        return int(samples.times[int(np.argmax(is_more))])

    def build_fix(self, process: Process, ranks: int) -> str:
        """Return the line that gives each rank of a node its share of the cores."""
        cores = find_cores(process.at, process.host) or 1
        return f"torch.set_num_threads({max(1, cores // max(1, ranks))})"


def find_started_threads(before: Samples, after: Samples) -> StartedThreads | None:
    """Return the threads that a rank started between samples; None if the waiting threads existed before."""
    if not len(before) or not len(after):
        return None
    usual, now = (int(np.median(part.rows["thread_count"])) for part in (before, after))
    waiting = float(np.median(np.nan_to_num(after.rows["waiting_cores"])))
    if usual <= 0 or now - usual < max(_FEWEST, _WAITING_SHARE * waiting):
        return None
    return StartedThreads(usual, now)


def is_in_pool(event: BusyThread) -> bool:
    """Whether a thread is one of a pool."""
    return any(frame.file in _POOLS and not frame.own for frame in event.frames)


def find_outermost(event: BusyThread) -> ThreadPlace | None:
    """Return the outermost frame of the job's own in a thread: the function that it runs; None without one, or in a pool."""
    frames = event.frames
    if is_in_pool(event):
        return None
    for stack in event.stacks:
        own = [frames[number] for number in stack.frames if 0 <= number < len(frames) and frames[number].own]
        if own and own[-1].file.isprintable() and own[-1].function.isprintable():
            return ThreadPlace(own[-1].file, own[-1].line, own[-1].function)
    return None


def count_alike(process: Process, known_ns: int) -> int:
    """Return how many threads were seen to compute in the same function of the job's own, the most of any."""
    known = [(find_outermost(event), event.tid) for event in process.events_of(BusyThread) if event.unix_ns <= known_ns]
    threads = {(place.file, place.function, tid) for place, tid in known if place is not None}
    return max(Counter(thread[:2] for thread in threads).values(), default=0)
