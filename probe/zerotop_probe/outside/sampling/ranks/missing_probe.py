"""Processes of a job that import PyTorch without the probe, and why it was not loaded there.

The reason is read from a process's command line and from the environment with which it was started. Whether such a process
trains cannot be seen from outside. One that a launcher numbered is a rank, and so is one with the threads of a process group
or of a backward on a GPU. Any other is taken for a rank once it has had PyTorch for a few seconds and does more than import
modules. Launchers do not count, nor a process that only waits for its children, nor the children of one that does not, with
the probe or without: they are loader workers or compilers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import zerotop_probe
from zerotop_probe.outside import procfs
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.outside.sampling.ranks.silent_ranks import find_blind_option, is_python
from zerotop_probe.recording.directory import SESSION_VARIABLE
from zerotop_probe.recording.node_part import read_session_value

_BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(zerotop_probe.__file__)), "bootstrap")
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "fish")
_COMPILE_WORKER = os.path.join("torch", "_inductor", "compile_worker", "__main__.py")
# Names of threads that only a rank has.
_RANK_THREADS = (b"pt_gloo", b"pt_nccl", b"pt_mpi", b"pt_autograd")
# With PyTorch for so long, a process that no launcher numbered is a rank if it has slept at so many looks, or computed for
# longer than imports take.
_TRAINS_S, _SLEEPS, _IMPORT_CPU_S = 3.0, 2, 6.0
# A process waits for its children if it uses less than this share of a core for so long.
_WAITING_SHARE, _WAITING_S = 0.01, 2.0


class Missing(NamedTuple):
    """Why the probe was not loaded in a process."""

    reason: str  # see the event ``probe_missing``
    by: str = ""  # the option, file or program behind it


class Found(NamedTuple):
    """A process without the probe that has imported PyTorch; ``rank`` is None if no launcher numbered it."""

    process: ProcessHandle
    rank: int | None
    program: str
    missing: Missing


class _Candidate:
    """A Python process without the probe, and what it has done since it imported PyTorch."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.torch_since_s: float | None = None
        self.is_rank = found.rank is not None
        self.starts_ranks = False
        self._first_ticks = self._sleeps = 0
        self._looks: deque[tuple[float, int]] = deque()  # (time, CPU ticks): those of the last _WAITING_S, and one before

    def look(self, now_s: float) -> None:
        """Read its state; call it about twice a second."""
        stat = procfs.read_stat(self.found.process.pid)
        if stat is None:
            return
        self._sleeps += stat.state == "S"
        self._first_ticks = self._first_ticks or stat.cpu_ticks
        self._looks.append((now_s, stat.cpu_ticks))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - _WAITING_S:
            self._looks.popleft()

    def is_working(self, now_s: float) -> bool:
        """Whether it does more than import modules, and has for some seconds."""
        if self.torch_since_s is None or now_s - self.torch_since_s < _TRAINS_S:
            return False
        cpu_s = (self._looks[-1][1] - self._first_ticks) / procfs.TICKS_PER_S if self._looks else 0.0
        return self._sleeps >= _SLEEPS or cpu_s >= _IMPORT_CPU_S

    def is_waiting(self) -> bool:
        """Whether it has used next to no processor time lately, or has not been looked at for long enough."""
        (begin_s, before), (end_s, after) = (self._looks[0], self._looks[-1]) if self._looks else ((0.0, 0), (0.0, 0))
        used_s = (after - before) / procfs.TICKS_PER_S
        return end_s - begin_s < _WAITING_S or used_s < _WAITING_SHARE * (end_s - begin_s)


