"""Finding the rank processes of a job.

A rank is the topmost Python process below the job's root whose launcher gave it a rank number; or any process
from which an engine has reported (it has an events file of its own in the session directory). What lies below
a rank (data-loader workers, compilers) is not looked at. Variables that our own environment holds with the
same value, as in an sbatch script, say nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import Process
from zerotop_probe.outside.sampling import silent_ranks
from zerotop_probe.outside.sampling.build_locks import LockWatcher
from zerotop_probe.outside.sampling.process_sampler import SampledMember
from zerotop_probe.recording import clock, events, launchers
from zerotop_probe.recording.directory import SESSION_VARIABLE
from zerotop_probe.recording.writer import EventWriter

_FAST_S, _SLOW_S, _FAST_FOR_S = 0.5, 5.0, 60.0
# Launchers are sampled too, as rank -1: a plain `python train.py` is one until its engine reports. Not every
# helper is.
_MOST_LAUNCHERS = 4
# What runs below a rank while operators are built.
_COMPILERS = (b"ninja", b"cc1plus", b"nvcc", b"cicc", b"ptxas")
_EVENTS_FILE = re.compile(r"events-rank(\d+)-(.+)-(\d+)(?:\.\d+)?\.jsonl")


class Rank(NamedTuple):
    """A rank process as found from outside."""

    process: Process
    rank: int
    local_rank: int | None
    found_s: float


class RankFinder:
    """Follows the ranks of one job; writes RANK_FOUND, RANK_GONE, RANK_SILENT, COMPILING and BUILD_LOCKED."""

    def __init__(
        self,
        session: str,
        root: Process,
        writer: EventWriter,
        *,
        inherited: Mapping[str, str] = os.environ,
        attached_ranks: Sequence[Process] | None = None,
    ) -> None:
        """``inherited`` is the environment that the job was started from.

        ``attached_ranks``: the ranks of a job that was attached to. They are expected to be silent.
        """
        self.rank_by_pid: dict[int, Rank] = {}
        self._session = session
        self._root = root
        self._writer = writer
        self._attached = attached_ranks is not None
        self._inherited = _read_parent_environment(root) if self._attached else inherited
        self._tree = procfs.ProcessTree()
        self._launchers: list[Process] = [root]
        self._process_by_file: dict[str, Process] = {}  # by file
        self._reported_s: dict[Process, float] = {}
        self._silent: set[Process] = set()
        self._compiling = False
        self._locks = LockWatcher()
        self._next_s = 0.0
        self._fast_until_s = time.monotonic() + _FAST_FOR_S
        for process in attached_ranks or ():
            self._add_attached(process)

    def _add_attached(self, process: Process) -> None:
        environment = procfs.read_environment(process.pid)
        number = self._find_number(environment, launchers.RANK)
        if number is not None and process.is_alive():
            self._add_rank(Rank(process, number, self._find_number(environment, launchers.LOCAL_RANK), time.monotonic()))

    def list_members(self) -> list[SampledMember]:
        """What is to be sampled: all ranks, and the launchers above them as rank -1."""
        ranks = [SampledMember(rank.process, rank.rank) for rank in self.rank_by_pid.values()]
        return ranks + [SampledMember(process, -1) for process in self._launchers if process.pid not in self.rank_by_pid]

    def list_processes(self) -> list[Process]:
        """The ranks that were found and have not gone."""
        return [rank.process for rank in list(self.rank_by_pid.values())]

    def has_alive_rank(self) -> bool:
        """Whether a rank that was found still runs."""
        return any(process.is_alive() for process in self.list_processes())

    def update_ranks(self, *, now: bool = False) -> None:
        """Looks for ranks that have come or gone, if it is time or ``now``: often at first, later rarely."""
        now_s = time.monotonic()
        if now:
            self._fast_until_s = now_s + _FAST_FOR_S
        elif now_s < self._next_s:
            return
        self._next_s = now_s + (_FAST_S if now_s < self._fast_until_s else _SLOW_S)
        self._drop_ended()
        self._find_reported(now_s)
        self._find_below_root(now_s)
        self._report_late(now_s)

    def _drop_ended(self) -> None:
        for rank in [rank for rank in self.rank_by_pid.values() if not rank.process.is_alive()]:
            del self.rank_by_pid[rank.process.pid]
            self._write_event(events.RANK_GONE, rank=rank.rank, pid=rank.process.pid)

    def _find_reported(self, now_s: float) -> None:
        """Takes up the processes that have an events file of their own."""
        try:
            names = os.listdir(self._session)
        except OSError:
            return
        for name in names:
            match = _EVENTS_FILE.fullmatch(name)
            if match is None or name in self._process_by_file:
                continue
            process = _read_writer(os.path.join(self._session, name))
            if process is None:  # its header is not written yet
                continue
            self._process_by_file[name] = process
            self._reported_s[process] = now_s
            if process.pid not in self.rank_by_pid and process.is_alive():
                local = self._find_number(procfs.read_environment(process.pid), launchers.LOCAL_RANK)
                self._add_rank(Rank(process, int(match[1]), local, now_s))

    def _find_below_root(self, now_s: float) -> None:
        self._tree.refresh()
        children = self._tree.find_children()
        self._launchers = []
        waiting = [self._root.pid]
        for pid in waiting:
            if pid not in self.rank_by_pid and not self._add_if_rank(pid, now_s):
                waiting.extend(children.get(pid, ()))
        due = self._locks.is_due(now_s)
        if due or not self._compiling:
            rank = self._find_compiling(children)
            if rank is not None and not self._compiling:
                self._compiling = True
                self._write_event(events.COMPILING, rank=rank.rank, pid=rank.process.pid)
            if due:
                for lock in self._locks.find_blocking_locks([] if rank is not None else self.list_processes(), now_s):
                    self._write_event(events.BUILD_LOCKED, path=str(lock))

    def _find_compiling(self, children: Mapping[int, Sequence[int]]) -> Rank | None:
        """One below which operators are built: for minutes nothing else is seen to happen."""
        for rank in self.rank_by_pid.values():
            below = list(children.get(rank.process.pid, ()))
            for pid in below:
                facts = procfs.read_stat(pid)
                if facts is not None and facts.name in _COMPILERS:
                    return rank
                below.extend(children.get(pid, ()))
        return None

    def _add_if_rank(self, pid: int, now_s: float) -> bool:
        """Whether this process is a rank. Asked again each time: a launcher's child becomes one by exec."""
        arguments = procfs.read_command_line(pid)
        if not silent_ranks.is_python(arguments):
            if pid == self._root.pid:
                self._add_launcher(pid)
            return False
        environment = procfs.read_environment(pid)
        rank = self._find_number(environment, launchers.RANK)
        process = Process.from_pid(pid)
        if rank is None or process is None:
            self._add_launcher(pid)
            return False
        self._add_rank(Rank(process, rank, self._find_number(environment, launchers.LOCAL_RANK), now_s))
        why = silent_ranks.explain_blind(arguments, carries_session=environment.get(SESSION_VARIABLE) == self._session)
        if why is not None and not self._attached:
            self._report_silent(self.rank_by_pid[pid], why)
        return True

    def _find_number(self, environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
        return launchers.read_number(environment, names, inherited=self._inherited)

    def _add_launcher(self, pid: int) -> None:
        process = Process.from_pid(pid)
        if process is not None and len(self._launchers) < _MOST_LAUNCHERS:
            self._launchers.append(process)

    def _add_rank(self, rank: Rank) -> None:
        self.rank_by_pid[rank.process.pid] = rank
        pid, start = rank.process
        self._write_event(events.RANK_FOUND, rank=rank.rank, local_rank=rank.local_rank, pid=pid, start=start)

    def _report_late(self, now_s: float) -> None:
        # Peers are ranks that still run: after an elastic restart the reports of those before say nothing.
        running = {rank.process for rank in self.rank_by_pid.values()}
        peers = [reported_s for process, reported_s in self._reported_s.items() if process in running]
        if not peers:
            return
        why = silent_ranks.explain_late(len(peers), now_s - min(peers))
        for rank in self.rank_by_pid.values():
            if why and not self._attached and rank.process not in self._reported_s and rank.found_s <= min(peers):
                self._report_silent(rank, why)

    def _report_silent(self, rank: Rank, why: str) -> None:
        if rank.process not in self._silent:
            self._silent.add(rank.process)
            text = f"Rank {rank.rank} is silent: {why}."
            self._write_event(events.RANK_SILENT, rank=rank.rank, pid=rank.process.pid, why=text)

    def _write_event(self, name: str, **facts: object) -> None:
        self._writer.write(time.monotonic_ns(), name, **facts)


def _read_parent_environment(root: Process) -> Mapping[str, str]:
    """The environment of whoever started a process, as far as it may be read."""
    facts = procfs.read_stat(root.pid)
    return procfs.read_environment(facts.parent) if facts is not None else {}


def _read_writer(path: str) -> Process | None:
    """The process that an events file is of. One of another machine is given a pid that none here has."""
    try:
        writer = json.loads(procfs.read_file(path).partition(b"\n")[0])["writer"]
        here = (writer["host"], writer["boot"]) == (clock.read_hostname(), clock.read_boot_id())
        return Process(int(writer["pid"]) if here else -1, int(writer["start"]))
    except (ValueError, KeyError, TypeError):
        return None
