"""The last while before a cursor, in equal pieces of time: what strips and small charts of the live screen show.

Pieces are aligned to unix time, so that a chart of them moves by whole pieces and never trembles. Only those that are over
at the cursor are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import Floats, GpuHistory, History, Rank, RankHistory
from zerotop.analysis.processes.phases import NOT_YET, OTHER, innermost
from zerotop.analysis.processes.process_exits import Ends
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import PHASES

PIECE_NS = 500_000_000
PIECES = 160
# The newest pieces are told anew each time: a writer may still be writing what it saw in them.
_FRESH = 4
# How often within a piece it is asked which phase a rank was in.
_GRAIN = 50

GpuKey = tuple[str, int]  # host, NVML index
Table = NDArray[Any]  # the first axis is pieces


Key = TypeVar("Key")
Told = TypeVar("Told")


class Asked(Mapping[Key, Told]):
    """Tells each of its values when it is first asked for: of a thousand ranks a screen shows a few."""

    def __init__(self, keys: Iterable[Key], tell: Callable[[Key], Told]) -> None:
        self._told: dict[Key, Told | None] = dict.fromkeys(keys)
        self._tell = tell

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, key: Key) -> Told:
        told = self._told[key]
        if told is None:
            told = self._told[key] = self._tell(key)
        return told

    def __iter__(self) -> Iterator[Key]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)


class Kept:
    """A table of pieces. What was told is kept while the cursor goes on."""

    def __init__(self) -> None:
        self._first = 0  # index of its first piece: unix ns // PIECE_NS
        self._table: Table = np.empty((0, 0))

    def missing(self, end: int) -> int:
        """The first piece before ``end`` that has to be told."""
        begin, told = end - PIECES, self._first + len(self._table) - _FRESH
        return told if self._first <= begin < told <= end else begin

    def extended(self, begin: int, fresh: Table) -> Table:
        """Takes in the pieces from ``begin`` on; returns the last ``PIECES``."""
        kept = self._table[: begin - self._first] if self._first <= begin <= self._first + len(self._table) else fresh[:0]
        self._table = np.concatenate([kept, fresh])[-PIECES:] if len(kept) else fresh
        self._first = begin + len(fresh) - len(self._table)
        return self._table


def means(pieces: NDArray[np.int64], values: NDArray[Any], count: int) -> Floats:
    """The mean of the samples in each of ``count`` pieces; NaN where there is none. ``pieces`` has each sample's place."""
    number = np.bincount(pieces, minlength=count)
    total = np.bincount(pieces, values, count)
    found = np.full(count, np.nan)
    np.divide(total, number, out=found, where=number > 0)
    return found


def highest(pieces: NDArray[np.int64], values: NDArray[Any], count: int) -> Floats:
    """The highest of the samples in each piece; NaN where there is none."""
    found = np.full(count, np.nan)
    np.fmax.at(found, pieces, values.astype(np.float64))
    return found


def most_voted(codes: NDArray[np.int16], pieces: int) -> NDArray[np.intp]:
    """The phase that most of the codes are in each of so many equal pieces: NOT_YET or an index into PHASES."""
    kinds = len(PHASES) - NOT_YET
    known = np.where(codes < len(PHASES), codes, OTHER) - NOT_YET
    places = known.reshape(pieces, -1) + np.arange(0, pieces * kinds, kinds)[:, None]
    votes = np.bincount(places.ravel(), minlength=pieces * kinds).reshape(pieces, kinds)
    return np.asarray(votes.argmax(axis=1) + NOT_YET)


class Sampled(NamedTuple):
    """What samplers saw of each process or GPU of a node, which is told of all in one go."""

    table: str
    key: str
    mean: str  # of this column the mean,
    highest: tuple[str, ...]  # and of these the highest


_NAMES = (*PHASES, "")  # the last is that of NOT_YET
_PROCESSES = Sampled("processes", "pid", "cores_used", ("rss_bytes", "shared_bytes"))
_GPUS = Sampled("gpus", "gpu", "utilization_percent", ("used_bytes",))


