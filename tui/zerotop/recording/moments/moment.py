"""What had been written of a recording at a moment, and results of functions that are kept while it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from zerotop.recording.events.event_files import E, select_events
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.records import Records
from zerotop.recording.table_files import Source

if TYPE_CHECKING:
    from zerotop.recording.reader import Recording

# A probe creates its tables within this time, and cannot enter again sooner.
_TOGETHER_NS = 100_000_000


class Moment:
    """The events and tables of a recording up to a cursor in unix time."""

    def __init__(self, recording: Recording, cursor_ns: int, known_results: dict[Any, Any], begin_ns: int = 0) -> None:
        self.recording = recording
        self.cursor_ns = cursor_ns
        self.begin_ns = begin_ns  # 0, except for a window
        self.sources = recording.sources
        self.host_sources = recording.host_sources
        self.process_sources = recording.process_sources
        self.find_sibling = recording.find_sibling
        self.results: dict[Any, Any] = {}
        """Results of functions, by function and arguments."""
        self.known_results = known_results
        """The same of all moments between two events."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise AttributeError(f"A moment is immutable: ask the recording for another one, instead of setting {name}")
        super().__setattr__(name, value)

    @property
    def whole(self) -> Moment:
        """The moment with all that was known then."""
        return self.recording.at(self.cursor_ns) if self.begin_ns else self

    def events_of(self, kind: type[E]) -> Sequence[E]:
        """Return the events of a kind, by time."""
        return self._clip(self.recording.events_of(kind, self.cursor_ns))

    def process_events(self, kind: type[E], process: RankProcess) -> Sequence[E]:
        """Return the events of a kind that a rank's process wrote, by time."""
        return self._clip(self.recording.process_events(kind, *process, self.cursor_ns))

    def _clip(self, events: Sequence[E]) -> Sequence[E]:
        return select_events(events, self.begin_ns + 1, self.cursor_ns) if self.begin_ns else events

    def records(self, table: str, host: str, column: str = "", value: int = 0) -> Records:
        """Return a node's records in a table, or only those with ``value`` in ``column``."""
        return Records(self.cursor_ns, self.host_sources(table, host), column, value)

    def find_table(self, name: str, process: RankProcess) -> Source | None:
        """Return the table of a name that a rank's process was writing; None without any."""
        source = self.recording.find_source(name, process.host, process.pid, self.cursor_ns)
        return source if source is not None and identify_process(source) == process else None


def find_sibling_table(recording: Recording, name: str, source: Source) -> Source | None:
    """Return the table of a name that a rank's process wrote at the same time as ``source``."""
    tables = recording.process_sources(source.table, source.host, source.pid)
    later = [other.created_ns for other in tables if other.created_ns > source.created_ns]
    found = recording.find_source(name, source.host, source.pid, min(later) - _TOGETHER_NS if later else None)
    return found if found is not None and found.rank == source.rank else None


M = TypeVar("M", bound=Moment)
P = ParamSpec("P")
T = TypeVar("T")


def at_cursor(compute: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
    """Have a function computed once for each moment and other arguments."""

    def remembered(moment: M, /, *args: P.args, **named: P.kwargs) -> T:
        key = (compute, args, *named.items())
        if key not in moment.results:
            moment.results[key] = compute(moment, *args, **named)
        result: T = moment.results[key]
        return result

    update_wrapper(remembered, compute)
    return remembered


def at_event(*tables: str) -> Callable[[Callable[Concatenate[M, P], T]], Callable[Concatenate[M, P], T]]:
    """Have a function computed again only when there are other events, other tables, or other records in ``tables``."""

    def decorate(compute: Callable[Concatenate[M, P], T]) -> Callable[Concatenate[M, P], T]:
        def remembered(moment: M, /, *args: P.args, **named: P.kwargs) -> T:
            key = (compute, args, *named.items())
            counts = [source.count_until(moment.cursor_ns) for name in tables for source in moment.sources[name]]
            known: tuple[list[int], T] | None = moment.known_results.get(key)
            if known is None or known[0] != counts:
                known = moment.known_results[key] = counts, compute(moment, *args, **named)
            return known[1]

        update_wrapper(remembered, compute)
        return remembered

    return decorate


def keep(source: Source, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Return what ``make``, a class or a function, made for this table when it was first asked for."""
    if make not in source.kept:
        source.kept[make] = make(*args, **named)
    kept: T = source.kept[make]
    return kept
