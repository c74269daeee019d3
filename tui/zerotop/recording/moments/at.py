"""A recording at a moment: its ranks, its nodes and its end as known then."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerotop.recording.events.event_index import get_event_time
from zerotop.recording.keys import identify_process
from zerotop.recording.moments.moment import Moment, at_event
from zerotop.recording.moments.process_exits import find_latest
from zerotop.recording.moments.rank_records import RankRecords
from zerotop.recording.samples import Samples
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop.recording.steps.step_table import StepTable
from zerotop_probe.recording.events import Node

if TYPE_CHECKING:
    from zerotop.analysis.failures.end import End
    from zerotop.recording.reader import Recording

_NO_STEPS = np.empty(0, STEP_DTYPE)
K = TypeVar("K")
V = TypeVar("V")
_MOST_KEPT = 32  # moments: a picture asks for the cursor, for those of peaks, and for those around a failure


class RankAt(RankRecords):
    """A rank's last process."""

    def __repr__(self) -> str:
        return f"<rank {self.rank}, process {self.pid} on {self.host}>"

    def samples(self, table: str) -> Samples:
        """Return its records in a table, for example ``spans``, or those of samplers about it: ``processes`` or ``gpus``."""
        sampled = {"processes": self.host_samples, "gpus": self.gpu_samples}
        records = sampled.get(table) or self.records(table)
        return records.read_window(self.at.begin_ns, self.at.cursor_ns)

    @property
    def steps(self) -> Samples:
        """The finished optimizer steps, by their ends (STEP_DTYPE), also those of which only the number is known."""
        table: StepTable = self.at.recording.kept.setdefault(StepTable, StepTable(self.at.recording))
        table.update()
        own = [one for one in table.rank_steps if identify_process(one.source) == self.process]
        rows = next((one.step_rows for one in reversed(own) if one.source.created_ns <= self.at.cursor_ns), _NO_STEPS)
        return Samples(rows["end_unix_ns"], rows).clip_window(self.at.begin_ns, self.at.cursor_ns)


class NodeAt:
    """A node, as its samplers describe it."""

    def __init__(self, at: Moment, name: str, reports: Sequence[Node]) -> None:
        self.at, self.name = at, name
        self.report = reports[-1]
        """The facts of its last sampler."""
        self.cores = next((one.cores for one in reports if one.cores is not None and one.cores > 0), None)
        """How many cores the job may use."""
        self.gpus = {gpu.index: gpu for one in reports for gpu in one.gpus or ()}
        """Its GPUs by the sampler's number."""

    def __repr__(self) -> str:
        return f"<node {self.name}>"

    def samples(self, table: str) -> Samples:
        """Return the records of its samplers in a table, for example ``gpus``, ``hosts`` or ``processes``."""
        return self.at.records(table, self.name).read_window(self.at.begin_ns, self.at.cursor_ns)


class At(Moment):
    """A recording at a moment in unix time. It does not change: what was written later cannot be reached from here."""

    def __repr__(self) -> str:
        return f"<{self.recording.name} at {self.cursor_ns}: ranks {', '.join(map(str, self.ranks))}>"

    @property
    def nodes(self) -> dict[str, NodeAt]:
        """The nodes with a sampler, by name."""
        return {name: NodeAt(self, name, reports) for name, reports in sorted(_read_reports(self.whole).items())}

    @property
    def ranks(self) -> dict[int, RankAt]:
        """The last process of each rank, by rank."""
        tables = sorted(find_latest(self), key=lambda source: source.created_ns)  # a rank may go on on another node
        last = {source.rank: RankAt(self, identify_process(source)) for source in tables}
        return dict(sorted(last.items()))

    @property
    def end(self) -> End | None:
        """The early end of the job: who, when, why and what to do; None while it trains, and where it ended well."""
        from zerotop.analysis.failures.diagnosis import find_known_failure  # the analysis is made of moments

        end = find_known_failure(self.recording.at(self.cursor_ns))
        return end if end is not None and end.unix_ns > self.begin_ns else None

    def between(self, begin_ns: int, end_ns: int) -> At:
        """Return the recording at ``end_ns``, but only its events, records and steps after ``begin_ns``."""
        return At(self.recording, end_ns, {}, begin_ns)

    def at(self, time_ns: int) -> At:
        """Return the recording at another moment."""
        return self.recording.at(time_ns)


@at_event()
def _read_reports(at: Moment) -> dict[str, list[Node]]:
    reports: dict[str, list[Node]] = {}
    for event in at.events_of(Node):
        reports.setdefault(event.writer.host, []).append(event)
    return reports


def find_cores(at: At, host: str) -> int | None:
    """Return how many cores of a node the job may use; None where unknown."""
    node = at.nodes.get(host)
    return node.cores if node is not None else None


class Moments:
    """The last moments of a recording that were asked for, until more is read."""

    def __init__(self) -> None:
        self._moments: dict[int, At] = {}
        self._created_ns: list[int] = []  # of all tables, in order
        self._known: dict[tuple[int, ...], dict[Any, Any]] = {}  # results between two events

    def forget(self) -> None:
        """More was read."""
        self._moments = {}

    def find(self, recording: Recording, cursor_ns: int) -> At:
        """Return the recording at a moment."""
        if cursor_ns not in self._moments:
            known = _keep(self._known, self._make_key(recording, cursor_ns), {})
            return _keep(self._moments, cursor_ns, At(recording, cursor_ns, known))
        return self._moments[cursor_ns]

    def _make_key(self, recording: Recording, cursor_ns: int) -> tuple[int, ...]:
        """Return the numbers of events and tables, in all and at a moment."""
        tables = sum(map(len, recording.sources.values()))
        if tables != len(self._created_ns):
            self._created_ns = sorted(source.created_ns for sources in recording.sources.values() for source in sources)
        events = bisect_right(recording.events, cursor_ns, key=get_event_time)
        return tables, len(recording.events), events, bisect_right(self._created_ns, cursor_ns)


def _keep(kept: dict[K, V], key: K, value: V) -> V:
    """Return what is kept for a key, or else keep this value, and let the first of too many go."""
    if key not in kept and len(kept) >= _MOST_KEPT:
        kept.pop(next(iter(kept)), None)
    return kept.setdefault(key, value)
