"""The threads of one rank before a cursor: cores in use, the cores they ran on, and time waiting for one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.formatting import format_count
from zerotop.analysis.live_view import Floats, Rank
from zerotop.analysis.processes.cores import NO_CORES, Affinities, Cores
from zerotop.analysis.processes.phases import NOT_YET, OTHER, find_innermost, find_phase_name, vote_phases
from zerotop.analysis.processes.recent_means import WINDOW_NS, find_window
from zerotop.analysis.processes.thinned import mask_moments
from zerotop.analysis.processes.thread_kinds import MAIN, read_thread_kinds
from zerotop.analysis.views.history import PIECE_NS
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints, iter_samples, merge_columns, read_column

_NUMBERED = re.compile(r"^(.*?)[-_:#/]?\d+$")
_EDGE_NS = 1_100_000_000  # the window may begin with a tick this much earlier
_THREAD_COLUMNS = ("tid", "cpu_ns", "cores_used", "wait_ns", "processor", "name")
_VOTES_PER_CELL = 8  # moments in a cell, and in a sample, at which the rank's phase is looked up
_RESOLVED_SHARE = 0.5  # of a phase's time that is in samples of nothing else, for a mean of all of it


@dataclass(frozen=True, slots=True, eq=False)
class Thread:
    """A thread that ran."""

    tid: int
    name: str  # Python's if known, else the kernel's
    kind: str  # what it is: see processes/thread_kinds.py
    cores_used: float  # mean over the window of recent_means.py; 0 when it hardly ran
    waiting_cores: float  # share of that window in which it was ready to run but had no core
    cores_history: Floats  # (cells,)
    ran_on: Cores  # all cores it was sampled on
    numa_nodes: tuple[int, ...]  # of those cores
    allowed_cores: Cores  # none where not recorded


@dataclass(frozen=True, slots=True, eq=False)
class ThreadGroup:
    """Threads of one kind or name."""

    name: str
    threads: tuple[Thread, ...]

    @property
    def cores_used(self) -> float:
        return sum(thread.cores_used for thread in self.threads)

    @property
    def waiting_cores(self) -> float:
        """Number of them that waited for a core, on average; NaN where unknown."""
        known = [thread.waiting_cores for thread in self.threads if thread.waiting_cores == thread.waiting_cores]
        return sum(known) if known else float("nan")

    @property
    def cores_history(self) -> Floats:
        """Sum over its threads, (cells,)."""
        total: Floats = np.sum([thread.cores_history for thread in self.threads], axis=0)
        return total

    @property
    def ran_on(self) -> Cores:
        return NO_CORES.union(*(thread.ran_on for thread in self.threads))

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({node for thread in self.threads for node in thread.numa_nodes}))

    @property
    def allowed_cores(self) -> Cores:
        return NO_CORES.union(*(thread.allowed_cores for thread in self.threads))


class PhaseMean(NamedTuple):
    """Means over the samples that lie in one phase as a whole."""

    cores_used: float
    runnable: float


@dataclass(frozen=True, slots=True, eq=False)
class RankThreads:
    """The threads of one rank in equal cells of time."""

    rank: Rank
    begin_s: float  # unix time of the first cell's begin
    end_s: float  # unix time of the last cell's end
    groups: tuple[ThreadGroup, ...]  # busiest first
    phases: tuple[str, ...]  # (cells,) phase for most of each; "" before its engine exists
    phase_means: dict[str, PhaseMean]  # of phases as long as the samples; time without a phase is in that outside of them
    time_s: Floats  # (samples,) unix time of each sample of the process
    cores_used: Floats  # (samples,)
    runnable: Floats  # (samples,) threads that ran or waited for a core
    rest_cores: float  # of threads that were not recorded individually
    rest_threads: int  # number of those
    allowed_cores: Cores  # of the process; none where not recorded
    node_count: int  # NUMA nodes of the host
    is_recorded: bool  # whether any threads were recorded
    loader_workers: int  # DataLoader workers at the end, processes of their own
    loader_cores: float  # of these


class ThreadTable:
    """The threads of any rank at any cursor; the last result is cached until there are more records."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.affinities = Affinities(recording)
        self._last: tuple[object, RankThreads] | None = None
        self._groups: tuple[object, tuple[ThreadGroup, ...]] = (None, ())  # sampled more seldom than the rest

    def threads_at(self, rank: Rank, cursor_ns: int, cells: int, cell_ns: int) -> RankThreads:
        """Return ``cells`` cells of ``cell_ns`` (whole milliseconds), up to the last one that is over at the cursor."""
        end = cursor_ns // cell_ns
        tables = {name: self._recording.host_sources(name, rank.host) for name in ("threads", "processes")}
        known = tuple(source.count_until(cursor_ns) for sources in tables.values() for source in sources)
        key = (rank, end, cells, cell_ns, known, len(self._recording.events))
        if self._last is None or self._last[0] != key:
            self._last = (key, self._build_threads(rank, cursor_ns, (end - cells, end), cell_ns, tables))
        return self._last[1]

    def find_first_sample(self, rank: Rank, cursor_ns: int, length_ns: int) -> int | None:
        """Return when a rank's process was sampled first, if it was within ``length_ns`` before the cursor."""
        begin_ns, sources = cursor_ns - length_ns, self._recording.host_sources("processes", rank.host)
        for end_ns in (begin_ns + _EDGE_NS, cursor_ns):
            firsts = [part.times[0] for part in iter_samples(sources, begin_ns, end_ns, "pid", rank.pid) if len(part.times)]
            if firsts:
                return None if end_ns < cursor_ns else int(min(firsts))
        return None

    def _build_threads(
        self, rank: Rank, cursor_ns: int, cells: tuple[int, int], cell_ns: int, tables: dict[str, Sequence[Source]]
    ) -> RankThreads:
        begin_ns, end_ns = cells[0] * cell_ns, cells[1] * cell_ns
        groups = self._find_groups(rank, cursor_ns, cells, cell_ns, tables["threads"])
        threads = [thread for group in groups for thread in group.threads]
        parts = list(iter_samples(tables["processes"], begin_ns - 1, cursor_ns, "pid", rank.pid))
        samples_ns, samples = merge_columns(parts, ("cores_used", "waiting_cores", "thread_count"))
        used, waiting = (samples[name].astype(np.float64) for name in ("cores_used", "waiting_cores"))
        # In the sample in which a thread starts, the time that it waited before counts too.
        runnable = np.fmax(used, np.fmin(used + np.fmax(0.0, waiting), samples["thread_count"]))
        last = parts[-1].rows[-1:] if parts else samples["cores_used"][:0]
        workers, worker_cores = (read_column(last, name) for name in ("loader_workers", "loader_cores"))
        return RankThreads(
            rank=rank,
            begin_s=begin_ns / 1e9,
            end_s=end_ns / 1e9,
            groups=groups,
            phases=self._vote_phases(rank, cells, cell_ns, cursor_ns),
            phase_means=self._compute_phase_means(rank, samples_ns, used, runnable, cursor_ns),
            time_s=samples_ns / 1e9,
            cores_used=used,
            runnable=runnable,
            rest_cores=max(0.0, rank.cores_used - sum(thread.cores_used for thread in threads)),
            rest_threads=max(0, rank.thread_count - len(threads)),
            allowed_cores=self.affinities.find_process_cores(rank.host, rank.pid, cursor_ns),
            node_count=self.affinities.count_nodes(rank.host),
            is_recorded=any(len(source.array) for source in tables["threads"]),
            loader_workers=max(0, int(np.nan_to_num(workers).sum())),
            loader_cores=float(np.nansum(worker_cores)),
        )

    def _find_groups(
        self, rank: Rank, cursor_ns: int, cells: tuple[int, int], cell_ns: int, sources: Sequence[Source]
    ) -> tuple[ThreadGroup, ...]:
        known = tuple(source.count_until(cursor_ns) for source in sources)
        key = (rank.host, rank.pid, cells, cell_ns, known, len(self._recording.events))
        if self._groups[0] != key:
            self._groups = key, _group_threads(self._read_threads(rank, cursor_ns, cells, cell_ns, sources))
        return self._groups[1]

    def _read_threads(
        self, rank: Rank, cursor_ns: int, cells: tuple[int, int], cell_ns: int, sources: Sequence[Source]
    ) -> list[Thread]:
        begin_ns, count = cells[0] * cell_ns, cells[1] - cells[0] + 1
        parts = list(iter_samples(sources, begin_ns - 1, cursor_ns))
        times, rows = merge_columns([part.select(part.rows["pid"] == rank.pid) for part in parts], _THREAD_COLUMNS)
        if not len(times):
            return []
        ticks = np.unique(np.concatenate([part.times for part in parts]))
        thread_cores = self.affinities.find_thread_cores(rank.host, rank.pid, cursor_ns)
        process_cores = self.affinities.find_process_cores(rank.host, rank.pid, cursor_ns)
        order = np.argsort(rows["tid"], kind="stable")  # by thread, each in order of time
        times, rows = times[order], {name: column[order] for name, column in rows.items()}
        begins = np.flatnonzero(np.diff(rows["tid"], prepend=-1))
        ends = [*begins[1:].tolist(), len(times)]
        thread_index = np.repeat(np.arange(len(begins)), np.diff(ends, prepend=0))
        # Records of a damaged file may lie outside of the window.
        cell, tick_cell = (np.clip((part - begin_ns) // cell_ns, 0, count - 1) for part in (times, ticks))
        sums = np.bincount(thread_index * count + cell, rows["cores_used"], len(begins) * count).reshape(-1, count)
        with np.errstate(invalid="ignore", divide="ignore"):
            cores = sums / np.bincount(tick_cell, minlength=count)
        histories = _fill_gaps(np.asarray(cores, np.float64), max(1, round(PIECE_NS / cell_ns)))[:, :-1]
        at = self._recording.at(cursor_ns)
        window, kinds = find_window(at, rank.host), read_thread_kinds(at, rank.host, rank.pid)
        tids = rows["tid"][begins].tolist()
        names = {
            tid: name.decode("utf-8", "replace")
            for tid, name in zip(tids, rows["name"][np.array(ends) - 1].tolist(), strict=True)
        }
        kind_by_tid = kinds.name_threads(names)
        threads = []
        last_ns = int(ticks[ticks <= window.end_ns].max(initial=window.begin_ns))
        for tid, history, begin, end in zip(tids, histories, begins.tolist(), ends, strict=True):
            thread_times = times[begin:end]
            ran_on = frozenset(core for core in set(rows["processor"][begin:end].tolist()) if core >= 0)
            known_from = thread_times[thread_times <= window.begin_ns].max(initial=window.begin_ns - _EDGE_NS)
            with_edge = (thread_times >= known_from) & (thread_times <= window.end_ns)
            threads.append(
                Thread(
                    tid=tid,
                    name=MAIN if tid == rank.pid else kinds.python.get(tid, names[tid]),
                    kind=kind_by_tid[tid],
                    cores_used=_measure_use(thread_times, rows["cpu_ns"][begin:end], rows["cores_used"][begin:end], last_ns),
                    waiting_cores=_measure_waiting(rows["wait_ns"][begin:end][with_edge], thread_times[with_edge]),
                    cores_history=history,
                    ran_on=ran_on,
                    numa_nodes=self.affinities.find_nodes(rank.host, ran_on),
                    allowed_cores=thread_cores.get(tid, process_cores),
                )
            )
        return threads

    def _vote_phases(self, rank: Rank, cells: tuple[int, int], cell_ns: int, cursor_ns: int) -> tuple[str, ...]:
        """Return the phase that the rank was in for most of each cell."""
        begins, spans = self._find_phase_sources(rank, cursor_ns)
        codes = vote_phases(begins, spans, range(*cells), cell_ns, _VOTES_PER_CELL, cursor_ns, None)
        if begins is not None:
            codes[mask_moments(self._recording, begins, np.arange(*cells) * cell_ns)] = NOT_YET
        return tuple(find_phase_name(code) for code in codes.tolist())

    def _compute_phase_means(
        self, rank: Rank, samples_ns: Ints, used: Floats, runnable: Floats, cursor_ns: int
    ) -> dict[str, PhaseMean]:
        """Return the means of each phase that the samples resolve: most of its time is in samples of nothing else."""
        begins, spans = self._find_phase_sources(rank, cursor_ns)
        if begins is None or len(samples_ns) < 2:
            return {}
        parts = (np.arange(_VOTES_PER_CELL) + 0.5) / _VOTES_PER_CELL
        moments = (samples_ns[:-1, None] + np.diff(samples_ns)[:, None] * parts).astype(np.int64)
        codes = find_innermost(begins, spans, moments.ravel(), cursor_ns)
        codes[(codes == NOT_YET) | mask_moments(self._recording, begins, moments.ravel())] = OTHER
        codes = codes.reshape(moments.shape)
        is_whole = (codes == codes[:, :1]).all(axis=1)
        means = {}
        for code in np.unique(codes[is_whole, 0]).tolist():
            whole = np.flatnonzero(is_whole & (codes[:, 0] == code))
            if whole.size * _VOTES_PER_CELL >= _RESOLVED_SHARE * (codes == code).sum():
                # A sample is of the time since the one before.
                means[find_phase_name(code)] = PhaseMean(*(_compute_known_mean(one[whole + 1]) for one in (used, runnable)))
        return means

    def _find_phase_sources(self, rank: Rank, cursor_ns: int) -> tuple[Source | None, Source | None]:
        """Return the rank's begins and spans."""
        begins, spans = (self._recording.find_source(table, rank.host, rank.pid, cursor_ns) for table in ("begins", "spans"))
        return begins, spans


def _compute_known_mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _fill_gaps(history: Floats, max_cells: int) -> Floats:
    """Fill cells without a tick from the cell before, up to ``max_cells`` in a row: the distance between ticks."""
    for _ in range(max_cells):
        empty = np.isnan(history[:, 1:]) & ~np.isnan(history[:, :-1])
        history[:, 1:][empty] = history[:, :-1][empty]
    return history


def _measure_use(times: NDArray[np.int64], cpu_ns: NDArray[Any], cores: NDArray[Any], end_ns: int) -> float:
    """Return the cores that a thread used in the last second before ``end_ns``.

    It has no row where it was not among the busiest; its counter tells how long it has run meanwhile.
    """
    before = np.append(times[0] - PIECE_NS, times[:-1])
    begins = np.maximum(before, times - PIECE_NS)
    ran = np.clip(np.nan_to_num(cores.astype(np.float64)), 0, 1) * (times - begins)
    unseen = np.clip(np.diff(cpu_ns.astype(np.float64), prepend=float(cpu_ns[0])) - ran, 0, begins - before)
    path = np.column_stack((begins, times)).ravel(), np.cumsum(np.column_stack((unseen, ran)).ravel())
    return float(np.diff(np.interp((end_ns - WINDOW_NS, end_ns), *path))[0]) / WINDOW_NS


def _measure_waiting(wait_ns: NDArray[Any], times: NDArray[np.int64]) -> float:
    """Return the share of the time between these records in which a thread waited for a core; NaN if unknown."""
    passed = int(times[-1] - times[0]) if len(times) else 0
    return max(0.0, int(wait_ns[-1]) - int(wait_ns[0])) / passed if passed else float("nan")


def _group_threads(threads: Sequence[Thread]) -> tuple[ThreadGroup, ...]:
    """Group threads by what they are, others by name without a trailing number."""
    mean_cores = {thread.tid: _compute_mean_cores(thread) for thread in threads}
    families: dict[str, list[Thread]] = {}
    for thread in threads:
        numbered = _NUMBERED.match(thread.kind) if thread.kind == thread.name else None
        families.setdefault(numbered[1] if numbered and numbered[1] else thread.kind, []).append(thread)
    groups = []
    for family, members in families.items():
        names = {thread.kind for thread in members}
        members.sort(key=lambda thread: (-mean_cores[thread.tid], -_find_last_quarter(thread), thread.tid))
        groups.append(ThreadGroup(names.pop() if len(names) == 1 else f"{family}*", tuple(members)))
    return tuple(sorted(groups, key=lambda group: (-sum(mean_cores[thread.tid] for thread in group.threads), group.name)))


def _compute_mean_cores(thread: Thread) -> float:
    """Return a thread's mean cores, rounded so that rows do not swap all the time."""
    known = thread.cores_history[~np.isnan(thread.cores_history)]
    return round(float(known.sum()) / len(known), 1) if len(known) else 0.0


def _find_last_quarter(thread: Thread) -> int:
    """Return the last quarter of its history in which a thread ran."""
    ran = np.flatnonzero(np.nan_to_num(thread.cores_history) > 0)
    return int(4 * ran[-1] // len(thread.cores_history)) if len(ran) else 0


# Share of a host's cores that its ranks use if they have too many threads.
_OWN_SHARE = 0.6


def describe_crowding(ranks: Sequence[Rank], cores: dict[str, int], affinities: Affinities, cursor_ns: int) -> list[str]:
    """Return sentences about threads that compete: more busy ones than cores, ranks bound to the same cores."""
    sentences = []
    for host in dict.fromkeys(rank.host for rank in ranks):
        host_ranks = [rank for rank in ranks if rank.host == host and rank.alive and rank.rank >= 0]
        place = f" on {host}" if len({rank.host for rank in ranks}) > 1 else ""
        sentences.extend(_describe_overload(host_ranks, cores.get(host, 0), place))
        sentences.extend(_describe_sharing(host_ranks, cores.get(host, 0), affinities, cursor_ns, place))
    return sentences


def _describe_overload(ranks: Sequence[Rank], cores: int, place: str) -> list[str]:
    used, waiting = sum(rank.cores_used for rank in ranks), float(np.nansum([rank.waiting_cores for rank in ranks]))
    if not cores or waiting < max(1.0, 0.1 * cores) or used + waiting <= cores:
        return []
    if used < _OWN_SHARE * cores:  # it is for other processes that they wait, or they are bound to a few cores
        return []
    share = max(1, cores // len(ranks))
    return [
        f"{used + waiting:.0f} threads compete for {format_count(cores, 'core')}{place}: {waiting:.1f} of them wait."
        f" Set OMP_NUM_THREADS={share}, each rank's share."
    ]


def _describe_sharing(ranks: Sequence[Rank], cores: int, affinities: Affinities, cursor_ns: int, place: str) -> list[str]:
    """Describe ranks that are bound to overlapping parts of the cores."""
    bound = {rank.rank: affinities.find_process_cores(rank.host, rank.pid, cursor_ns) for rank in ranks}
    bound = {rank: allowed for rank, allowed in bound.items() if allowed and len(allowed) < cores}
    taken: dict[int, int] = {}
    for rank, allowed in sorted(bound.items()):
        for core in sorted(allowed):
            if core in taken:
                return [f"Ranks {taken[core]} and {rank} are bound to the same cores{place}, including core {core}."]
        taken.update(dict.fromkeys(allowed, rank))
    return []
