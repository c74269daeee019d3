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
from zerotop_probe.outside.sampling.build_locks import Locks
from zerotop_probe.outside.sampling.process_sampler import Member
from zerotop_probe.recording import clock, events, launchers
from zerotop_probe.recording.directory import ENVIRONMENT
from zerotop_probe.recording.writer import EventWriter

_FAST_S, _SLOW_S, _FAST_FOR_S = 0.5, 5.0, 60.0
# Launchers are sampled too, as rank -1: a plain `python train.py` is one until its engine reports. Not every
# helper is.
_MOST_LAUNCHERS = 4
# What runs below a rank while operators are built.
_COMPILERS = (b"ninja", b"cc1plus", b"nvcc", b"cicc", b"ptxas")
_HELLO = re.compile(r"events-rank(\d+)-(.+)-(\d+)(?:\.\d+)?\.jsonl")


class Rank(NamedTuple):
    """A rank process as found from outside."""

    process: Process
    rank: int
    local_rank: int | None
    found_s: float


class Ranks:
    """Follows the ranks of one job; writes RANK_FOUND, RANK_GONE, RANK_SILENT, COMPILING and BUILD_LOCKED."""

    def __init__(
        self,
        session: str,
        root: Process,
        writer: EventWriter,
        *,
        ours: Mapping[str, str] = os.environ,
        attached: Sequence[Process] | None = None,
    ) -> None:
        """``ours`` is the environment that the job was started from.

        ``attached``: somebody else had started it, with these ranks; then silence is what is to be expected of them.
        """
        self.found: dict[int, Rank] = {}
        self._session = session
        self._root = root
        self._writer = writer
        self._attached = attached is not None
        self._ours = _started_from(root) if self._attached else ours
        self._table = procfs.Table()
        self._launchers: list[Process] = [root]
        self._reports: dict[str, Process] = {}  # by file
        self._reported_s: dict[Process, float] = {}
        self._silent: set[Process] = set()
        self._compiling = False
        self._locks = Locks()
        self._next_s = 0.0
        self._fast_until_s = time.monotonic() + _FAST_FOR_S
        for process in attached or ():
            self._take_up(process)

    def _take_up(self, process: Process) -> None:
        environment = procfs.environment(process.pid)
        number = self._number(environment, launchers.RANK)
        if number is not None and process.alive():
            self._add(Rank(process, number, self._number(environment, launchers.LOCAL_RANK), time.monotonic()))

    def members(self) -> list[Member]:
        """What is to be sampled: all ranks, and the launchers above them as rank -1."""
        ranks = [Member(rank.process, rank.rank) for rank in self.found.values()]
        return ranks + [Member(process, -1) for process in self._launchers if process.pid not in self.found]

    def processes(self) -> list[Process]:
        """The ranks that were found and have not gone."""
        return [rank.process for rank in list(self.found.values())]

    def alive(self) -> bool:
        """Whether a rank that was found still runs."""
        return any(process.alive() for process in self.processes())

    def look(self, *, now: bool = False) -> None:
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
        self._say_who_is_late(now_s)

    def _drop_ended(self) -> None:
        for rank in [rank for rank in self.found.values() if not rank.process.alive()]:
            del self.found[rank.process.pid]
            self._event(events.RANK_GONE, rank=rank.rank, pid=rank.process.pid)

    def _find_reported(self, now_s: float) -> None:
        """Takes up the processes that have an events file of their own."""
        try:
            names = os.listdir(self._session)
        except OSError:
            return
        for name in names:
            match = _HELLO.fullmatch(name)
            if match is None or name in self._reports:
                continue
            process = _writer_of(os.path.join(self._session, name))
            if process is None:  # its header is not written yet
                continue
            self._reports[name] = process
            self._reported_s[process] = now_s
            if process.pid not in self.found and process.alive():
                local = self._number(procfs.environment(process.pid), launchers.LOCAL_RANK)
                self._add(Rank(process, int(match[1]), local, now_s))

    def _find_below_root(self, now_s: float) -> None:
        self._table.refresh()
        children = self._table.children()
        self._launchers = []
        waiting = [self._root.pid]
        for pid in waiting:
            if pid not in self.found and not self._classify(pid, now_s):
                waiting.extend(children.get(pid, ()))
        due = self._locks.due(now_s)
        if due or not self._compiling:
            rank = self._compiling_rank(children)
            if rank is not None and not self._compiling:
                self._compiling = True
                self._event(events.COMPILING, rank=rank.rank, pid=rank.process.pid)
            if due:
                for lock in self._locks.look([] if rank is not None else self.processes(), now_s):
                    self._event(events.BUILD_LOCKED, path=str(lock))

    def _compiling_rank(self, children: Mapping[int, Sequence[int]]) -> Rank | None:
        """One below which operators are built: for minutes nothing else is seen to happen."""
        for rank in self.found.values():
            below = list(children.get(rank.process.pid, ()))
            for pid in below:
                facts = procfs.stat(pid)
                if facts is not None and facts.name in _COMPILERS:
                    return rank
                below.extend(children.get(pid, ()))
        return None

    def _classify(self, pid: int, now_s: float) -> bool:
        """Whether this process is a rank. Asked again each time: a launcher's child becomes one by exec."""
        arguments = procfs.command_line(pid)
        if not silent_ranks.is_python(arguments):
            if pid == self._root.pid:
                self._note_launcher(pid)
            return False
        environment = procfs.environment(pid)
        rank = self._number(environment, launchers.RANK)
        process = Process.of(pid)
        if rank is None or process is None:
            self._note_launcher(pid)
            return False
        self._add(Rank(process, rank, self._number(environment, launchers.LOCAL_RANK), now_s))
        why = silent_ranks.why_blind(arguments, carries_session=environment.get(ENVIRONMENT) == self._session)
        if why is not None and not self._attached:
            self._say_silent(self.found[pid], why)
        return True

    def _number(self, environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
        return launchers.number(environment, names, inherited=self._ours)

    def _note_launcher(self, pid: int) -> None:
        process = Process.of(pid)
        if process is not None and len(self._launchers) < _MOST_LAUNCHERS:
            self._launchers.append(process)

    def _add(self, rank: Rank) -> None:
        self.found[rank.process.pid] = rank
        pid, start = rank.process
        self._event(events.RANK_FOUND, rank=rank.rank, local_rank=rank.local_rank, pid=pid, start=start)

    def _say_who_is_late(self, now_s: float) -> None:
        # Peers are ranks that still run: after an elastic restart the reports of those before say nothing.
        running = {rank.process for rank in self.found.values()}
        peers = [reported_s for process, reported_s in self._reported_s.items() if process in running]
        if not peers:
            return
        why = silent_ranks.why_late(len(peers), now_s - min(peers))
        for rank in self.found.values():
            if why and not self._attached and rank.process not in self._reported_s and rank.found_s <= min(peers):
                self._say_silent(rank, why)

    def _say_silent(self, rank: Rank, why: str) -> None:
        if rank.process not in self._silent:
            self._silent.add(rank.process)
            text = f"Rank {rank.rank} is silent: {why}."
            self._event(events.RANK_SILENT, rank=rank.rank, pid=rank.process.pid, why=text)

    def _event(self, name: str, **facts: object) -> None:
        self._writer.write(time.monotonic_ns(), name, **facts)


def _started_from(root: Process) -> Mapping[str, str]:
    """The environment of whoever started a process, as far as it may be read."""
    facts = procfs.stat(root.pid)
    return procfs.environment(facts.parent) if facts is not None else {}


def _writer_of(path: str) -> Process | None:
    """The process that an events file is of. One of another machine is given a pid that none here has."""
    try:
        writer = json.loads(procfs.read(path).partition(b"\n")[0])["writer"]
        here = (writer["host"], writer["boot"]) == (clock.hostname(), clock.boot_id())
        return Process(int(writer["pid"]) if here else -1, int(writer["start"]))
    except (ValueError, KeyError, TypeError):
        return None
