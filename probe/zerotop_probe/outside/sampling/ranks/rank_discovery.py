"""Finding the rank processes of a job.

A rank is the topmost Python process below the job's root with a rank number from its launcher, or any process whose engine
has reported, which then has its own events file in the recording folder. Descendants of a rank (data-loader workers,
compilers) are not searched. Variables that our own environment holds with the same value, as in an sbatch script, do not
count.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.process_sampler import SampledMember
from zerotop_probe.outside.sampling.ranks import ray_monitor, silent_ranks
from zerotop_probe.outside.sampling.ranks.build_locks import LockWatcher
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.outside.sampling.ranks.missing_probe import ProbelessProcesses, has_imported_torch
from zerotop_probe.outside.sampling.ranks.rank_files import RankFiles
from zerotop_probe.outside.sampling.stuck.start_watch import FoundStart
from zerotop_probe.recording import clock, events, launchers, redact
from zerotop_probe.recording.directory import SESSION_VARIABLE, read_recording_info
from zerotop_probe.recording.node_part import read_session_value
from zerotop_probe.recording.writer import EventWriter

_FAST_S, _SLOW_S, _FAST_FOR_S = 0.5, 5.0, 60.0
# Launchers are sampled too, as rank -1: a plain `python train.py` counts as one until its engine reports.
_MAX_LAUNCHERS = 4
# Other processes of the job on GPUs that are sampled, and parents of a process that are followed to the job's root.
_MAX_ACTORS, _MOST_PARENTS = 16, 16
# Programs that run below a rank while operators are built.
# PyTorch's builder of extensions passes their name to the compilers.
_EXTENSION = re.compile(r"TORCH_EXTENSION_NAME=(\w+)")
_COMPILERS = (b"ninja", b"cc1plus", b"nvcc", b"cicc", b"ptxas")
# A script that outlives the root imports PyTorch within this time, or does not train.
_IMPORT_S = 3.0
_EVENTS_FILE = re.compile(r"events-rank(\d+)-(.+)-(\d+)(?:\.\d+)?\.jsonl")


class SeenRank(NamedTuple):
    """A rank process found from outside."""

    process: ProcessHandle
    rank: int
    local_rank: int | None
    found_s: float


class RankFinder:
    """Tracks the ranks of one job; writes RANK_FOUND, RANK_GONE, RANK_SILENT, PROBE_MISSING, COMPILING, BUILD_LOCKED."""

    def __init__(
        self,
        recording: str,
        root: ProcessHandle,
        writer: EventWriter,
        *,
        inherited: Mapping[str, str] = os.environ,
        attached_ranks: Sequence[ProcessHandle] | None = None,
        recorded: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """``inherited`` is the environment that the job was started from.

        ``attached_ranks``: the ranks of a job that was attached to. They are expected to be silent.
        ``recorded``: device and inode of files that are recorded already, as the job's own output.
        """
        self.rank_by_pid: dict[int, SeenRank] = {}
        self._recording = recording
        self._session = read_session_value(recording)
        self._root = root
        self._writer = writer
        self._attached = attached_ranks is not None
        self._inherited = _read_parent_environment(root) if self._attached else inherited
        self._tree = procfs.ProcessTree()
        self._launchers: list[ProcessHandle] = [root]
        self._process_by_file: dict[str, ProcessHandle] = {}
        self._reported_s: dict[ProcessHandle, float] = {}
        self._silent: set[ProcessHandle] = set()
        self._probeless = ProbelessProcesses(recording)
        self._compiled: set[str] = set()  # extensions that were reported; "" for one whose name is not known
        self._locks = LockWatcher()
        self._files = RankFiles(recording, self._note_files, recorded)
        # A program may have ended before its name can be read.
        command = procfs.read_command_line(root.pid) or read_recording_info(recording).get("command") or []
        self._is_root_python = silent_ranks.is_python(command)
        self._known_pids: set[int] = set()  # of all ranks so far
        self._raylet: int | None = None  # of this node, if it has started a process of the job
        self._actors: dict[int, ProcessHandle] = {}  # others of the job that use its GPUs, such as inference engines
        self._root_ended_s: float | None = None  # when it was noticed
        self._next_s = 0.0
        self._fast_until_s = time.monotonic() + _FAST_FOR_S
        self.has_outlived_root: bool | None = None
        """Once the root has ended: whether a process runs that is a rank or may become or start one. None before."""
        for process in attached_ranks or ():
            self._add_attached(process)

    def _add_attached(self, process: ProcessHandle) -> None:
        if find_launcher(procfs.read_command_line(process.pid)):  # its ranks have yet to start
            return
        environment = procfs.read_environment(process.pid)
        number = self._find_number(environment, launchers.RANK)
        if number is not None and process.is_alive():
            self._add_rank(SeenRank(process, number, self._find_number(environment, launchers.LOCAL_RANK), time.monotonic()))
        elif number is None and process.pid != self._root.pid:  # one of Ray's, whose number is set inside
            self.add_actor(process.pid)

    def list_members(self) -> list[SampledMember]:
        """Return the processes to sample: all ranks, and their launchers as rank -1."""
        ranks = [SampledMember(rank.process, rank.rank) for rank in self.rank_by_pid.values()]
        others = {process.pid: process for process in [*self._launchers, *list(self._actors.values())]}
        return ranks + [SampledMember(process, -1) for pid, process in others.items() if pid not in self.rank_by_pid]

    def add_actor(self, pid: int) -> bool:
        """Sample a process that uses a GPU if the job has started it; return whether it has. Any thread may ask."""
        process = ProcessHandle.from_pid(pid)
        if process is None or not self._is_of_job(pid):
            return False
        if len(self._actors) < _MAX_ACTORS:
            self._actors[pid] = process
            self._find_raylet(pid)
        return True

    def _find_raylet(self, pid: int) -> None:
        """Record the limit of Ray's memory monitor, once, if a raylet has started this process."""
        if self._raylet is None and (raylet := ray_monitor.find_raylet(pid)) is not None:
            self._raylet = raylet
            if (monitor := ray_monitor.read_monitor(raylet)) is not None:
                self._write_event(events.RayMonitor, **monitor._asdict())

    def _is_of_job(self, pid: int) -> bool:
        """Whether a process is below the job's root, or has the recording in its environment, as one of Ray's."""
        if procfs.read_environment(pid).get(SESSION_VARIABLE) == self._session:
            return True
        for _ in range(_MOST_PARENTS):
            if pid == self._root.pid or pid in self.rank_by_pid:
                return True
            stat = procfs.read_stat(pid)
            if stat is None or stat.parent <= 1:
                return False
            pid = stat.parent
        return False

    def list_processes(self) -> list[ProcessHandle]:
        """Return the processes of the current ranks."""
        return [rank.process for rank in list(self.rank_by_pid.values())]

    def list_silent(self) -> list[FoundStart]:
        """Return the current ranks that have not reported. Any thread may ask.

        A plain Python that has imported PyTorch is taken for rank 0.
        """
        silent = [one for one in list(self.rank_by_pid.values()) if one.process not in self._reported_s]
        ranks = [self._describe_start(one.rank, one.process.pid) for one in silent]
        if self._known_pids or not self._is_root_python or not self._may_train(self._root.pid):
            return ranks
        return [self._describe_start(0, self._root.pid)]

    def _describe_start(self, rank: int, pid: int) -> FoundStart:
        return FoundStart(rank, pid, is_new=not self._attached, may_train=self._probeless.lacks_probe(pid))

    def _may_train(self, pid: int) -> bool:
        return not find_launcher(procfs.read_command_line(pid)) and has_imported_torch(pid)

    def has_alive_rank(self) -> bool:
        """Whether any rank still runs."""
        return any(process.is_alive() for process in self.list_processes())

    def update_ranks(self, *, now: bool = False) -> None:
        """Search for new and ended ranks if that is due or ``now`` is set: often at first, later rarely."""
        now_s = time.monotonic()
        if self._root_ended_s is None and not self._root.is_alive():
            self._root_ended_s, now = now_s, True
        if now:
            self._fast_until_s = now_s + _FAST_FOR_S
        elif now_s < self._next_s:
            return
        self._next_s = now_s + (_FAST_S if now_s < self._fast_until_s else _SLOW_S)
        self._drop_ended()
        for pid in [pid for pid, process in list(self._actors.items()) if not process.is_alive()]:
            del self._actors[pid]
        self._find_reported(now_s)
        self._find_below_root(now_s)
        if not self._attached:
            self._report_missing_probes(now_s)
        self._report_late(now_s)
        for rank in self.rank_by_pid.values():
            self._files.follow(rank.process, rank.rank)

    def close(self) -> None:
        """Search for the last time."""
        self.update_ranks(now=True)
        self._files.close()

    def _note_files(self, process: ProcessHandle, rank: int, stdout: str | None, stderr: str | None) -> None:
        self._write_event(events.OutputFiles, rank=rank, pid=process.pid, start=process.start, stdout=stdout, stderr=stderr)

    def _drop_ended(self) -> None:
        ended = [rank for rank in self.rank_by_pid.values() if not rank.process.is_alive()]
        look_ns = time.monotonic_ns()  # one for all: nothing tells which was first
        for rank in ended:
            self._files.record_end(rank.process)
            del self.rank_by_pid[rank.process.pid]
            code = procfs.read_exit_code(rank.process.pid, rank.process.start)
            known = {} if code is None else {"exit_code": code}
            self._writer.write(look_ns, events.RankGone, rank=rank.rank, pid=rank.process.pid, **known)

    def _find_reported(self, now_s: float) -> None:
        """Add the processes that have their own events file."""
        try:
            names = os.listdir(self._recording)
        except OSError:
            return
        for name in names:
            match = _EVENTS_FILE.fullmatch(name)
            if match is None or name in self._process_by_file:
                continue
            process = _read_writer(os.path.join(self._recording, name), match[2])
            if process is None:  # its header is not written yet
                continue
            self._process_by_file[name] = process
            self._reported_s[process] = now_s
            if process.pid not in self.rank_by_pid and process.is_alive():
                local = self._find_number(procfs.read_environment(process.pid), launchers.LOCAL_RANK)
                self._add_rank(SeenRank(process, int(match[1]), local, now_s))

    def _find_below_root(self, now_s: float) -> None:
        self._tree.refresh()
        children = self._tree.find_children()
        self._launchers = []
        is_root_alive = self._root_ended_s is None
        candidates = [self._root.pid] if is_root_alive or self._attached else self._find_orphans()
        for pid in candidates:
            is_rank = pid in self.rank_by_pid or self._add_if_rank(pid, now_s)
            if not is_rank or self._probeless.is_guess(pid):
                candidates.extend(children.get(pid, ()))
        if self._root_ended_s is not None:
            self.has_outlived_root = self.has_alive_rank() or any(map(self._may_lead_to_ranks, candidates))
        due = self._locks.is_due(now_s)
        if due or not self._compiled:
            rank, extension = self._find_compiling(children)
            if rank is not None and extension not in self._compiled and (extension or not self._compiled):
                self._compiled.add(extension)
                self._write_event(events.Compiling, rank=rank.rank, pid=rank.process.pid, extension=extension)
            if due:
                for lock in self._locks.find_blocking_locks([] if rank is not None else self.list_processes(), now_s):
                    self._write_event(events.BuildLocked, path=str(lock))

    def _find_orphans(self) -> list[int]:
        """Return the processes of the job that have outlived its root, without those that a rank has left.

        They have the recording in their environment. Their descendants may be among them.
        """
        orphans = []
        for pid, parent in self._tree.iter_parents():
            is_left_by_rank = parent in self._known_pids and parent not in self.rank_by_pid
            if not is_left_by_rank and procfs.read_environment(pid).get(SESSION_VARIABLE) == self._session:
                orphans.append(pid)
        return orphans

    def _may_lead_to_ranks(self, pid: int) -> bool:
        """Whether a process that has outlived the root is a launcher, or trains with PyTorch, or may soon import it.

        A Python program only leaves helpers behind; a shell script may leave the training itself.
        """
        arguments = procfs.read_command_line(pid)
        if find_launcher(arguments):
            return True
        if self._is_root_python or not silent_ranks.is_python(arguments) or self._root_ended_s is None:
            return False
        is_early = time.monotonic() - self._root_ended_s < _IMPORT_S
        return is_early or has_imported_torch(pid)

    def _find_compiling(self, children: Mapping[int, Sequence[int]]) -> tuple[SeenRank | None, str]:
        """Return a rank that compiles operators, and the name of its extension, "" if unknown.

        This may take minutes without any other activity.
        """
        compiling: SeenRank | None = None
        for rank in self.rank_by_pid.values():
            descendants = list(children.get(rank.process.pid, ()))
            for pid in descendants:
                stat = procfs.read_stat(pid)
                if stat is not None and stat.name in _COMPILERS:
                    compiling = rank
                    named = (_EXTENSION.search(argument) for argument in procfs.read_command_line(pid))
                    for found in filter(None, named):
                        return rank, found[1]
                descendants.extend(children.get(pid, ()))
        return compiling, ""

    def _add_if_rank(self, pid: int, now_s: float) -> bool:
        """Add this process if it is a rank; return whether it is. Not cached: a launcher's child may become one by exec."""
        arguments = procfs.read_command_line(pid)
        if not silent_ranks.is_python(arguments):
            if pid == self._root.pid:
                self._add_launcher(pid)
            return False
        environment = procfs.read_environment(pid)
        rank = self._find_number(environment, launchers.RANK)
        process = ProcessHandle.from_pid(pid)
        if process is not None and not self._attached:
            self._probeless.add_process(process, rank, arguments, environment)
        # A launcher may have the number of the task that it is, as torchrun below srun.
        if rank is None or process is None or find_launcher(arguments):
            self._add_launcher(pid)
            return False
        self._add_rank(SeenRank(process, rank, self._find_number(environment, launchers.LOCAL_RANK), now_s))
        return True

    def _report_missing_probes(self, now_s: float) -> None:
        for found, is_rank in self._probeless.find_new(now_s):
            (pid, start), (reason, by) = found.process, found.missing
            if found.process in self._reported_s:
                continue
            if is_rank and pid not in self.rank_by_pid:
                self._add_rank(SeenRank(found.process, 0, None, now_s))
            program, by = redact.redact_text(found.program), redact.redact_text(by)
            self._write_event(
                events.ProbeMissing, rank=found.rank, pid=pid, start=start, is_rank=is_rank, program=program, reason=reason,
                by=by,
            )  # fmt: skip

    def _find_number(self, environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
        return launchers.read_number(environment, names, inherited=self._inherited)

    def _add_launcher(self, pid: int) -> None:
        process = ProcessHandle.from_pid(pid)
        if process is not None and len(self._launchers) < _MAX_LAUNCHERS:
            self._launchers.append(process)

    def _add_rank(self, rank: SeenRank) -> None:
        self.rank_by_pid[rank.process.pid] = rank
        self._known_pids.add(rank.process.pid)
        pid, start = rank.process
        self._write_event(events.RankFound, rank=rank.rank, local_rank=rank.local_rank, pid=pid, start=start)
        self._find_raylet(pid)

    def _report_late(self, now_s: float) -> None:
        # Only ranks that still run count: after an elastic restart the reports of earlier ones mean nothing.
        running = {rank.process for rank in self.rank_by_pid.values()}
        peers = [reported_s for process, reported_s in self._reported_s.items() if process in running]
        if not peers:
            return
        why = silent_ranks.explain_late(len(peers), now_s - min(peers))
        for rank in self.rank_by_pid.values():
            if why and not self._attached and rank.process not in self._reported_s and rank.found_s <= min(peers):
                self._report_silent(rank, why)

    def _report_silent(self, rank: SeenRank, why: str) -> None:
        if rank.process not in self._silent:
            self._silent.add(rank.process)
            text = f"Rank {rank.rank} does not report: {why}."
            self._write_event(events.RankSilent, rank=rank.rank, pid=rank.process.pid, why=text)

    def _write_event(self, event: type[events.Event], **facts: object) -> None:
        self._writer.write(time.monotonic_ns(), event, **facts)


def _read_parent_environment(root: ProcessHandle) -> Mapping[str, str]:
    """Return the environment of a process's parent; empty if it may not be read."""
    stat = procfs.read_stat(root.pid)
    return procfs.read_environment(stat.parent) if stat is not None else {}


def _read_writer(path: str, host: str) -> ProcessHandle | None:
    """Return the process that writes an events file, with pid -1 if it runs on another machine, as its name says, too."""
    try:
        writer = json.loads(procfs.read_file(path).partition(b"\n")[0])["writer"]
        is_local = (writer["host"], writer["boot"]) == (clock.read_hostname(), clock.read_boot_id()) and writer[
            "host"
        ] == host
        return ProcessHandle(int(writer["pid"]) if is_local else -1, int(writer["start"]))
    except (ValueError, KeyError, TypeError):
        return None
