"""Stopping a job: SIGINT, then SIGTERM, then SIGKILL for every process that is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

from zerotop_probe.outside.procfs import ProcessHandle, find_family, iter_processes, read_stat
from zerotop_probe.recording.directory import SESSION_VARIABLE
from zerotop_probe.recording.node_part import read_session_value

# Asks an agent to stop its job. Not SIGTERM: in the foreground that is passed on to the job.
STOP_REQUEST = signal.SIGRTMIN + 3
# Asks an agent to exit and leave its job running.
LEAVE_REQUEST = signal.SIGRTMIN + 4

# Seconds from SIGINT to SIGTERM, and from SIGTERM to SIGKILL. DeepSpeed's launcher waits up to 30 s for its ranks; most end
# within 2 s.
GRACE_S = (10.0, 20.0)

STAGES = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_KILL_AGAIN_S = 0.5


def find_job_processes(root: ProcessHandle, recording: str, ranks: Iterable[ProcessHandle] = ()) -> list[ProcessHandle]:
    """Return all living processes of a job except the caller.

    These are the root, ``ranks``, their descendants, and processes of this user whose environment names the recording. The
    latter include ranks whose launcher has died.
    """
    pids = dict.fromkeys(find_family(root.pid) if root.is_alive() else ())
    for rank in ranks:
        if rank.pid not in pids and rank.is_alive():
            pids.update(dict.fromkeys(find_family(rank.pid)))
    user, session = os.getuid(), read_session_value(recording)
    for pid, attributes in iter_processes("uids", "environ"):
        owner, environment = attributes["uids"], attributes["environ"] or {}
        if owner is not None and owner.effective == user and environment.get(SESSION_VARIABLE) == session:
            pids[pid] = None
    pids.pop(os.getpid(), None)
    return [process for pid in pids if (process := ProcessHandle.from_pid(pid)) is not None]


def signal_job(root: ProcessHandle, recording: str, number: int, ranks: Iterable[ProcessHandle] = ()) -> int:
    """Send a signal as a terminal would, to the process group of the job's root. Return how many received it.

    ``ranks`` that do not descend from the root receive it individually. SIGKILL goes to every process of the job, whatever
    its process group.
    """
    ranks = list(ranks)
    stat = read_stat(root.pid) if root.is_alive() else None
    if number == signal.SIGKILL or stat is None:
        return sum(_send_signal(member, number) for member in find_job_processes(root, recording, ranks))
    descendants = set(find_family(root.pid))
    others = [rank for rank in ranks if rank.pid not in descendants]
    return _signal_group(root, recording, number, stat.group) + sum(_send_signal(rank, number) for rank in others)


def _signal_group(root: ProcessHandle, recording: str, number: int, group: int) -> int:
    if group == root.pid:
        try:
            os.killpg(group, number)
            return 1
        except ProcessLookupError:
            return 0
    # In the foreground the group is also ours and our caller's: only the job's own members of it are signalled.
    members = find_job_processes(root, recording)
    return sum(_send_signal(member, number) for member in members if (own := read_stat(member.pid)) and own.group == group)


def _send_signal(process: ProcessHandle, number: int) -> bool:
    try:
        return process.send_signal(number)
    except PermissionError:  # it has changed to another user
        return False


class Stopper:
    """Escalates: SIGINT, after a while SIGTERM, after another while SIGKILL until no process is left."""

    def __init__(
        self,
        root: ProcessHandle,
        recording: str,
        *,
        grace_s: tuple[float, float],
        on_sent: Callable[[str], None],
        ranks: Callable[[], Iterable[ProcessHandle]] = tuple,
    ) -> None:
        """``on_sent`` receives the name of each signal when it is sent; ``ranks`` returns the ranks found so far."""
        self._root = root
        self._recording = recording
        self._ranks = ranks
        self._grace_s = (*grace_s, _KILL_AGAIN_S)
        self._on_sent = on_sent
        self._stage = -1
        self._deadline_s: float | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a stop was requested."""
        return self._stage >= 0

    def request_stop(self, now_s: float) -> None:
        """Begin to stop the job. Calling it again goes to the next stage at once."""
        before = self._stage
        self._stage = min(before + 1, len(STAGES) - 1)
        number = STAGES[self._stage]
        self._deadline_s = now_s + self._grace_s[self._stage]
        signal_job(self._root, self._recording, number, self._ranks())
        if self._stage != before:
            self._on_sent(number.name)

    def poll(self, now_s: float) -> None:
        """Go to the next stage when the grace period of this one is over."""
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self.request_stop(now_s)
