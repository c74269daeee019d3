"""Write the ranks' records from shared memory to the recording, five or ten times a second.

It is a separate thread: a stalled file system stops only this thread, while the ranks' rings fill.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from zerotop_probe.outside.sampling.stuck.data_waits import DataWaits
from zerotop_probe.outside.sampling.stuck.loader_watcher import Waiting
from zerotop_probe.outside.sampling.stuck.stuck_rank_watcher import Heard
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.rings import shared_memory
from zerotop_probe.recording.rings.ring_drainer import RingDrainer
from zerotop_probe.recording.rings.shared_memory import OWNER_FILE, Ring

# Passes are as frequent as the sampler's ticks while few ranks write; each costs about as much as writing the records.
_PERIOD_S = 0.1
_FEW_RINGS, _LONG_PERIOD_S = 4, 0.2
# Records that waited for longer are reported.
_LATE_NS = 2_000_000_000


class Report(NamedTuple):
    """Functions to call when records were written late, and when they cannot be written."""

    write: Callable[..., object]  # with the time, the class of an event, and its fields
    on_error: Callable[[str, BaseException], None]


class _CollectedRing:
    """A ring that this process has claimed."""

    def __init__(self, ring: Ring) -> None:
        """Raise ValueError, KeyError or TypeError if the ring is damaged."""
        header = json.loads(ring.read_declarations().splitlines()[0])
        self.rank = int(header["header"]["writer"]["rank"])
        self.heard = Heard(self.rank, int(header["header"]["writer"]["pid"]), time.monotonic())
        self.recording = str(header["session"])
        self.ring = ring
        self._waits = DataWaits()
        self._drainer = RingDrainer(ring, self.recording, self._waits.add_records)
        self._written_ns = ring.read_pass()[0]
        self._error = 0
        self.is_over = False
        """Whether the writer is gone and all its records are written, or the recording was deleted."""

    def collect(self, report: Report | None = None, *, is_closing: bool = False) -> None:
        """Write the new records. Errors are noted in the ring, where the records stay for the next time.

        ``is_closing``: there will be no next time, so a writer that is gone must be noticed now.
        """
        begin_ns = time.monotonic_ns()
        is_last, error = False, 0
        try:
            is_idle = not self._drainer.drain(begin_ns)
            if not is_idle:
                self.heard = self.heard._replace(time_s=begin_ns / 1e9)
            if (is_idle or is_closing) and not self.ring.has_writer():
                is_last = True
                self._drainer.drain(begin_ns, is_final=True)
        except OSError as reason:
            error = reason.errno or errno.EIO
        if error and not os.path.exists(os.path.join(self.recording, SESSION_FILE)):
            is_last, error = True, 0
        end_ns = time.monotonic_ns()
        self.ring.note_pass(end_ns, error)
        if error:
            if error != self._error and report is not None:
                report.on_error("records", OSError(f"those of rank {self.rank} wait in memory: {os.strerror(error)}"))
            self._error = error
            return
        waited_ns, self._written_ns = end_ns - self._written_ns, end_ns
        if waited_ns > _LATE_NS and report is not None:
            why = os.strerror(self._error) if self._error else "the recording's file system did not respond"
            facts = {"rank": self.rank, "seconds": waited_ns / 1e9, "why": why}
            report.write(time.monotonic_ns(), events.RecordsLate, **facts)
        self._error = 0
        self.is_over = is_last

    def describe_wait(self) -> Waiting:
        """Return whether the rank waits for data, or may do so."""
        waits = self._waits
        return Waiting(self.rank, self.heard.pid, waits.is_waiting(), waits.has_pauses(), waits.is_silent())

    def close(self) -> None:
        """Release the ring, and delete it once it is over."""
        self._drainer.close()
        if self.is_over:
            self.ring.remove()
        self.ring.close()


def _claim_ring(path: str) -> _CollectedRing | None:
    """Return a ring that nobody else drains; None if there is none."""
    try:
        ring = Ring.open(path)
    except (OSError, ValueError):
        return None
    if ring.try_claim():
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            return _CollectedRing(ring)
    ring.close()
    return None


class RingCollector(threading.Thread):
    """Drains all rings of a recording on this node."""

    def __init__(self, recording: str, report: Report) -> None:
        """Offer shared memory to the ranks from now on; without it they write to the recording themselves."""
        super().__init__(name="rings", daemon=True)
        self._report = report
        self._recording = recording
        self._folder: str | None = None
        self._owner: int | None = None
        self._rings: dict[str, _CollectedRing] = {}
        self._is_closing = threading.Event()
        self._claim()

    def _claim(self) -> None:
        self._folder = shared_memory.offer_folder(self._recording)
        self._owner = None if self._folder is None else _claim_folder(self._folder, self._recording)

    def run(self) -> None:
        """Drain until :meth:`finish`; if another process drains this recording, wait for its end."""
        with contextlib.suppress(RuntimeError):  # too little memory for another thread; the next sampler adopts them
            threading.Thread(target=adopt_leftovers, args=(self._folder,), name="leftovers", daemon=True).start()
        is_closing = False
        while not is_closing:
            is_closing = self._is_closing.wait(_PERIOD_S if len(self._rings) <= _FEW_RINGS else _LONG_PERIOD_S)
            if self._owner is None:
                self._claim()
            if self._owner is not None and self._folder is not None:
                self._collect_all(self._folder, is_closing)
        for collected in self._rings.values():
            collected.close()
        if self._owner is not None and self._folder is not None:
            shared_memory.remove_folder(self._folder)
            os.close(self._owner)

    def _collect_all(self, folder: str, is_closing: bool) -> None:
        for path in shared_memory.list_rings(folder):
            if path not in self._rings and (found := _claim_ring(path)) is not None:
                self._rings[path] = found
        for path, collected in list(self._rings.items()):
            collected.collect(self._report, is_closing=is_closing)
            if collected.is_over:
                self._rings.pop(path).close()

    def list_heard(self) -> list[Heard]:
        """Return when each rank wrote its last record. Any thread may ask."""
        return [collected.heard for collected in list(self._rings.values())]

    def list_waiting(self) -> list[Waiting]:
        """Return whether each rank waits for data. Any thread may ask."""
        return [collected.describe_wait() for collected in list(self._rings.values())]

    def finish(self, timeout_s: float) -> None:
        """Drain once more and stop; wait at most ``timeout_s``. Ranks that still run write to the recording themselves."""
        self._is_closing.set()
        if self.ident is not None:
            self.join(timeout_s)


def _claim_folder(folder: str, recording: str) -> int | None:
    """Become the sampler that drains this folder; None while another one does."""
    path = os.path.join(folder, OWNER_FILE)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise FileNotFoundError("another process has just removed the folder")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, os.fsencode(os.path.abspath(recording)), 0)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def adopt_leftovers(own_folder: str | None = None) -> None:
    """Write the records that killed samplers and killed ranks have left in shared memory, and remove the memory."""
    for folder in glob.glob(os.path.join(shared_memory.MEMORY_ROOT, f"zerotop-{os.geteuid()}-*")):
        owner = None
        if folder != own_folder and shared_memory.is_private(folder):
            owner = _claim_folder(folder, _read_recording(folder))
        if owner is None:
            continue
        for path in shared_memory.list_rings(folder):
            if (found := _claim_ring(path)) is not None:
                if not found.ring.has_writer():
                    found.collect(is_closing=True)
                found.close()
        shared_memory.remove_folder(folder)
        os.close(owner)


def _read_recording(folder: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(folder, OWNER_FILE), "rb") as file:
        return os.fsdecode(file.read())
    return ""