class Histories:
    """Tells the history of a session at any cursor."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sampled: dict[tuple[Sampled, str], tuple[list[int], Kept]] = {}
        self._ranks: dict[tuple[str, int], Kept] = {}
        self._gpus: dict[GpuKey, Kept] = {}
        self._last: tuple[object, History] | None = None

    def at(
        self, cursor_ns: int, ranks: Sequence[Rank], gpus: Iterable[GpuKey], lies_on: dict[int, GpuKey], ends: Ends
    ) -> History:
        """The history of these ranks and GPUs; the same object while no other piece is over.

        ``lies_on`` says of which GPU an allocator's table (its place among the session's) tells, ``ends`` until when.
        """
        end, keys = cursor_ns // PIECE_NS, tuple(gpus)
        known = (end, tuple((rank.host, rank.pid) for rank in ranks), keys, len(lies_on))
        if self._last is None or self._last[0] != known:
            processes = {rank.rank: rank for rank in ranks}
            allocators: dict[GpuKey, list[int]] = {}
            for place, where in lies_on.items():
                allocators.setdefault(where, []).append(place)
            of_processes = self._asked(_PROCESSES, known[1], end)
            of_gpus = self._asked(_GPUS, keys, end)
            told = History(
                piece_s=PIECE_NS / 1e9,
                end_s=end * PIECE_NS / 1e9,
                ranks=Asked(processes, lambda number: self._rank(processes[number], of_processes, end, ends)),
                gpus=Asked(keys, lambda key: self._gpu(key, of_gpus, end, allocators.get(key, ()), ends)),
            )
            self._last = (known, told)
        return self._last[1]

    def _asked(self, what: Sampled, keys: Iterable[tuple[str, int]], end: int) -> Asked[str, dict[int, Table]]:
        """By node, the pieces of these of its processes or GPUs by their keys."""
        of_host: dict[str, set[int]] = {}
        for host, key in keys:
            of_host.setdefault(host, set()).add(key)
        return Asked(of_host, lambda host: self._told(what, host, sorted(of_host[host]), end))

    def _told(self, what: Sampled, host: str, keys: list[int], end: int) -> dict[int, Table]:
        before, kept = self._sampled.get((what, host), ([], Kept()))
        if before != keys:
            kept = Kept()
        self._sampled[what, host] = keys, kept
        begin, own = kept.missing(end), np.array(keys)
        count, columns = (end - begin) * len(own), len(what.highest) + 1
        fresh = np.full((count, columns), np.nan)
        for source in self._session.of_host(what.table, host):
            rows = _between(source, begin, end)
            places = own.searchsorted(rows[what.key])
            mine = own.take(places, mode="clip") == rows[what.key]
            rows = rows.compress(mine)  # five times faster than by index
            cells = _places(source, rows["time_ns"], begin) * len(own) + places[mine]
            told = np.empty_like(fresh)
            told[:, 0] = means(cells, rows[what.mean], count)
            for column, name in enumerate(what.highest, 1):
                told[:, column] = highest(cells, rows[name], count)
            np.copyto(fresh, told, where=~np.isnan(told))  # a sampler may have been started again
        table = kept.extended(begin, fresh.reshape(-1, len(own), columns))
        return {key: table[:, place] for place, key in enumerate(keys)}

    def _rank(self, rank: Rank, sampled: Asked[str, dict[int, Table]], end: int, ends: Ends) -> RankHistory:
        cores_used, rss_bytes, shared_bytes = sampled[rank.host][rank.pid].T
        kept = self._ranks.setdefault((rank.host, rank.pid), Kept())
        begin = kept.missing(end)
        codes = kept.extended(begin, self._phases(rank, begin, end, ends))
        phases = tuple([_NAMES[code] for code in codes.tolist()])
        return RankHistory(cores_used, rss_bytes, shared_bytes, phases)

    def _phases(self, rank: Rank, begin: int, end: int, ends: Ends) -> NDArray[np.intp]:
        """For each piece the phase that the rank was in for most of it; -1 where its probe was not awake."""
        begins, spans = (self._session.table_of(table, rank.host, rank.pid, end * PIECE_NS) for table in ("begins", "spans"))
        if begins is None:
            return np.full(end - begin, NOT_YET, np.intp)
        grain = PIECE_NS // _GRAIN
        moments = np.arange(begin * PIECE_NS + grain // 2, end * PIECE_NS, grain)
        codes = innermost(begins, spans, moments, end * PIECE_NS)
        if (over_ns := ends.told_until(begins)) is not None:
            codes[moments > over_ns] = NOT_YET
        return most_voted(codes, end - begin)

    def _gpu(
        self, key: GpuKey, sampled: Asked[str, dict[int, Table]], end: int, allocators: Iterable[int], ends: Ends
    ) -> GpuHistory:
        """``allocators``: places of the tables that tell of it, among the session's."""
        kept = self._gpus.setdefault(key, Kept())
        begin = kept.missing(end)
        held = np.full((end - begin, 2), np.nan)
        for place in allocators:
            source = self._session.sources["allocator"][place]
            self._add_allocator(source, held, begin, end, ends.told_until(source))
        return GpuHistory(*sampled[key[0]][key[1]].T, *kept.extended(begin, held).T)

    @staticmethod
    def _add_allocator(source: Source, sums: Table, begin: int, end: int, over_ns: int | None) -> None:
        """Adds what one rank on the GPU holds: the highest sample of a piece, or the last before, while it tells any."""
        before = source.count_known(begin * PIECE_NS - 1)
        rows = source.array[max(0, before - 1) : source.count_known(end * PIECE_NS - 1)]
        if not len(rows):
            return
        pieces = np.arange(begin, end)
        places = _places(source, rows["time_ns"], begin) + begin
        first, beyond = places.searchsorted(pieces), places.searchsorted(pieces, "right")
        held = np.array([rows["allocated_bytes"], rows["reserved_bytes"]], np.float64)
        told = (beyond > 0) & (pieces <= (end if over_ns is None else over_ns // PIECE_NS))
        found = np.where(told, held[:, beyond - 1], np.nan)
        sampled = beyond > first
        if sampled.any():
            found[:, sampled] = np.fmax.reduceat(held, first[sampled], axis=1)
        found = found.T
        sums[:] = np.where(np.isnan(sums), found, np.where(np.isnan(found), sums, sums + found))


def _between(source: Source, begin: int, end: int) -> NDArray[Any]:
    """The records from the begin of one piece to before that of another."""
    return source.array[source.count_known(begin * PIECE_NS - 1) : source.count_known(end * PIECE_NS - 1)]


def _places(source: Source, times: NDArray[np.int64], begin: int) -> NDArray[np.int64]:
    """Which piece, counted from ``begin``, each of these moments of its clock lies in."""
    return (times + source.offset_ns) // PIECE_NS - begin
