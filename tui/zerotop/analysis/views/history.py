"""The last while before a cursor, in equal pieces of time: what strips and small charts of the live screen show.

Pieces are aligned to unix time, so that a chart of them moves by whole pieces and never trembles. Only those that are over
at the cursor are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.live_view import GpuHistory, History, Rank, RankHistory
from zerotop.analysis.processes.phases import vote_phases
from zerotop.analysis.processes.process_exits import ProcessExits
from zerotop.session.reader import Session, Source
from zerotop.session.samples import Windows, bin_maxima, bin_means
from zerotop_probe.recording.tables import PHASES

PIECE_NS = 500_000_000
PIECES = 160
# The newest pieces are told anew each time: a writer may still be writing what it saw in them.
_FRESH_PIECES = 4
# How often within a piece it is asked which phase a rank was in.
_VOTES_PER_PIECE = 50

Table = NDArray[Any]  # the first axis is pieces


Key = TypeVar("Key")
Value = TypeVar("Value")


class LazyMapping(Mapping[Key, Value]):
    """Tells each of its values when it is first asked for: of a thousand ranks a screen shows a few."""

    def __init__(self, keys: Iterable[Key], compute: Callable[[Key], Value]) -> None:
        self._values: dict[Key, Value | None] = dict.fromkeys(keys)
        self._compute = compute

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, key: Key) -> Value:
        told = self._values[key]
        if told is None:
            told = self._values[key] = self._compute(key)
        return told

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class RollingWindow:
    """A table of pieces. What was told is kept while the cursor goes on."""

    def __init__(self) -> None:
        self._first_piece = 0  # index of its first piece: unix ns // PIECE_NS
        self._table: Table = np.empty((0, 0))

    def first_missing(self, end: int) -> int:
        """The first piece before ``end`` that has to be told."""
        begin, told = end - PIECES, self._first_piece + len(self._table) - _FRESH_PIECES
        return told if self._first_piece <= begin < told <= end else begin

    def extend_pieces(self, begin: int, fresh: Table) -> Table:
        """Takes in the pieces from ``begin`` on; returns the last ``PIECES``."""
        kept = (
            self._table[: begin - self._first_piece]
            if self._first_piece <= begin <= self._first_piece + len(self._table)
            else fresh[:0]
        )
        self._table = np.concatenate([kept, fresh])[-PIECES:] if len(kept) else fresh
        self._first_piece = begin + len(fresh) - len(self._table)
        return self._table


class SampledTable(NamedTuple):
    """What samplers saw of each process or GPU of a node, which is told of all in one go."""

    table: str
    key_column: str
    mean_column: str  # of this column the mean,
    highest_columns: tuple[str, ...]  # and of these the highest


_PHASE_NAMES = (*PHASES, "")  # the last is that of NOT_YET
_PROCESSES = SampledTable("processes", "pid", "cores_used", ("rss_bytes", "shared_bytes"))
_GPUS = SampledTable("gpus", "gpu", "utilization_percent", ("used_bytes",))


class Histories:
    """Tells the history of a session at any cursor."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sampled_windows: dict[tuple[SampledTable, str], tuple[list[int], RollingWindow]] = {}
        self._rank_windows: dict[ProcessKey, RollingWindow] = {}
        self._gpu_windows: dict[GpuKey, RollingWindow] = {}
        self._last: tuple[object, History] | None = None

    def history_at(
        self,
        cursor_ns: int,
        ranks: Sequence[Rank],
        gpus: Iterable[GpuKey],
        gpu_by_allocator: dict[int, GpuKey],
        exits: ProcessExits,
    ) -> History:
        """The history of these ranks and GPUs; the same object while no other piece is over.

        ``lies_on`` says of which GPU an allocator's table (its place among the session's) tells, ``ends`` until when.
        """
        end, keys = cursor_ns // PIECE_NS, tuple(gpus)
        known = (end, tuple((rank.host, rank.pid) for rank in ranks), keys, len(gpu_by_allocator))
        if self._last is None or self._last[0] != known:
            processes = {rank.rank: rank for rank in ranks}
            allocators: dict[GpuKey, list[int]] = {}
            for place, where in gpu_by_allocator.items():
                allocators.setdefault(where, []).append(place)
            of_processes = self._map_hosts(_PROCESSES, known[1], end)
            of_gpus = self._map_hosts(_GPUS, keys, end)
            told = History(
                piece_s=PIECE_NS / 1e9,
                end_s=end * PIECE_NS / 1e9,
                ranks=LazyMapping(processes, lambda number: self._build_rank(processes[number], of_processes, end, exits)),
                gpus=LazyMapping(keys, lambda key: self._build_gpu(key, of_gpus, end, allocators.get(key, ()), exits)),
            )
            self._last = (known, told)
        return self._last[1]

    def _map_hosts(
        self, layout: SampledTable, keys: Iterable[GpuKey | ProcessKey], end: int
    ) -> LazyMapping[str, dict[int, Table]]:
        """By node, the pieces of these of its processes or GPUs by their keys."""
        of_host: dict[str, set[int]] = {}
        for host, key in keys:
            of_host.setdefault(host, set()).add(key)
        return LazyMapping(of_host, lambda host: self._read_sampled(layout, host, sorted(of_host[host]), end))

    def _read_sampled(self, layout: SampledTable, host: str, keys: list[int], end: int) -> dict[int, Table]:
        before, kept = self._sampled_windows.get((layout, host), ([], RollingWindow()))
        if before != keys:
            kept = RollingWindow()
        self._sampled_windows[layout, host] = keys, kept
        begin, own = kept.first_missing(end), np.array(keys)
        count, columns = (end - begin) * len(own), len(layout.highest_columns) + 1
        fresh = np.full((count, columns), np.nan)
        for source in self._session.host_sources(layout.table, host):
            rows = source.between(begin * PIECE_NS - 1, end * PIECE_NS - 1)
            places = own.searchsorted(rows[layout.key_column])
            mine = own.take(places, mode="clip") == rows[layout.key_column]
            rows = rows.compress(mine)  # five times faster than by index
            cells = (source.unix_times(rows) // PIECE_NS - begin) * len(own) + places[mine]
            told = np.empty_like(fresh)
            told[:, 0] = bin_means(cells, rows[layout.mean_column], count)
            for column, name in enumerate(layout.highest_columns, 1):
                told[:, column] = bin_maxima(cells, rows[name], count)
            np.copyto(fresh, told, where=~np.isnan(told))  # a sampler may have been started again
        table = kept.extend_pieces(begin, fresh.reshape(-1, len(own), columns))
        return {key: table[:, place] for place, key in enumerate(keys)}

    def _build_rank(
        self, rank: Rank, sampled: LazyMapping[str, dict[int, Table]], end: int, exits: ProcessExits
    ) -> RankHistory:
        cores_used, rss_bytes, shared_bytes = sampled[rank.host][rank.pid].T
        kept = self._rank_windows.setdefault((rank.host, rank.pid), RollingWindow())
        begin = kept.first_missing(end)
        tables = (self._session.find_source(name, rank.host, rank.pid, end * PIECE_NS) for name in ("begins", "spans"))
        begins, spans = tables
        exit_ns = exits.reported_until(begins) if begins is not None else None
        fresh = vote_phases(begins, spans, range(begin, end), PIECE_NS, _VOTES_PER_PIECE, end * PIECE_NS, exit_ns)
        codes = kept.extend_pieces(begin, fresh)
        phases = tuple([_PHASE_NAMES[code] for code in codes.tolist()])
        return RankHistory(cores_used, rss_bytes, shared_bytes, phases)

    def _build_gpu(
        self,
        gpu_key: GpuKey,
        sampled: LazyMapping[str, dict[int, Table]],
        end: int,
        allocators: Iterable[int],
        exits: ProcessExits,
    ) -> GpuHistory:
        """``allocators``: places of the tables that tell of it, among the session's."""
        kept = self._gpu_windows.setdefault(gpu_key, RollingWindow())
        begin = kept.first_missing(end)
        held = np.full((end - begin, 2), np.nan)
        for place in allocators:
            source = self._session.sources["allocator"][place]
            self._add_allocator(source, held, begin, end, exits.reported_until(source))
        return GpuHistory(*sampled[gpu_key[0]][gpu_key[1]].T, *kept.extend_pieces(begin, held).T)

    @staticmethod
    def _add_allocator(source: Source, sums: Table, begin: int, end: int, exit_ns: int | None) -> None:
        """Add what one rank holds: the highest sample of each piece, or the last one before it, until the rank exits."""
        rows = source.between(begin * PIECE_NS - 1, end * PIECE_NS - 1, rows_before=1)
        pieces = np.arange(begin, end)
        windows = Windows(source.unix_times(rows), pieces * PIECE_NS - 1, (pieces + 1) * PIECE_NS - 1)
        valid = windows.has_samples | (windows.has_value & (pieces <= (end if exit_ns is None else exit_ns // PIECE_NS)))
        for column, name in enumerate(("allocated_bytes", "reserved_bytes")):
            held = windows.find_highest(rows[name])[valid]
            sums[valid, column] = np.where(np.isnan(sums[valid, column]), held, sums[valid, column] + held)
