"""Which phase owns the peak: the highest that the allocator had in each, from the exact peaks of its windows.

A window lasts from one reading at a phase's edge to the next. It is a phase's own if no other phase on the outermost level
lies in it; in very short steps, of which only the ends are read, it may hold several, and is nobody's. The first window is
all that was before the first reading: making the engine, mostly; of a rank that was entered while it ran, all of its life
until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.alive_ranks import RankProcess, find_sibling_table, identify_process, read_events
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE, PHASES, TICK

Ints = NDArray[np.int64]

MIXED = "several phases"
"""The owner of a window in which there were several."""

BEFORE = "before it was entered"
"""The owner of what a rank's process had allocated before the probe was let into it."""

_BLOCK = 8192
_MIXED_CODE, _BEFORE_CODE = len(PHASES), len(PHASES) + 1
_NAMES = (*PHASES, MIXED, BEFORE)
# What is read less than this after a reading is not read again: it counts to the window that follows.
_FRESH_NS = 1_000_000
_WHOLE_PHASES = frozenset(PHASE_CODE[name] for name in ("init", "eval", "checkpoint_save", "checkpoint_load"))
# How many spans or begins are looked back through for the outermost phase around the first window.
_TAIL = 4096

# By phase: (highest allocated, place of its window); and the place of the highest reserved.
_HighestPeaks = tuple[dict[int, tuple[int, int]], tuple[int, int]]
_NO_PEAKS: _HighestPeaks = ({}, (-1, -1))


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The highest allocated of one rank in one phase."""

    phase: str  # a name of PHASES, MIXED or BEFORE
    allocated_bytes: int
    reserved_bytes: int  # the highest in the same window
    exact: bool  # the allocator's own peak, not the highest of samples
    step: int
    micro_step: int
    unix_ns: int  # when its window ended
    place: int  # of the window's record in the allocator's table

    @property
    def is_in_step(self) -> bool:
        """Whether its step is one in which it was, not merely the one that came next."""
        return self.phase not in ("init", BEFORE)

    @property
    def place_text(self) -> str:
        """``in backward of step 6``, ``in making the engine``, ``before it was entered``."""
        if self.phase == BEFORE:
            return BEFORE
        return f"in {self.phase.replace('_', ' ')} of step {self.step}" if self.is_in_step else "in making the engine"


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """The peaks of one rank up to a cursor."""

    process: RankProcess
    phases: tuple[PhasePeak, ...]  # highest first
    reserved: PhasePeak | None  # the window with the highest reserved

    @property
    def owning_peak(self) -> PhasePeak:
        """The highest that was seen in a phase; what was before an entry only where there is nothing else."""
        return next((peak for peak in self.phases if peak.phase != BEFORE), self.phases[0])

    @property
    def peak_before_entry(self) -> PhasePeak | None:
        """What was before the rank was entered, if it is higher than all that was seen since."""
        return self.phases[0] if self.phases[0].phase == BEFORE else None


class _PeakCache:
    """What is known of the whole blocks of one table, one after another."""

    def __init__(self) -> None:
        self.best_until: list[_HighestPeaks] = [_NO_PEAKS]
        self.last_peaks: tuple[tuple[int, int], RankPeaks] | None = None  # at a cursor, of so many records


_CACHES: WeakKeyDictionary[Source, _PeakCache] = WeakKeyDictionary()


def read_rank_peaks(session: Session, cursor_ns: int) -> tuple[RankPeaks, ...]:
    """The peaks of every rank process with an allocator, gone or not, in order of rank."""
    found = [read_peaks(session, source, cursor_ns) for source in session.sources["allocator"]]
    return tuple(sorted((peaks for peaks in found if peaks.phases), key=lambda peaks: peaks.process.rank))


def read_peaks(session: Session, source: Source, cursor_ns: int) -> RankPeaks:
    """The peaks of one allocator's table. Whole blocks are read once; after that a cursor anywhere costs a block."""
    known = _CACHES.setdefault(source, _PeakCache())
    count = source.count_until(cursor_ns)
    # One picture asks three times.
    if known.last_peaks is None or known.last_peaks[0] != (cursor_ns, count):
        known.last_peaks = (cursor_ns, count), _compute_peaks(session, source, known, count)
    return known.last_peaks[1]


