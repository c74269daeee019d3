"""Exits of rank processes, as far as they are recorded."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from zerotop.analysis.keys import ProcessKey
from zerotop.session.reader import Event, Session, Source
from zerotop_probe.recording.events import Attached, Goodbye, Hello, JobEnded, JobStarted, Joined, Left, Parted, RankGone


class ProcessExits:
    """Exits recorded in events.

    The end of a command ends the ranks of its node, and of nodes without a command of their own.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._rank_exits: dict[ProcessKey, list[int]] = {}
        self._left_times: dict[ProcessKey, list[int]] = {}
        self._command_exits: dict[str, list[int]] = {}
        self._command_begins: dict[str, int] = {}
        self._until_ns = math.inf
        for event in events:
            host, pid = event.writer.host, event.writer.pid
            if isinstance(event, RankGone):
                self._rank_exits.setdefault((host, pid if event.pid is None else event.pid), []).append(event.unix_ns)
            elif isinstance(event, Goodbye):
                self._rank_exits.setdefault((host, pid), []).append(event.unix_ns)
            elif isinstance(event, Left):
                self._left_times.setdefault((host, pid), []).append(event.unix_ns)
            elif isinstance(event, JobEnded) or (isinstance(event, Parted) and "exit_code" in event.facts):
                self._command_exits.setdefault(host, []).append(event.unix_ns)
            elif isinstance(event, (JobStarted, Attached, Joined)):
                self._command_begins.setdefault(host, event.unix_ns)

    def until(self, cursor_ns: int) -> ProcessExits:
        """Return the same exits up to the cursor (unix time); takes equally long for any number."""
        view = copy.copy(self)
        view._until_ns = cursor_ns
        return view

    def find_exit(self, source: Source) -> int | None:
        """Return when the process that writes ``source`` exited (unix time); None if not recorded."""
        return self.find_exit_after(source.host, source.pid, source.created_ns)

    def reported_until(self, source: Source) -> int | None:
        """Return when the process that writes ``source`` exited or the probe left it; None if not recorded."""
        left = self._find_first(self._left_times.get((source.host, source.pid), ()), source.created_ns)
        return min(filter(None, [left, self.find_exit(source)]), default=None)

    def find_exit_after(self, host: str, pid: int, time_ns: int) -> int | None:
        """Return the first exit of this pid after ``time_ns``: earlier ones are of other processes."""
        own = self._rank_exits.get((host, pid), [])
        begin_ns = self._command_begins.get(host)
        has_command = begin_ns is not None and begin_ns <= self._until_ns
        hosts = (host,) if has_command else tuple(self._command_exits)
        ends = [*own, *(end for command_host in hosts for end in self._command_exits.get(command_host, ()))]
        return self._find_first(ends, time_ns)

    def _find_first(self, times: Iterable[int], since_ns: int) -> int | None:
        return min((time_ns for time_ns in times if since_ns <= time_ns <= self._until_ns), default=None)


def read_exits(session: Session) -> ProcessExits:
    """Return the exits of a session so far; the same object until there is another event."""
    cached = _SESSION_EXITS.get(session)
    if cached is None or cached[0] is not session.events:
        cached = _SESSION_EXITS[session] = session.events, ProcessExits(session.events)
    return cached[1]


def read_exits_until(session: Session, cursor_ns: int) -> ProcessExits:
    """Return the exits of a session up to the cursor (unix time)."""
    return read_exits(session).until(cursor_ns)


_SESSION_EXITS: WeakKeyDictionary[Session, tuple[Sequence[Event], ProcessExits]] = WeakKeyDictionary()


# --- the process that failed first -----------------------------------------------------------------------------------------

_SIGKILL_CODE = 137


