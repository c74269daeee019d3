"""Exits of rank processes, as far as they are recorded."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import NamedTuple

from zerotop.recording.keys import ProcessKey, RankProcess, identify_process
from zerotop.recording.moments.moment import Moment, at_event
from zerotop.recording.table_files import Source
from zerotop_probe.recording.event_base import Event
from zerotop_probe.recording.events import (
    Attached,
    Goodbye,
    Hello,
    JobEnded,
    JobStarted,
    Joined,
    Left,
    Parted,
    RankFound,
    RankGone,
)
from zerotop_probe.recording.launchers import LAUNCHERS

_KINDS: tuple[type[Event], ...] = (RankGone, Goodbye, Left, JobEnded, Parted, JobStarted, Attached, Joined)


class ProcessExits:
    """Exits recorded in events.

    The end of a command ends the ranks of its node, and of nodes without a command of their own.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._rank_exits: dict[ProcessKey, list[int]] = {}
        self._left_times: dict[ProcessKey, list[int]] = {}
        self._command_exits: dict[str, list[int]] = {}
        self._command_begins: dict[str, int] = {}
        for event in events:
            host = event.writer.host
            if isinstance(event, (RankGone, Goodbye)):
                self._rank_exits.setdefault(event.process_key, []).append(event.unix_ns)
            elif isinstance(event, Left):
                self._left_times.setdefault(event.process_key, []).append(event.unix_ns)
            elif isinstance(event, JobEnded) or (isinstance(event, Parted) and "exit_code" in event.facts):
                self._command_exits.setdefault(host, []).append(event.unix_ns)
            elif isinstance(event, (JobStarted, Attached, Joined)):
                self._command_begins.setdefault(host, event.unix_ns)

    def find_exit(self, source: Source) -> int | None:
        """Return when the process that writes ``source`` exited (unix time); None if not recorded."""
        return self.find_exit_after(source.host, source.pid, source.created_ns)

    def reported_until(self, source: Source) -> int | None:
        """Return when the process that writes ``source`` exited or the probe left it; None if not recorded."""
        if not (self._rank_exits or self._left_times or self._command_exits):
            return None
        left = self._find_first(self._left_times.get((source.host, source.pid), ()), source.created_ns)
        return min(filter(None, [left, self.find_exit(source)]), default=None)

    def find_exit_after(self, host: str, pid: int, time_ns: int) -> int | None:
        """Return the first exit of this pid after ``time_ns``: earlier ones are of other processes."""
        own = self._rank_exits.get((host, pid), [])
        hosts = (host,) if host in self._command_begins else tuple(self._command_exits)
        ends = [*own, *(end for command_host in hosts for end in self._command_exits.get(command_host, ()))]
        return self._find_first(ends, time_ns)

    def _find_first(self, times: Iterable[int], since_ns: int) -> int | None:
        return min((time_ns for time_ns in times if since_ns <= time_ns), default=None)


@at_event()
def read_exits(moment: Moment) -> ProcessExits:
    """Return the exits that were recorded."""
    return ProcessExits(event for kind in _KINDS for event in moment.events_of(kind))


@at_event()
def find_alive_processes(moment: Moment) -> tuple[RankProcess, ...]:
    """Return the rank processes that hold memory, by rank: neither gone nor replaced by a restart."""
    exits = read_exits(moment)
    alive = [identify_process(source) for source in find_latest(moment) if exits.find_exit(source) is None]
    return tuple(sorted(alive, key=lambda process: (process.rank, process.host)))


def find_latest(moment: Moment) -> list[Source]:
    """Return a table of the last process of each rank, alive or not."""
    latest: dict[tuple[str, int], Source] = {}  # by host and rank
    for source in moment.sources["begins"] + moment.sources["spans"] + moment.sources["allocator"]:
        key = (source.host, source.rank)
        if source.created_ns <= moment.cursor_ns and (key not in latest or latest[key].created_ns < source.created_ns):
            latest[key] = source
    return list(latest.values())


# --- the process that failed first -----------------------------------------------------------------------------------------