def _compute_peaks(session: Session, source: Source, cache: _PeakCache, count: int) -> RankPeaks:
    """The peaks in so many records."""
    for begin in range((len(cache.best_until) - 1) * _BLOCK, count - _BLOCK + 1, _BLOCK):
        cache.best_until.append(_merge_range(cache.best_until[-1], session, source, begin, begin + _BLOCK))
    blocks = count // _BLOCK
    phases, reserved = _merge_range(cache.best_until[blocks], session, source, blocks * _BLOCK, count)
    told = [_build_peak(source, code, size, place) for code, (size, place) in phases.items()]
    held = None
    if reserved[1] >= 0:
        owner = _find_owners(session, source, reserved[1], reserved[1] + 1)
        held = _build_peak(source, int(owner[0]), int(source.array["allocated_peak_bytes"][reserved[1]]), reserved[1])
    ordered = sorted(told, key=lambda peak: (-peak.allocated_bytes, peak.place))
    return RankPeaks(identify_process(source), tuple(ordered), held)


def _build_peak(source: Source, code: int, size: int, index: int) -> PhasePeak:
    row = source.array[index]
    return PhasePeak(
        phase=_NAMES[code],
        allocated_bytes=size,
        reserved_bytes=int(row["reserved_peak_bytes"]),
        exact=size == int(row["allocated_peak_bytes"]),
        step=int(row["step"]),
        micro_step=int(row["micro_step"]),
        unix_ns=int(row["time_ns"]) + source.offset_ns,
        place=index,
    )


def _merge_range(best: _HighestPeaks, session: Session, source: Source, begin: int, end: int) -> _HighestPeaks:
    """``best`` with what is higher in a range of records; the first of equals stays."""
    if begin == end:
        return best
    phases, reserved = dict(best[0]), best[1]
    owners = _find_owners(session, source, begin, end)
    allocated = _read_window_peaks(source, "allocated", begin, end)
    for code in np.flatnonzero(np.bincount(owners)).tolist():
        mine = np.flatnonzero(owners == code)
        place = int(mine[allocated[mine].argmax()])
        if code not in phases or allocated[place] > phases[code][0]:
            phases[code] = int(allocated[place]), begin + place
    held = _read_window_peaks(source, "reserved", begin, end)
    place = int(held.argmax())
    if held[place] > reserved[0]:
        reserved = int(held[place]), begin + place
    return phases, reserved


def _read_window_peaks(source: Source, kind: str, begin: int, end: int) -> Ints:
    """The highest in each window. A peak that is the process's is known only of a window that raised it."""
    rows = source.array[max(0, begin - 1) : end]
    peaks: Ints = rows[f"{kind}_peak_bytes"].astype(np.int64)
    if source.header.get("peaks") != "window":
        raised = np.diff(peaks, prepend=peaks[0] if begin else -1) > 0
        peaks = np.where(raised, peaks, rows[f"{kind}_bytes"])
    return peaks[len(rows) - (end - begin) :]


