"""Find where the ranks stand while a job makes no progress."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import NamedTuple

from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.hangs.reading import Reading, count_reads, find_last_training, find_reading
from zerotop.analysis.hangs.stacks import StackReport, read_silent_stacks
from zerotop.analysis.hangs.standstill import Standstill, group_ranks
from zerotop.analysis.hangs.start import find_last_stacks, find_standstill, list_processes
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_event
from zerotop.recording.moments.process_exits import find_latest
from zerotop.recording.moments.rank_records import RankRecords
from zerotop.recording.reader import Recording, Source
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import FAILED

# A rank's Python does not run if it has written no stacks this long after the first rank.
_NO_STACKS_NS = 8 * 10**9


class StandstillReader:
    """Reads the stacks that the ranks of an attempt wrote since they became silent, up to ``until_ns`` (unix time)."""

    def __init__(
        self,
        recording: Recording,
        sources: Sequence[Source],
        since_ns: int,
        until_ns: int,
        readers: Collection[RankProcess] = (),
    ) -> None:
        """``sources``: a table that each rank's process writes. ``readers``: ranks that only read batches."""
        self._since_ns, self._readers = since_ns, readers
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
        still = [found for process, found in alive.items() if process not in self._readers]
        if confirmed and not all(_stands_still(found) or (is_late and not found) for found in still):
            return None
        calling = [one.time_ns for found in still for one in found if one.calls]
        is_early = bool(calling) and time_ns < min(calling) + _NO_STACKS_NS
        if confirmed and is_early and any(map(_has_calls_to_come, still)):
            return None
        at = self._recording.at(time_ns)
        reads = {
            one: count_reads(RankRecords(at, one).records("spans").read_window(self._since_ns, time_ns))
            for one in self._readers
            if one in alive
        }
        return group_ranks(list(known), {process: found[-1] for process, found in alive.items() if found}, ends, reads)

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
    """Whether a rank that waits in a collective has not yet written its calls, as others have."""
    waits = any(one.is_running and any(group.is_pending for group in one.collectives) for one in found)
    return waits and not any(one.calls for one in found)


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

    Of a job that ended while it stood still, where they stood when they wrote their last stacks.
    """
    has_succeeded = any(event.exit_code == 0 for event in at.events_of(events.JobEnded))
    if has_succeeded or not any(at.events_of(kind) for kind in (events.Stacks, events.RankStacks)):
        return None
    return _find_stillness(at, at.cursor_ns // _NO_STACKS_NS)


@at_event("begins", "spans")
def _find_stillness(at: At, _period: int) -> Stillness | None:
    sources = find_latest(at)
    processes = [identify_process(source) for source in sources]
    reading = _find_reading(at, processes)
    since_ns = reading.since_ns if reading is not None else max((_find_last_sign(at, one) for one in processes), default=0)
    until_ns = _find_end(at, since_ns)
    last_ns = find_last_stacks(at.at(until_ns))
    if not set(processes).issuperset(list_processes(at.at(last_ns))):
        start = find_standstill(at.at(last_ns))
        # While a rank is idle its stacks are read again, each time after twice as long.
        is_over = start is None or until_ns > last_ns + 2 * (last_ns - start.since_ns)
        return Stillness(*start) if start is not None and not is_over else None
    readers = [processes[index] for index in reading.readers] if reading is not None else ()
    reader = StandstillReader(at.recording, sources, since_ns, until_ns, readers)
    if len(find_ends(at.at(until_ns), sources)) == len(sources):
        until_ns = max(reader.written_ns, default=until_ns)
    standstill = reader.read_at(until_ns, confirmed=False)
    return Stillness(standstill, since_ns) if standstill is not None else None


def _find_end(at: At, since_ns: int) -> int:
    """Return when the job was stopped or ended after a time, or the cursor."""
    ends = [*at.events_of(events.StopSent), *at.events_of(events.JobEnded)]
    return min((event.unix_ns - 1 for event in ends if event.unix_ns > since_ns), default=at.cursor_ns)


def _find_reading(at: At, processes: Sequence[RankProcess]) -> Reading | None:
    """Return which ranks only read batches, and since when, if the others do nothing."""
    since_ns = max((_find_last_sign(at, process, of_training=True) for process in processes), default=0)
    until_ns = _find_end(at, since_ns)
    begins, spans = (
        [RankRecords(at, process).records(table).read_window(since_ns, until_ns) for process in processes]
        for table in ("begins", "spans")
    )
    return find_reading(begins, spans, since_ns, until_ns)


def _find_last_sign(at: At, process: RankProcess, *, of_training: bool = False) -> int:
    """Return when a rank last began or ended a phase (unix time), or one other than reading data; 0 if never.

    After the end of the job, not when an exception, such as of an interrupted process, ended its last phase.
    """
    spans, begins = (at.find_table(name, process) for name in ("spans", "begins"))
    until_ns = at.cursor_ns
    if spans is not None and at.events_of(events.JobEnded):
        failed = takewhile(lambda span: span["flags"] & FAILED, reversed(spans.until(until_ns)))
        until_ns = min((int(span["begin_ns"]) + spans.offset_ns - 1 for span in failed), default=until_ns)
    tables = [one for one in (spans, begins) if one is not None]
    return max((_find_last_time(source, until_ns, of_training=of_training) for source in tables), default=0)


def _find_last_time(source: Source, cursor_ns: int, *, of_training: bool) -> int:
    rows = source.until(cursor_ns)
    last = find_last_training(rows) if of_training else len(rows) - 1
    rows = rows[last : last + 1] if last >= 0 else rows[:0]
    times = source.unix_times(rows)
    return int(times[0]) if len(times) else 0
