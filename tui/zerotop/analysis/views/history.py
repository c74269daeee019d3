"""The last seconds before a cursor in equal pieces of time, for the strips and small charts of the live screen.

Pieces are aligned to unix time, so that charts move by whole pieces and never tremble. The piece in progress is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import GpuHistory, History, Rank, RankHistory
from zerotop.analysis.processes.phases import NOT_YET, UNSEEN_NAME, vote_phases
from zerotop.analysis.processes.thinned import mask_moments
from zerotop.analysis.stats.medians import round_count_up
from zerotop.recording.keys import GpuKey, ProcessKey
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.moments.process_exits import ProcessExits, read_exits
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Windows, bin_maxima, bin_means
from zerotop_probe.recording.tables import PHASES

PIECE_NS = 500_000_000
PIECES = 160
# The newest pieces are computed again each time: their samples may not all be written yet.
_FRESH_PIECES = 4
# Moments in a piece at which a rank's phase is looked up.
_VOTES_PER_PIECE = 50

Table = NDArray[Any]  # the first axis is pieces


Key = TypeVar("Key")
Value = TypeVar("Value")


class LazyMapping(Mapping[Key, Value]):
    """Computes each value on first use: of a thousand ranks a screen shows a few."""

    def __init__(self, keys: Iterable[Key], compute: Callable[[Key], Value]) -> None:
        self._values: dict[Key, Value | None] = dict.fromkeys(keys)
        self._compute = compute

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, key: Key) -> Value:
        value = self._values[key]
        if value is None:
            value = self._values[key] = self._compute(key)
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class RollingWindow:
    """A table of the last pieces; keeps what it has while the cursor advances."""

    def __init__(self) -> None:
        self._first_piece = 0  # index of its first piece: unix ns // PIECE_NS
        self._table: Table = np.empty((0, 0))

    def first_missing(self, end: int) -> int:
        """Return the first piece before ``end`` to compute."""
        begin, done = end - PIECES, self._first_piece + len(self._table) - _FRESH_PIECES
        return done if self._first_piece <= begin < done <= end else begin

    def extend_pieces(self, begin: int, fresh: Table) -> Table:
        """Add the pieces from ``begin`` on; return the last PIECES."""
        done = begin - self._first_piece
        self._table = np.concatenate([self._table[:done], fresh])[-PIECES:] if 0 < done <= len(self._table) else fresh
        self._first_piece = begin + len(fresh) - len(self._table)
        return self._table


class SampledTable(NamedTuple):
    """Columns of a sampled table, read for all processes or GPUs of a node at once."""

    table: str
    key_column: str
    mean_column: str
    highest_columns: tuple[str, ...]


_PHASE_NAMES = (*PHASES, UNSEEN_NAME, "")  # NOT_YET is -1: the last one, and UNSEEN the one before
_PROCESSES = SampledTable("processes", "pid", "cores_used", ("rss_bytes", "shared_bytes"))
_GPUS = SampledTable("gpus", "gpu", "utilization_percent", ("used_bytes",))


class Histories:
    """The history of a recording at any cursor."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._sampled_windows: dict[tuple[SampledTable, str], tuple[list[int], RollingWindow]] = {}
        self._rank_windows: dict[ProcessKey, RollingWindow] = {}
        self._gpu_windows: dict[GpuKey, RollingWindow] = {}
        self._last: tuple[object, History] | None = None

    def history_at(self, at: At, ranks: Sequence[Rank], gpus: Iterable[GpuKey]) -> History:
        """Return the history of these ranks and GPUs; the same object until the next piece is over."""
        end, keys, allocators, exits = at.cursor_ns // PIECE_NS, tuple(gpus), locate_allocators(at), read_exits(at)
        known = (end, tuple((rank.host, rank.pid) for rank in ranks), keys, len(allocators))
        if self._last is None or self._last[0] != known:
            processes = {rank.rank: rank for rank in ranks}
            by_gpu: dict[GpuKey, list[Source]] = {}
            for source, key in allocators.items():
                by_gpu.setdefault(key, []).append(source)
            process_tables = self._map_hosts(_PROCESSES, known[1], end)
            gpu_tables = self._map_hosts(_GPUS, keys, end)
            history = History(
                piece_s=PIECE_NS / 1e9,
                end_s=end * PIECE_NS / 1e9,
                ranks=LazyMapping(processes, lambda number: self._build_rank(processes[number], process_tables, end, exits)),
                gpus=LazyMapping(keys, lambda key: self._build_gpu(key, gpu_tables, end, by_gpu.get(key, ()), exits)),
                length=round_count_up(max(1, end - self.recording.begin_ns // PIECE_NS)),
            )
            self._last = (known, history)
        return self._last[1]

    def _map_hosts(
        self, layout: SampledTable, keys: Iterable[GpuKey | ProcessKey], end: int
    ) -> LazyMapping[str, dict[int, Table]]:
        """Map each host to the tables of its processes or GPUs, by pid or index."""
        keys_by_host: dict[str, set[int]] = {}
        for host, key in keys:
            keys_by_host.setdefault(host, set()).add(key)
        return LazyMapping(keys_by_host, lambda host: self._read_sampled(layout, host, sorted(keys_by_host[host]), end))

    def _read_sampled(self, layout: SampledTable, host: str, keys: list[int], end: int) -> dict[int, Table]:
        last_keys, window = self._sampled_windows.get((layout, host), ([], RollingWindow()))
        if last_keys != keys:
            window = RollingWindow()
        self._sampled_windows[layout, host] = keys, window
        begin, key_array = window.first_missing(end), np.array(keys)
        count, columns = (end - begin) * len(keys), len(layout.highest_columns) + 1
        fresh = np.full((count, columns), np.nan)
        for source in self.recording.host_sources(layout.table, host):
            rows = source.between(begin * PIECE_NS - 1, end * PIECE_NS - 1)
            indices = key_array.searchsorted(rows[layout.key_column])
            pieces = source.unix_times(rows) // PIECE_NS - begin
            known = key_array.take(indices, mode="clip") == rows[layout.key_column]
            known &= (pieces >= 0) & (pieces < end - begin)  # damaged records may be out of order by seconds
            rows = rows.compress(known)  # five times faster than by index
            cells = pieces[known] * len(keys) + indices[known]
            values = np.empty_like(fresh)
            values[:, 0] = bin_means(cells, rows[layout.mean_column], count)
            for column, name in enumerate(layout.highest_columns, 1):
                values[:, column] = bin_maxima(cells, rows[name], count)
            np.copyto(fresh, values, where=~np.isnan(values))  # a restarted sampler writes another table
        table = window.extend_pieces(begin, fresh.reshape(-1, len(keys), columns))
        return {key: table[:, index] for index, key in enumerate(keys)}

    def _build_rank(
        self, rank: Rank, sampled: LazyMapping[str, dict[int, Table]], end: int, exits: ProcessExits
    ) -> RankHistory:
        cores_used, rss_bytes, shared_bytes = sampled[rank.host][rank.pid].T
        window = self._rank_windows.setdefault((rank.host, rank.pid), RollingWindow())
        begin = window.first_missing(end)
        tables = (self.recording.find_source(name, rank.host, rank.pid, end * PIECE_NS) for name in ("begins", "spans"))
        begins, spans = tables
        exit_ns = exits.reported_until(begins) if begins is not None else None
        fresh = vote_phases(begins, spans, range(begin, end), PIECE_NS, _VOTES_PER_PIECE, end * PIECE_NS, exit_ns)
        if begins is not None:
            fresh[mask_moments(self.recording, begins, np.arange(begin, end) * PIECE_NS)] = NOT_YET
        codes = window.extend_pieces(begin, fresh)
        phases = tuple([_PHASE_NAMES[code] for code in codes.tolist()])
        return RankHistory(cores_used, rss_bytes, shared_bytes, phases)

    def _build_gpu(
        self,
        gpu_key: GpuKey,
        sampled: LazyMapping[str, dict[int, Table]],
        end: int,
        allocators: Iterable[Source],
        exits: ProcessExits,
    ) -> GpuHistory:
        window = self._gpu_windows.setdefault(gpu_key, RollingWindow())
        begin = window.first_missing(end)
        held = np.full((end - begin, 2), np.nan)
        for source in allocators:
            thinned = mask_moments(self.recording, source, np.arange(begin, end) * PIECE_NS)
            self._add_allocator(source, held, begin, end, exits.reported_until(source), thinned)
        return GpuHistory(*sampled[gpu_key[0]][gpu_key[1]].T, *window.extend_pieces(begin, held).T)

    @staticmethod
    def _add_allocator(
        source: Source, sums: Table, begin: int, end: int, exit_ns: int | None, thinned: NDArray[np.bool_]
    ) -> None:
        """Add one rank's memory: the highest sample of each piece, or the last one before it, until the rank exits.

        ``thinned``: pieces whose samples were deleted.
        """
        rows = source.between(begin * PIECE_NS - 1, end * PIECE_NS - 1, rows_before=1)
        pieces = np.arange(begin, end)
        windows = Windows(source.unix_times(rows), pieces * PIECE_NS - 1, (pieces + 1) * PIECE_NS - 1)
        valid = windows.has_samples | (windows.has_value & (pieces <= (end if exit_ns is None else exit_ns // PIECE_NS)))
        valid &= ~thinned
        highest = windows.find_highest(np.stack((rows["allocated_bytes"], rows["reserved_bytes"]))).T
        sums[valid] = np.nan_to_num(sums[valid]) + highest[valid]