def _find_owners(session: Session, source: Source, begin: int, end: int) -> NDArray[np.int64]:
    """The phase (index into PHASES, or _MIXED) that owns each window of a range of records."""
    rows = source.array[begin:end]
    ends: Ints = rows["time_ns"].astype(np.int64)
    starts, outermost = _find_window_starts(source, begin, end), _OutermostPhases(session, source, begin, end)
    begins = rows["edge"] == BEGIN
    around = outermost.phases_at((starts + ends) // 2)
    # At its end a phase's window is its own. In between the window may have begun before the innermost phase did.
    own = np.where((rows["edge"] != END) | np.isin(around, list(_WHOLE_PHASES)), around, rows["phase"].astype(np.int64))
    own[own >= len(PHASES)] = PHASE_CODE["other"]  # a phase that only a newer version knows
    if begin == 0:
        entered = read_events(session, "entered", identify_process(source), int(ends[0]) + source.offset_ns)
        own[0] = _BEFORE_CODE if entered else PHASE_CODE["init"]
    # A step may have begun a moment before it turned out to be one and was read.
    mixed = outermost.count_edges(starts + _FRESH_NS, ends - begins * _FRESH_NS) > 0
    return np.asarray(np.where(mixed, _MIXED_CODE, own), np.int64)


def _find_window_starts(source: Source, begin: int, end: int) -> Ints:
    """When each window began: at the last reading at an edge before; the first one only just."""
    low = max(0, begin - _BLOCK)
    rows = source.array[low:end]
    times: Ints = rows["time_ns"].astype(np.int64)
    places = np.where(rows["edge"] != TICK, np.arange(len(rows)), -1)
    last = np.concatenate([[-1], np.maximum.accumulate(places)[:-1]])
    found = np.where(last >= 0, times[last], times - 2)
    return found[begin - low :]


class _OutermostPhases:
    """The phases on the outermost level around a range of an allocator's records, on the writer's own clock."""

    def __init__(self, session: Session, source: Source, begin: int, end: int) -> None:
        first = int(source.array["time_ns"][max(0, begin - 1)]) + source.offset_ns
        last = int(source.array["time_ns"][end - 1]) + source.offset_ns
        spans = _read_outermost(find_sibling_table(session, "spans", source), first, last)
        begins = _read_outermost(find_sibling_table(session, "begins", source), first, last)
        ends = spans["end_ns"] if spans is not None else np.empty(0, np.int64)
        froms = spans["begin_ns"] if spans is not None else np.empty(0, np.int64)
        opened = begins["time_ns"] if begins is not None else np.empty(0, np.int64)
        still = _mask_missing(opened, froms)
        # A phase that is in progress at the end of the range ends for us never.
        self._begins: Ints = np.concatenate([froms, opened[still]]).astype(np.int64)
        self._ends: Ints = np.concatenate([ends, np.full(int(still.sum()), np.iinfo(np.int64).max)]).astype(np.int64)
        codes = [table["phase"] for table in (spans,) if table is not None]
        codes += [begins["phase"][still]] if begins is not None else []
        self._phases: Ints = np.concatenate([np.empty(0, np.int64), *codes]).astype(np.int64)
        order = np.argsort(self._begins, kind="stable")
        self._begins, self._ends, self._phases = self._begins[order], self._ends[order], self._phases[order]
        self._edges = np.sort(np.concatenate([self._begins, self._ends]))

    def phases_at(self, moments: Ints) -> Ints:
        """The phase at each moment; 0 between phases."""
        if not len(self._begins):
            return np.zeros(len(moments), np.int64)
        place = np.searchsorted(self._begins, moments, "right") - 1
        inside = (place >= 0) & (moments < self._ends[place])
        return np.where(inside, self._phases[place], 0)

    def count_edges(self, begins: Ints, ends: Ints) -> Ints:
        """How many phases begin or end strictly between two moments."""
        count = np.searchsorted(self._edges, ends, "left") - np.searchsorted(self._edges, begins, "right")
        return np.asarray(np.maximum(0, count), np.int64)


def _mask_missing(times: Any, others: Any) -> NDArray[np.bool_]:
    """Which of some times none of the others is."""
    if not len(others):
        return np.ones(len(times), np.bool_)
    ordered = np.sort(others)
    place = np.minimum(np.searchsorted(ordered, times), len(ordered) - 1)
    return np.asarray(ordered[place] != times)


def _read_outermost(source: Source | None, first_ns: int, last_ns: int) -> Any:
    """The outermost phases known from a while before one moment until another; None where none were recorded."""
    if source is None:
        return None
    rows = source.between(first_ns, last_ns, rows_before=_TAIL)
    return rows[rows["depth"] == 0]