class ProbelessProcesses:
    """Tracks the Python processes of one job in which the probe was not loaded."""

    def __init__(self, recording: str) -> None:
        self._recording = recording
        self._session = read_session_value(recording)
        self._reasons: dict[tuple[ProcessHandle, tuple[str, ...]], Missing | None] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._loaded: dict[int, _Candidate] = {}  # those with the probe: they may have helpers without it

    def add_process(
        self, process: ProcessHandle, rank: int | None, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """Note a Python process of the job. It may become another program by exec, so it is noted again and again."""
        key = (process, tuple(arguments))
        if key in self._reasons:
            return
        missing = self._reasons[key] = self._explain(process.pid, arguments, environment)
        self._candidates.pop(process.pid, None)
        self._loaded.pop(process.pid, None)
        if is_compile_worker(arguments) or find_launcher(arguments):
            return
        if missing is not None:
            program = procfs.read_program(process.pid)
            self._candidates[process.pid] = _Candidate(Found(process, rank, program, missing))
        else:
            self._loaded[process.pid] = _Candidate(Found(process, rank, "", Missing("")))

    def _explain(self, pid: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Missing | None:
        """Return why the probe is not in a process; None if nothing speaks against it."""
        option = find_blind_option(arguments)
        if option is not None:
            return Missing("option", option)
        if not os.access(f"/proc/{pid}/environ", os.R_OK):
            return Missing("unreadable")
        entries = _list_entries(environment)
        if _BOOTSTRAP not in entries:
            is_kept = environment.get(SESSION_VARIABLE) == self._session
            reason = "pythonpath" if "PYTHONPATH" in environment else "unset" if is_kept else "environment"
            return Missing(reason, _find_changer(pid))
        if environment.get(SESSION_VARIABLE) != self._session:
            return Missing("session")
        root = f"/proc/{pid}/root"
        if not os.path.isdir(root + _BOOTSTRAP) and os.path.isdir(root):
            return Missing("hidden")
        for entry in entries[: entries.index(_BOOTSTRAP)]:
            other = os.path.join(entry, "sitecustomize.py")
            if os.path.isabs(entry) and os.path.isfile(root + other):
                return Missing("shadowed", other)
        return Missing("user") if self._cannot_write(pid) else None

    def _cannot_write(self, pid: int) -> bool:
        """Whether a process runs as a user to whom the recording, which is private, is closed."""
        with suppress(OSError):
            return os.stat(f"/proc/{pid}").st_uid not in (0, os.stat(self._recording).st_uid)
        return False

    def find_new(self, now_s: float) -> Iterator[tuple[Found, bool]]:
        """Yield the processes that have imported PyTorch, and again when it is known whether they are ranks."""
        for pid, loaded in list(self._loaded.items()):
            loaded.look(now_s)
            if not loaded.found.process.is_alive():
                del self._loaded[pid]
        for pid, candidate in list(self._candidates.items()):
            if not candidate.found.process.is_alive():
                del self._candidates[pid]
            elif candidate.torch_since_s is None:
                if not self._is_helper(pid) and has_imported_torch(pid):
                    candidate.torch_since_s = now_s
                    yield candidate.found, candidate.is_rank
            elif not candidate.is_rank:
                candidate.look(now_s)
                if self._is_rank(candidate, now_s):
                    candidate.is_rank = True
                    yield candidate.found, True
                    yield from self._take_back(pid)

    def _take_back(self, rank_pid: int) -> Iterator[tuple[Found, bool]]:
        """Yield the process that was taken for a rank, and has started this one."""
        for pid in procfs.list_ancestors(rank_pid)[1:]:
            above = self._candidates.get(pid)
            if above is not None and above.is_rank and above.found.rank is None and not _has_rank_threads(pid):
                above.is_rank, above.starts_ranks = False, True
                yield above.found, False

    def lacks_probe(self, pid: int) -> bool:
        """Whether the probe is not in a process, which trains unseen then."""
        return pid in self._candidates

    def is_guess(self, pid: int) -> bool:
        """Whether a process is taken for a rank that no launcher has numbered."""
        candidate = self._candidates.get(pid)
        return candidate is not None and candidate.is_rank and candidate.found.rank is None

    def _is_helper(self, pid: int) -> bool:
        """Whether a process belongs to one above it that has PyTorch, too."""
        ancestors = procfs.list_ancestors(pid)[1:]
        above = [one for ancestor in ancestors if (one := self._candidates.get(ancestor)) is not None]
        is_used = any(one.is_rank or (one.torch_since_s is not None and not one.is_waiting()) for one in above)
        is_used = is_used or any(
            not one.is_waiting() and has_imported_torch(ancestor)
            for ancestor in ancestors
            if (one := self._loaded.get(ancestor)) is not None
        )
        return is_used and not _has_rank_threads(pid)

    def _is_rank(self, candidate: _Candidate, now_s: float) -> bool:
        pid = candidate.found.process.pid
        if _has_rank_threads(pid):
            return True
        below = [one for other, one in self._candidates.items() if pid in procfs.list_ancestors(other)[1:]]
        candidate.starts_ranks |= any(one.is_rank for one in below)
        return not candidate.starts_ranks and not (below and candidate.is_waiting()) and candidate.is_working(now_s)


def is_compile_worker(arguments: Sequence[str]) -> bool:
    """Whether a command line is that of torch.compile's processes, which PyTorch starts with a PYTHONPATH of its own."""
    return any(argument.endswith(_COMPILE_WORKER) for argument in arguments[1:2])


def has_imported_torch(pid: int) -> bool:
    """Whether a process has loaded PyTorch's library."""
    return b"libtorch" in procfs.read_file(f"/proc/{pid}/maps", 1 << 22)


def _has_rank_threads(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(procfs.read_file(f"/proc/{pid}/task/{thread}/comm", 32).startswith(_RANK_THREADS) for thread in threads)


def _list_entries(environment: Mapping[str, str]) -> list[str]:
    return [os.path.normpath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _find_changer(pid: int) -> str:
    """Return what changed the environment of a process: "script", "command" for the job's own, a program, or "" if unknown.

    That is the nearest process above it whose environment has zerotop's entry.
    """
    for ancestor in procfs.list_ancestors(pid)[1:]:
        arguments = procfs.read_command_line(ancestor)
        if _BOOTSTRAP in _list_entries(procfs.read_environment(ancestor)):
            name = os.path.basename(arguments[0]).lstrip("-") if arguments else ""
            return "script" if name in _SHELLS else procfs.read_program(ancestor) if is_python(arguments) else name
        if os.getpid() == ancestor:
            return "command"
    return ""
