"""Stopping a job: first asking, then insisting, then killing what is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

from zerotop_probe.outside.procfs import Process, find_family, list_pids, read_environment, read_stat
from zerotop_probe.recording.directory import SESSION_VARIABLE

# What asks an agent to stop its job, whatever runs it. SIGTERM cannot be it: in the foreground that belongs
# to the job.
STOP_REQUEST = signal.SIGRTMIN + 3
# What asks an agent to end and leave its job alone.
LEAVE_REQUEST = signal.SIGRTMIN + 4

# Seconds from SIGINT to SIGTERM, and from SIGTERM to SIGKILL. DeepSpeed's launcher gives its ranks up to 30
# s, most end in 2.
GRACE_S = (10.0, 20.0)

_STAGES = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_KILL_AGAIN_S = 0.5


def find_job_processes(root: Process, session: str, ranks: Iterable[Process] = ()) -> list[Process]:
    """All living processes of a job: the root, ``ranks``, their descendants, and who else carries the session's variable.

    The last finds ranks whose launcher has died. The calling process is never among them.
    """
    found = dict.fromkeys(find_family(root.pid) if root.is_alive() else ())
    for rank in ranks:
        if rank.pid not in found and rank.is_alive():
            found.update(dict.fromkeys(find_family(rank.pid)))
    user = os.getuid()
    for pid in list_pids():
        if pid not in found and _find_owner(pid) == user and read_environment(pid).get(SESSION_VARIABLE) == session:
            found[pid] = None
    found.pop(os.getpid(), None)
    return [process for pid in found if (process := Process.from_pid(pid)) is not None]


def _find_owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def signal_job(root: Process, session: str, number: int, ranks: Iterable[Process] = ()) -> int:
    """Sends a signal as a terminal would: to the process group of the job's root. Returns how many got it.

    ``ranks``: those known, of which some may not be the root's; they get it themselves. SIGKILL goes to all processes of the
    job, whatever group they have moved to.
    """
    ranks = list(ranks)
    facts = read_stat(root.pid) if root.is_alive() else None
    if number == signal.SIGKILL or facts is None:
        return sum(_send_signal(member, number) for member in find_job_processes(root, session, ranks))
    below = set(find_family(root.pid))
    apart = [rank for rank in ranks if rank.pid not in below]
    return _signal_group(root, session, number, facts.group) + sum(_send_signal(rank, number) for rank in apart)


def _signal_group(root: Process, session: str, number: int, group: int) -> int:
    if group == root.pid:
        try:
            os.killpg(group, number)
            return 1
        except ProcessLookupError:
            return 0
    # In the foreground the group is ours and our caller's, so only the job's own members of it are meant.
    members = find_job_processes(root, session)
    return sum(_send_signal(member, number) for member in members if (own := read_stat(member.pid)) and own.group == group)


def _send_signal(process: Process, number: int) -> bool:
    try:
        return process.send_signal(number)
    except PermissionError:  # it has taken another user's identity
        return False


class Stopper:
    """Escalates: SIGINT, after a while SIGTERM, after another while SIGKILL until nothing is left."""

    def __init__(
        self,
        root: Process,
        session: str,
        *,
        grace_s: tuple[float, float],
        on_sent: Callable[[str], None],
        ranks: Callable[[], Iterable[Process]] = tuple,
    ) -> None:
        """``on_sent`` is told the name of every signal when it is sent; ``ranks`` are those known by then."""
        self._root = root
        self._session = session
        self._ranks = ranks
        self._grace_s = (*grace_s, _KILL_AGAIN_S)
        self._on_sent = on_sent
        self._stage = -1
        self._deadline_s: float | None = None

    @property
    def is_requested(self) -> bool:
        """Whether somebody has asked for a stop."""
        return self._stage >= 0

    def request_stop(self, now_s: float) -> None:
        """Asks for the job's end. Asking again goes to the next stage at once."""
        before = self._stage
        self._stage = min(before + 1, len(_STAGES) - 1)
        number = _STAGES[self._stage]
        self._deadline_s = now_s + self._grace_s[self._stage]
        signal_job(self._root, self._session, number, self._ranks())
        if self._stage != before:
            self._on_sent(number.name)

    def poll(self, now_s: float) -> None:
        """Goes to the next stage when the time of this one is over."""
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self.request_stop(now_s)
