"""Threads that a rank starts during the run, for example by ``torch.set_num_threads()``: no environment variable helps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zerotop.analysis.findings.support.evidence import Process
from zerotop.recording.moments.at import find_cores
from zerotop.recording.samples import Samples

# The least number of new threads, also as a share of those that wait for a core: loaders and loggers start a few.
_FEWEST, _WAITING_SHARE = 2, 0.5

ADVICE = "The script starts them in mid-run, for example by torch.set_num_threads(): set it to the rank's number of cores."


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
