"""Shortages that end a DataLoader's worker or a rank, by the messages of PyTorch and Python: shared memory, files, space."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from enum import Enum

from zerotop.analysis.failures.tracebacks import Traceback


class Short(Enum):
    """What was short."""

    SHARED_MEMORY = "shared memory"
    OPEN_FILES = "open files"
    SPACE = "space"  # on a file system
    WORKER = "worker"  # a signal killed it: the reason is elsewhere


@dataclass(frozen=True, slots=True)
class WorkerShortage:
    """One shortage, as an exception reports it."""

    kind: Short
    is_worker: bool  # a DataLoader's worker met it, not the rank itself
    folder: str = ""  # of the file that found no space, if it is known
    worker_pid: int | None = None
    signal: str = ""  # in the words of PyTorch, such as "Killed"


_OPEN_FILES = re.compile(r"received \d+ items of ancdata|Too many open files")
# PyTorch's files on /dev/shm have names such as /torch_18111_1653167000_0.
_SHARED_MEMORY = re.compile(
    r"shared memory ?\(shm\)|out of shared memory|/torch_\d+_\d+(?:_\d+)?>.*(?:No space left|Cannot allocate memory)"
    r"|unable to (?:write to|resize) file </torch_\d+"
)
_SPACE = re.compile(r"No space left on device(?:: '(?P<path>[^']+)')?")
_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pid>\d+)[^)]*\) (?:is killed by signal: (?P<signal>[A-Z][\w ]*)|exited)"
)
_WORKER_FILE = "torch/utils/data/_utils/worker.py"


def find_shortage(traceback: Traceback) -> WorkerShortage | None:
    """Return the shortage that an exception reports; None if it reports none."""
    worker = _WORKER.search(traceback.message)
    is_worker = worker is not None or any(frame.path.endswith(_WORKER_FILE) for frame in traceback.frames)
    pid = int(worker["pid"]) if worker is not None else None
    signal = (worker["signal"] or "").strip() if worker is not None else ""
    if _OPEN_FILES.search(traceback.message):
        return WorkerShortage(Short.OPEN_FILES, is_worker)
    if _SHARED_MEMORY.search(traceback.message):
        return WorkerShortage(Short.SHARED_MEMORY, is_worker, "/dev/shm", pid, signal)
    if (match := _SPACE.search(traceback.message)) is not None:
        folder = os.path.dirname(match["path"] or "")
        is_shared = folder.startswith("/dev/shm")
        return WorkerShortage(Short.SHARED_MEMORY if is_shared else Short.SPACE, is_worker, folder)
    return WorkerShortage(Short.WORKER, True, worker_pid=pid, signal=signal) if signal else None