_PASS_NEGATIVE = {launcher.name for launcher in LAUNCHERS if launcher.passes_negative}


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
    def signal_name(self) -> str | None:
        """The signal that ended the command or a rank."""
        if self.signal or self.exit_code is None:
            return self.signal or None
        return find_signal_name(self.exit_code, self.launcher)


def read_launcher(moment: Moment) -> str:
    """Return the launcher in the job's command, else the launcher that its ranks name; "" for none."""
    said = (event.launcher for event in moment.events_of(Hello)[:1])
    return str(moment.recording.info.get("launcher") or next(said, None) or "")


def find_signal_name(exit_code: int, launcher: str = "") -> str | None:
    """Return the signal behind an exit code: 128 + n by shells, or 256 - n by DeepSpeed's launcher.

    That launcher exits with a rank's negative code. Many programs exit with -1, which arrives as 255 and is no signal.
    """
    is_negative = launcher in _PASS_NEGATIVE and 256 - 64 <= exit_code < 255
    number = exit_code - 128 if 128 < exit_code <= 128 + 64 else 256 - exit_code if is_negative else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


@at_event()
def find_end_signal(moment: Moment) -> str:
    """Return the name of the signal behind the end of the job's command; "" without one, and where the code is a rank's own.

    A rank can exit with 137 itself. Its own process shows a signal by other means: only a shell's code is 128 more.
    """
    ended = next(iter(moment.events_of(JobEnded)[-1:]), None)
    if ended is None or ended.exit_code is None or ended.signal:
        return (ended and ended.signal) or ""
    commands = {event.process_key for event in moment.events_of(JobStarted)}
    ranks = {event.process_key for kind in (Hello, RankFound, RankGone) for event in moment.events_of(kind)}
    if commands & ranks or any(event.exit_code == ended.exit_code for event in moment.events_of(RankGone)):
        return ""
    return find_signal_name(ended.exit_code, read_launcher(moment)) or ""


def describe_exit_code(exit_code: int, signal_name: str) -> str:
    """Return ``exit code 1``, or ``exit code 247 (SIGKILL)`` where a signal is behind it."""
    return f"exit code {exit_code} ({signal_name})" if signal_name else f"exit code {exit_code}"


def find_first_exit(moment: Moment) -> ProcessExit | None:
    """Return the process that failed first up to the cursor; None while nothing failed, and where the job ended well."""
    ended = next(iter(moment.events_of(JobEnded)[-1:]), None)
    gone, goodbyes = moment.events_of(RankGone), moment.events_of(Goodbye)
    left = {event.process_key for event in goodbyes}
    vanished = next((event for event in gone if event.process_key not in left), None)
    code, signal_name, counted = (ended.exit_code, ended.signal, ended.oom_kills) if ended is not None else (None, None, 0)
    kills = max(counted or 0, count_oom_kills(moment) or 0)
    failed = ended is not None and code != 0
    if failed and code is None and signal_name is None and vanished is None:
        # Nobody sees the exit code of a job that was attached to; its ranks said that they ended in good order.
        failed = not goodbyes
    is_final = failed or kills > 0
    if not is_final and (ended is not None or vanished is None or gone[0] is not vanished):
        # A rank that vanishes after others have left in good order was taken down with the job.
        return None
    last = vanished or ended
    host = last.writer.host if last is not None else next((source.host for source in moment.sources["hosts"]), "")
    rank, pid = (vanished.rank, vanished.pid) if vanished is not None else (None, None)
    launcher = read_launcher(moment)
    at_ns = last.unix_ns if last is not None else moment.cursor_ns
    return ProcessExit(host, at_ns, rank, pid, signal_name, code, kills, is_final, launcher)


def count_oom_kills(moment: Moment, host: str | None = None, begin_ns: int = 0) -> int | None:
    """Return how many processes the kernel has killed for memory since a time, as samplers counted; None if none did."""
    sources = moment.sources["hosts"] if host is None else moment.host_sources("hosts", host)
    counts = [source.between(begin_ns, moment.cursor_ns)["cgroup_oom_kills"] for source in sources]
    known = [max(0, int(one[-1]) - int(one[0])) for one in counts if len(one) and one[0] >= 0]
    return sum(known) if known else None
