"""What the threads of a rank are: from their names, from Python's, and from the library in which they sleep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.code_line import find_own
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_event, keep
from zerotop.recording.table_files import Source
from zerotop_probe.recording.events import BusyThread, ThreadNames

MAIN = "main thread"
OPENMP = "OpenMP team"
UNNAMED = "unnamed"
POOL = "pool worker"
"""Threads without a name that compute at the same time, which Python code alone cannot: OpenMP, BLAS, a pool of threads."""

_PARALLEL_CORES = 1.2  # at a time; Python code computes in one thread at a time
_BY_NAME = (  # beginnings of names that the kernel shows
    ("pt_autograd", "autograd"),
    ("pt_nccl", "NCCL"),
    ("nccl", "NCCL"),
    ("NCCL", "NCCL"),
    ("pt_gloo", "gloo"),
    ("gloo", "gloo"),
    ("pt_tcpstore", "TCP store"),
    ("pt_data_pin", "pin memory"),
    ("cuda", "CUDA driver"),
)
_OWN = "zerotop-"
_BY_PYTHON_NAME = (("_pin_memory_loop", "pin memory"), (_OWN, "zerotop"))
_INTERPRETER = b"python"  # begins the name of threads without one of their own
_SAME_USE = 0.1  # two measurements of a thread's cores differ by less than this share


@dataclass(frozen=True)
class ThreadKinds:
    """The recorded facts about the threads of one process, by thread id."""

    pid: int
    python: Mapping[int, str] = field(default_factory=dict)
    openmp: frozenset[int] = frozenset()
    lines: Mapping[int, str] = field(default_factory=dict)  # where Python threads computed: ``train.py:17``
    is_parallel: bool = False  # threads without a name have computed at the same time

    @property
    def own(self) -> list[int]:
        """The probe's threads."""
        return [tid for tid, name in self.python.items() if name.startswith(_OWN)]

    def name_threads(self, names: Mapping[int, str]) -> dict[int, str]:
        """Return what each thread is, from the kernel's ``names``."""
        program = names.get(self.pid, "")
        return {tid: self._find_kind(tid, name, program) for tid, name in names.items()}

    def _find_kind(self, tid: int, name: str, program: str) -> str:
        if tid == self.pid:
            return MAIN
        if tid in self.python:
            known = (kind for part, kind in _BY_PYTHON_NAME if part in self.python[tid])
            return next(known, f"Python {self.lines.get(tid) or self.python[tid]}")
        if tid in self.openmp:
            return OPENMP
        kind = next((kind for begin, kind in _BY_NAME if name.startswith(begin)), name)
        is_unnamed = kind == name and (name == program or name.startswith(_INTERPRETER.decode()))
        return (POOL if self.is_parallel else UNNAMED) if is_unnamed else kind


def read_thread_kinds(at: At, host: str, pid: int) -> ThreadKinds:
    """Return what is known about the threads of a process."""
    kinds = _read_events(at, host, pid)
    return replace(kinds, is_parallel=any(_ParallelUse.is_seen(one, pid, at) for one in at.host_sources("threads", host)))


@at_event()
def _read_events(at: At, host: str, pid: int) -> ThreadKinds:
    python: dict[int, str] = {}
    openmp: set[int] = set()
    for names in at.events_of(ThreadNames):
        if names.writer.host == host and names.pid == pid:
            python |= names.python or {}
            openmp |= (names.libraries or {}).keys()
    busy = [one for one in at.events_of(BusyThread) if (one.writer.host, one.writer.pid) == (host, pid)]
    tids = {one.tid: one for one in busy if one.tid is not None} or _match_threads(at, host, pid, busy)
    lines: dict[int, str] = {}
    for tid, one in tids.items():
        python.setdefault(tid, one.thread)
        own = next((own for stack in one.stacks if (own := find_own(one.frames, stack)) is not None), None)
        lines |= {tid: f"{own.file}:{own.line}"} if own is not None else {}
    return ThreadKinds(pid, python, frozenset(openmp), lines)


def _match_threads(at: At, host: str, pid: int, busy: Sequence[BusyThread]) -> dict[int, BusyThread]:
    """Return, by thread id, the busy threads of a recording that does not name these: those that used as many cores.

    Nothing where others used as many.
    """
    found: dict[int, BusyThread] = {}
    alike: set[int] = set()
    for one in sorted(busy, key=lambda one: one.unix_ns):
        samples = at.records("threads", host, "pid", pid).read_window(one.busy_ns + one.unix_ns - one.end_ns, one.unix_ns)
        tids, cores = (samples.rows[name] for name in ("tid", "cores_used")) if len(samples) else (np.empty(0), np.empty(0))
        uses = {tid: float(cores[tids == tid].mean()) for tid in np.unique(tids).tolist() if tid != pid}
        same = [tid for tid, use in uses.items() if abs(use - one.cores) < _SAME_USE * one.cores]
        alike.update(same)
        found |= {tid: one for tid in same if tid not in found and one not in found.values()}
    return found if len(alike) <= len(busy) else {}


class _ParallelUse:
    """When the unnamed threads of each process of a table first used more cores than Python's own threads can."""

    def __init__(self) -> None:
        self.count = 0  # records read so far
        self.first_ns: dict[int, int] = {}  # by pid

    @classmethod
    def is_seen(cls, source: Source, pid: int, at: At) -> bool:
        """Whether a process did so up to a moment."""
        seen, rows = keep(source, cls), source.until(at.cursor_ns)
        if len(rows) > seen.count:
            seen._read(rows[seen.count :])
            seen.count = len(rows)
        return pid in seen.first_ns and seen.first_ns[pid] + source.offset_ns <= at.cursor_ns

    def _read(self, rows: NDArray[Any]) -> None:
        rows = rows[np.strings.startswith(rows["name"], _INTERPRETER) & (rows["tid"] != rows["pid"])]
        if not len(rows):
            return
        begins = np.flatnonzero((np.diff(rows["time_ns"], prepend=-1) != 0) | (np.diff(rows["pid"], prepend=-1) != 0))
        cores = np.add.reduceat(np.nan_to_num(rows["cores_used"].astype(np.float64)), begins)
        for row in rows[begins[cores > _PARALLEL_CORES]][["pid", "time_ns"]].tolist():
            self.first_ns.setdefault(*row)