class ProcessExit(NamedTuple):
    """The process of a job that failed first: the first rank that vanished, or the job's command."""

    host: str
    unix_ns: int  # when a sampler found the rank's process gone, or the command ended
    rank: int | None = None  # None: the command
    pid: int | None = None  # of the rank
    signal: str | None = None  # that ended the command
    exit_code: int | None = None  # of the command; None while it runs, and where nobody saw it
    oom_kills: int = 0  # processes that the kernel killed for memory
    is_final: bool = True  # False while the command runs and the kernel has killed nothing
    launcher: str = ""  # see ``read_launcher``

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the command, or the kernel killed a process."""
        return self.oom_kills > 0 or self.signal == "SIGKILL" or self.exit_code == _SIGKILL_CODE

    @property
    def signal_name(self) -> str | None:
        """The signal that ended the command or a rank."""
        if self.signal or self.exit_code is None:
            return self.signal or None
        return find_signal_name(self.exit_code, self.launcher)


def read_launcher(session: Session, cursor_ns: int | None = None) -> str:
    """Return the launcher in the job's command, else the launcher that its ranks name; "" for none."""
    said = (event.launcher for event in session.events_of(Hello, cursor_ns)[:1])
    return str(session.info.get("launcher") or next(said, None) or "")


def find_signal_name(exit_code: int, launcher: str = "") -> str | None:
    """Return the signal behind an exit code: 128 + n by shells, or 256 - n by DeepSpeed's launcher.

    That launcher exits with a rank's negative code. Many programs exit with -1, which arrives as 255 and is no signal.
    """
    is_negative = launcher == "deepspeed" and 256 - 64 <= exit_code < 255
    number = exit_code - 128 if 128 < exit_code <= 128 + 64 else 256 - exit_code if is_negative else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def describe_exit_code(exit_code: int, launcher: str) -> str:
    """Return ``exit code 1``, or ``exit code 247 (SIGKILL)`` where a signal is behind it."""
    name = find_signal_name(exit_code, launcher)
    return f"exit code {exit_code} ({name})" if name else f"exit code {exit_code}"


def find_vanished(gone: Iterable[RankGone], goodbyes: Iterable[Goodbye]) -> RankGone | None:
    """Return the first ``rank_gone`` event of a process that had not written a ``goodbye``."""
    left = {(event.writer.host, event.writer.pid) for event in goodbyes}
    return next((event for event in gone if (event.writer.host, event.pid) not in left), None)


def find_first_exit(session: Session, cursor_ns: int) -> ProcessExit | None:
    """Return the process that failed first up to the cursor; None while nothing failed, and where the job ended well."""
    ended = next(iter(session.events_of(JobEnded, cursor_ns)[-1:]), None)
    gone, goodbyes = session.events_of(RankGone, cursor_ns), session.events_of(Goodbye, cursor_ns)
    vanished = find_vanished(gone, goodbyes)
    code, signal_name, counted = (ended.exit_code, ended.signal, ended.oom_kills) if ended is not None else (None, None, 0)
    kills = max(counted or 0, count_oom_kills(session, cursor_ns))
    failed = ended is not None and code != 0
    if failed and code is None and signal_name is None and vanished is None:
        # Nobody sees the exit code of a job that was attached to; its ranks said that they ended in good order.
        failed = not goodbyes
    is_final = failed or kills > 0
    if not is_final and (ended is not None or vanished is None or gone[0] is not vanished):
        # A rank that vanishes after others have left in good order was taken down with the job.
        return None
    last = vanished or ended
    host = last.writer.host if last is not None else next((source.host for source in session.sources["hosts"]), "")
    rank, pid = (vanished.rank, vanished.pid) if vanished is not None else (None, None)
    launcher = read_launcher(session, cursor_ns)
    at_ns = last.unix_ns if last is not None else cursor_ns
    return ProcessExit(host, at_ns, rank, pid, signal_name, code, kills, is_final, launcher)


def count_oom_kills(session: Session, cursor_ns: int) -> int:
    """Return how many processes the kernel has killed for memory since the recording began, as samplers counted."""
    total = 0
    for source in session.sources["hosts"]:
        counts = source.until(cursor_ns)["cgroup_oom_kills"]
        if len(counts) and counts[0] >= 0:
            total += max(0, int(counts[-1]) - int(counts[0]))
    return total
