"""Find where the ranks stand while a job makes no progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.hangs.stacks import StackReport, read_silent_stacks
from zerotop.analysis.hangs.standstill import Standstill, group_ranks
from zerotop.analysis.hangs.start import find_last_stacks, find_standstill, list_processes
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_event
from zerotop.recording.moments.process_exits import find_latest
from zerotop.recording.reader import Recording, Source
from zerotop_probe.recording import events

# A rank's Python does not run if it has written no stacks this long after the first rank.
_NO_STACKS_NS = 8 * 10**9


class StandstillReader:
    """Reads the stacks that the ranks of an attempt wrote since they became silent, up to ``until_ns`` (unix time)."""

    def __init__(self, recording: Recording, sources: Sequence[Source], since_ns: int, until_ns: int) -> None:
        """``sources``: a table that each rank's process writes."""
        self._recording = recording
        self._sources = sources
        processes = sorted((identify_process(source) for source in sources), key=lambda process: process.rank)
        self._stacks = {process: read_silent_stacks(recording, process, since_ns, until_ns) for process in processes}

    @property
    def written_ns(self) -> list[int]:
        """When ranks have written stacks, in order."""
        return sorted(stacks.time_ns for found in self._stacks.values() for stacks in found)

    def read_at(self, time_ns: int, *, confirmed: bool) -> Standstill | None:
        """Return where the ranks stood at a time; None if no rank has written its stacks.

        ``confirmed``: None as well unless each rank that lives has written the same stack twice, or nothing for long
        although others have.
        """
        known = {process: [one for one in found if one.time_ns <= time_ns] for process, found in self._stacks.items()}
        first_ns = min((found[0].time_ns for found in known.values() if found), default=None)
        if first_ns is None:
            return None
        ends = {end.process: end for end in find_ends(self._recording.at(time_ns), self._sources)}
        alive = {process: found for process, found in known.items() if process not in ends}
        is_late = time_ns >= first_ns + _NO_STACKS_NS
        if confirmed and not all(_stands_still(found) or (is_late and not found) for found in alive.values()):
            return None
        calling = [one.time_ns for found in alive.values() for one in found if one.calls]
        is_early = bool(calling) and time_ns < min(calling) + _NO_STACKS_NS
        if confirmed and is_early and any(map(_has_calls_to_come, alive.values())):
            return None
        return group_ranks(list(known), {process: found[-1] for process, found in alive.items() if found}, ends)

    def find_arrival(self, since_ns: int) -> int:
        """Return since when the ranks have been where their last stacks show them: ``since_ns`` if all stacks do."""
        moved = (
            found[index + 1].time_ns
            for found in self._stacks.values()
            for index, one in enumerate(found)
            if one.training.own_frame != found[-1].training.own_frame
        )
        return max(moved, default=since_ns)


def _has_calls_to_come(found: Sequence[StackReport]) -> bool:
    """Whether a rank whose Python runs has not yet written its calls of collectives, as others have."""
    return any(one.is_running for one in found) and not any(one.calls for one in found)


def _stands_still(found: Sequence[StackReport]) -> bool:
    """Whether the last two stacks of a rank end in the same line of the job's own, or its Python does not run."""
    if found and not found[-1].is_running:
        return True
    return len(found) >= 2 and found[-1].training.own_frame == found[-2].training.own_frame


class Stillness(NamedTuple):
    """A standstill, and its begin (unix time)."""

    standstill: Standstill
    since_ns: int


def find_stillness(at: At) -> Stillness | None:
    """Return where the ranks of the last attempt stand; None if they work.

    Of a job that ended while it stood still, where they stood before that.
    """
    if not any(at.events_of(kind) for kind in (events.Stacks, events.RankStacks)):
        return None
    return _find_stillness(at, at.cursor_ns // _NO_STACKS_NS)


@at_event("begins", "spans")
def _find_stillness(at: At, _period: int) -> Stillness | None:
    sources = find_latest(at)
    since_ns = max((_find_last_sign(at, identify_process(source)) for source in sources), default=0)
    ends = [*at.events_of(events.StopSent), *at.events_of(events.JobEnded)]
    until_ns = min((event.unix_ns - 1 for event in ends if event.unix_ns > since_ns), default=at.cursor_ns)
    last_ns = find_last_stacks(at.at(until_ns))
    if not {identify_process(source) for source in sources}.issuperset(list_processes(at.at(last_ns))):
        start = find_standstill(at.at(last_ns))
        # While a rank is idle its stacks are read again, each time after twice as long.
        is_over = start is None or until_ns > last_ns + 2 * (last_ns - start.since_ns)
        return Stillness(*start) if start is not None and not is_over else None
    reader = StandstillReader(at.recording, sources, since_ns, until_ns)
    standstill = reader.read_at(until_ns, confirmed=False)
    return Stillness(standstill, since_ns) if standstill is not None else None


def _find_last_sign(at: At, process: RankProcess) -> int:
    """Return when a rank last began or ended a phase (unix time); 0 if never."""
    tables = [at.find_table(name, process) for name in ("begins", "spans")]
    return max((_find_last_time(source, at.cursor_ns) for source in tables if source is not None), default=0)


def _find_last_time(source: Source, cursor_ns: int) -> int:
    rows = source.until(cursor_ns)[-1:]
    times = source.unix_times(rows)
    return int(times[0]) if len(times) else 0
