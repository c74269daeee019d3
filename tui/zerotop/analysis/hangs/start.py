"""Find the lines at which ranks are stuck while a job has not finished a step yet."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from zerotop.analysis.hangs.stacks import StackReport, read_silent_stacks
from zerotop.analysis.hangs.standstill import Standstill, group_ranks
from zerotop.analysis.hangs.waits import FOR_OTHERS, LONG_WORK, find_wait
from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop_probe.recording import events

# The least time between two stacks of a stuck rank: a rank that loads or compiles may be in one line for long.
_APART_NS = 10 * 10**9
# In a job that was attached to, of a rank that has done nothing meanwhile.
_IDLE_APART_NS = 2 * 10**9
# Ranks wait for one that works, as one that evaluates alone does, for at least so long (s) before that is told.
_LONG_WAIT_S = 20.0


class Start(NamedTuple):
    """The lines at which all ranks are stuck, and the time since which none of them has moved (unix time)."""

    standstill: Standstill
    since_ns: int


def list_processes(at: At) -> list[RankProcess]:
    """Return the processes of the ranks that run at a time, by rank, also of those that have not written anything."""
    found = (*at.events_of(events.RankFound), *at.events_of(events.RankStacks))
    gone_ns = {event.process_key: event.unix_ns for event in at.events_of(events.RankGone)}
    last = {event.process_key: (event.rank, event.unix_ns) for event in found}
    return sorted(
        (
            RankProcess(host, pid, rank)
            for (host, pid), (rank, found_ns) in last.items()
            if pid is not None and rank is not None and gone_ns.get((host, pid), 0) < found_ns
        ),
        key=lambda process: (process.rank, process.host, process.pid),
    )


def find_last_stacks(at: At) -> int:
    """Return when the last stacks up to a time were written; 0 without any."""
    last = (*at.events_of(events.RankStacks)[-1:], *at.events_of(events.Stacks)[-1:])
    return max((event.unix_ns for event in last), default=0)


def find_standstill(at: At) -> Start | None:
    """Return the stuck ranks at a time, if the last stacks of each of them end in the same line of the job's own."""
    known = {process: read_silent_stacks(at.recording, process, 0, at.cursor_ns) for process in list_processes(at)}
    is_attached = bool(at.events_of(events.Attached))
    if not known or not all(_stands_still(found, is_attached=is_attached) for found in known.values()):
        return None
    since_ns = max(_find_begin(found) for found in known.values())
    return Start(group_ranks(list(known), {process: found[-1] for process, found in known.items()}, {}), since_ns)


def find_awaited(at: At) -> Start | None:
    """Return the ranks of a job that was attached to, if some have waited idly for long for others that go on working."""
    known = {process: read_silent_stacks(at.recording, process, 0, at.cursor_ns) for process in list_processes(at)}
    if not at.events_of(events.Attached) or not all(known.values()):
        return None
    standstill = group_ranks(list(known), {process: found[-1] for process, found in known.items()}, {})
    waiting = [stacks for group in standstill.groups if group.awaits_others for stacks in group.stacks]
    if not waiting or len(waiting) == len(known) or min(stacks.idle_s for stacks in waiting) < _LONG_WAIT_S:
        return None
    since_ns = max(stacks.time_ns - int(stacks.idle_s * 1e9) for stacks in waiting)
    for process in known.keys() - {stacks.process for stacks in waiting}:
        looks = [stacks for stacks in known[process] if stacks.time_ns >= since_ns]
        waits = {find_wait(stacks.training).kind for stacks in looks}
        if len(looks) < 2 or waits & (FOR_OTHERS | LONG_WORK):
            return None
    return Start(standstill, since_ns)


def _stands_still(found: list[StackReport], *, is_attached: bool) -> bool:
    same = _list_same(found)
    is_idle = is_attached and len(same) >= 2 and all(one.idle_s for one in same[:2])
    return len(same) >= 2 and same[0].time_ns - same[-1].time_ns >= (_IDLE_APART_NS if is_idle else _APART_NS)


def _find_begin(found: list[StackReport]) -> int:
    return min(one.time_ns - int(one.idle_s * 1e9) for one in _list_same(found))


def _list_same(found: list[StackReport]) -> list[StackReport]:
    """Return the last stacks that end in the same line, newest first."""
    return list(takewhile(lambda one: one.training.own_frame == found[-1].training.own_frame, reversed(found)))
