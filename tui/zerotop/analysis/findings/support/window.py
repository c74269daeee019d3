"""Windows of a recording, in which detectors look: they declare how far they look back, and remember nothing themselves.

A window shows what is new since the last search, and so much before it that a finding is whole in one window. So a finding
may be found several times: the first one counts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import update_wrapper
from typing import Any, Generic, TypeVar

from zerotop.analysis.findings.support.evidence import Evidence, Group, Process
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.rank_process import AdvancingRecording
from zerotop.recording.moments.records import Records
from zerotop.recording.reader import Source
from zerotop.recording.samples import Rows, Samples

S = TypeVar("S", Process, Group, Evidence, AdvancingRecording)
T = TypeVar("T")
M = TypeVar("M")
Found = Iterable[Finding | None]
# Findings of one kind that are all reported.
_MOST_REPORTS = 20
_NEEDS_EVENTS = "needs_events_alone"


class SearchWindow(Generic[S]):
    """The records, steps and results of one subject in which a detector looks."""

    def __init__(self, recording: Evidence, subject: S, host: str, kinds: int | None, *, by_ranks: bool) -> None:
        self.recording, self.host = recording, host
        self.subject: S = subject
        self.is_closed = False
        """Whether the detector needs no more of it."""
        self._kinds, self._by_ranks = kinds, by_ranks
        self._counts: dict[Hashable, dict[Source, int]] = {}  # records that were shown
        self._lengths: Counter[Hashable] = Counter()  # steps that were shown
        self._items: Counter[Hashable] = Counter()
        self._results: dict[Hashable, list[Any]] = {}
        self._firsts: dict[Hashable, list[Any]] = {}
        self._followed: list[Any] = []
        self._lasts: dict[Hashable, Any] = {}  # of the results that follow from each other
        self._kept: dict[Hashable, Any] = {}
        self._news: dict[Hashable, Any] = {}
        self._totals: dict[Hashable, float] = defaultdict(float)
        self._waiting: dict[Hashable, list[Any]] = {}
        self._findings: set[Hashable] = set()
        self._events: set[Hashable] = set()  # that findings were yielded about
        self._reports: Counter[tuple[str, Severity, tuple[int, ...]]] = Counter()

    def records(self, records: Records, look_back_ns: int = 0, look_back: int = 0) -> Samples:
        """Return new records, and those of a time, or so many, before the first of them; none if there are no new ones."""
        return records.read_new(self._counts.setdefault(records.selection, {}), look_back_ns, look_back)

    def steps(self, rows: Rows, look_back: int = 0, of: Hashable = None) -> slice:
        """Return where new rows are, with so many before them; an empty slice if there are none. ``of``: whose they are."""
        begin, count = self._lengths[of], len(rows)
        self._lengths[of] = max(begin, count)
        return slice(max(0, begin - look_back) if count > begin else count, count)

    def items(self, items: Sequence[T], of: Hashable = None) -> Sequence[T]:
        """Return the items that were appended to a sequence, such as events, since the last call."""
        begin, self._items[of] = self._items[of], max(self._items[of], len(items))
        return items[begin:]

    def results(self, fresh: Iterable[T], look_back: int | None, of: Hashable = None) -> list[T]:
        """Return the new results together with the last ``look_back`` older ones (None: all); nothing without new ones."""
        before: list[T] = self._results.get(of, [])
        together = [*before, *fresh]
        self._results[of] = together if look_back is None else together[max(0, len(together) - look_back) :]
        return together if len(together) > len(before) else []

    def gather(self, fresh: Iterable[T], of: Hashable = None) -> Sequence[T]:
        """Return all results up to now, the new ones last."""
        gathered: list[T] = self.keep(list, (self, of))
        gathered += fresh
        return gathered

    def extend(
        self, build_next: Callable[[T | None], T | None], look_back: int | None = None, of: Hashable = None
    ) -> list[T]:
        """Return new results that each follow from the one before, and so many older ones, or all; none without new ones."""
        new: list[T] = []
        while (following := build_next(self._lasts.get(of))) is not None:
            new.append(following)
            self._lasts[of] = following
        return self.results(new, look_back, (self, of))

    def follow(self, fresh: Iterable[T], find_next: Callable[[T], T | None]) -> Iterator[T]:
        """Yield new results, and those that follow from each of them, such as a finding with newer numbers."""
        for one in fresh:
            self._followed.append(one)
            yield one
        for number in range(len(self._followed)):
            while (following := find_next(self._followed[number])) is not None:
                self._followed[number] = following
                yield following

    def find_once(self, find: Callable[[], T | None], of: Hashable = None) -> T | None:
        """Return the first result; None before there is one."""
        known: list[T] = self._firsts.setdefault(of, [])
        if not known and (found := find()) is not None:
            known.append(found)
        return known[0] if known else None

    def is_news(self, value: T, differs: Callable[[T, T], bool], of: Hashable = None) -> bool:
        """Whether a value is the first one, or differs from the last one that was news."""
        if of in self._news and not differs(self._news[of], value):
            return False
        self._news[of] = value
        return True

    def total(self, amount: float, of: Hashable) -> float:
        """Return the sum of all amounts up to now."""
        self._totals[of] += amount
        return self._totals[of]

    def has_grown(self, value: float, least: float, more: float, of: Hashable) -> bool:
        """Whether a value is large enough, and larger by the share ``more`` than when this was last true.

        What is examined then takes time that grows linearly with the recording.
        """
        return value >= least and self.is_news(value, lambda last, now: now >= last + math.ceil(more * last), of)

    def keep(self, make: Callable[[], T], of: Hashable = None) -> T:
        """Return what ``make`` returned at first, for example a search that reads each step of a growing table once."""
        if (make, of) not in self._kept:
            self._kept[make, of] = make()
        kept: T = self._kept[make, of]
        return kept

    def await_each(
        self, fresh: Iterable[T], find_more: Callable[[T], M | None], of: Hashable = None
    ) -> Iterator[tuple[T, M]]:
        """Yield results with what ``find_more`` returns, as soon as that is not None."""
        waiting = [*self._waiting.pop(of, []), *fresh]
        kept = self._waiting.setdefault(of, [])
        for one in waiting:
            if (more := find_more(one)) is None:
                kept.append(one)
            else:
                yield one, more

    def count_reports(self, kind: FindingKind) -> int:
        """Return about how many events it had findings of a kind."""
        return sum(count for (name, *_), count in self._reports.items() if name == kind.name)

    def select_news(self, found: Found) -> Iterator[Finding]:
        """Yield findings that were not found before, and close the window when no more are wanted.

        An event that was told is told again with newer numbers, or with its end, as often as it is found.
        """
        for finding in found:
            if finding is not None:
                key = finding.known_ns, finding.event
                if key not in self._findings:
                    self._findings.add(key)
                    is_known = finding.event in self._events
                    alike = finding.name, finding.severity, finding.ranks if self._by_ranks else ()
                    self._reports[alike] += not is_known
                    if self._is_news(self._reports[alike], is_known=is_known):
                        self._events.add(finding.event)
                        self.subject.findings.append(finding)
                        yield finding
                if len({name for name, *_ in self._reports}) == self._kinds:
                    self.is_closed = True
                    return

    def _is_news(self, count: int, *, is_known: bool) -> bool:
        """Whether to report one more finding of a kind. A constant repetition is news only as often as it doubles."""
        if self._kinds is not None:
            return count <= 1 and not is_known
        return is_known or count <= _MOST_REPORTS or count.bit_count() == 1


class _Declaration(Generic[S]):
    """A decorator of detectors. ``kinds``: they report so many kinds, each once, or None: all findings that are news.

    ``by_ranks``: findings about other ranks are news, however many there were.
    """

    def __init__(
        self, list_subjects: Callable[[Evidence], Iterable[tuple[S, str]]], *, needs_events_alone: bool = False
    ) -> None:
        self._list_subjects: Callable[[Evidence], Iterable[tuple[S, str]]] = list_subjects
        self._needs_events = needs_events_alone

    def __call__(
        self, kinds: int | None = 1, *, by_ranks: bool = False
    ) -> Callable[[Callable[[SearchWindow[S]], Found]], Callable[[Evidence], Found]]:
        def decorate(detect: Callable[[SearchWindow[S]], Found]) -> Callable[[Evidence], Found]:
            def search(recording: Evidence) -> Found:
                for subject, host in self._list_subjects(recording):
                    if (detect, host) not in subject.windows:
                        subject.windows[detect, host] = SearchWindow(recording, subject, host, kinds, by_ranks=by_ranks)
                    window: SearchWindow[S] = subject.windows[detect, host]
                    if not window.is_closed:
                        yield from window.select_news(detect(window))

            update_wrapper(search, detect)
            vars(search)[_NEEDS_EVENTS] = self._needs_events
            return search

        return decorate


in_each_rank = _Declaration[Process](lambda recording: [(process, "") for process in recording.processes])
"""Have a detector look at each rank's process."""
in_each_attempt = _Declaration[Group](lambda recording: [(group, "") for group in recording.groups])
"""Have a detector look at the ranks of each attempt."""
in_each_node = _Declaration[Group](lambda recording: [(group, host) for group in recording.groups for host in group.hosts])
"""Have a detector look at the ranks of each attempt on each node."""
in_job = _Declaration[Evidence](lambda recording: [(recording, "")])
"""Have a detector look at the whole job."""
in_events = _Declaration[AdvancingRecording](lambda recording: [(recording.news, "")], needs_events_alone=True)
"""Have a detector look at the whole job's events, and at records only up to those: it looks as soon as they are read."""


def needs_events_alone(detect: Callable[[Evidence], Found]) -> bool:
    """Whether a detector looks at events as soon as they are read."""
    return getattr(detect, _NEEDS_EVENTS, False)
