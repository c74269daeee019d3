"""The highest allocation of each phase, and the phase that owns the peak, from the exact peaks of the allocator's windows.

A window lasts from one reading at a phase's edge to the next. It belongs to a phase if it contains no other outermost phase.
In very short steps, which are read only at their ends, a window may contain several phases, and belongs to none. The first
window covers everything before the first reading: mostly engine initialization, or, for a rank that was entered while it
ran, its life until then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.memory.reading_places import PhaseIntervals, WindowSteps, find_last_ended, find_steps_between
from zerotop.recording.keys import RankProcess, identify_process
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_cursor, keep
from zerotop.recording.reader import Recording, Source
from zerotop_probe.recording.events import Entered
from zerotop_probe.recording.tables import BEGIN, END, PHASE_CODE, PHASES, TICK, UNKNOWN

Ints = NDArray[np.int64]

MIXED = "several phases"
"""The owner of a window that holds several phases."""

BEFORE = "before attaching"
"""The owner of what a process had allocated before the probe was attached to it."""

_BLOCK = 8192
_MIXED_CODE, _BEFORE_CODE = len(PHASES), len(PHASES) + 1
_NAMES = (*PHASES, MIXED, BEFORE)
# An edge so soon after a reading is not read again and counts to the next window.
_FRESH_NS = 1_000_000
_WHOLE_PHASES = frozenset(PHASE_CODE[name] for name in ("init", "eval", "checkpoint_save", "checkpoint_load"))

# (highest allocated, index of its window) by phase, and the same of the highest reserved.
_HighestPeaks = tuple[dict[int, tuple[int, int]], tuple[int, int]]
# Phases of a step. The rule of thumb holds in these, but neither in initialization nor in evaluation.
_STEP_PHASES = (
    "forward",
    "backward",
    "step",
    "optimizer",
    "cpu_optimizer",
    "grads_to_cpu",
    "params_to_gpu",
    "allgather",
    "reduce",
)
_NO_PEAKS: _HighestPeaks = ({}, (-1, -1))


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The highest allocation of one rank in one phase."""

    phase: str  # a name of PHASES, MIXED or BEFORE
    allocated_bytes: int
    reserved_bytes: int  # the highest in the same window
    exact: bool  # the allocator's own peak, not the highest sample
    step: int
    last_step: int  # the window may reach over several steps
    is_open: bool  # the window reaches beyond the end of the last step
    has_ended: bool  # all of the window is of finished steps
    micro_step: int
    unix_ns: int  # when its window ended
    place: int  # index of the window's record in the allocator's table

    @property
    def is_in_step(self) -> bool:
        """Whether the peak is within its step, not before it."""
        return self.phase not in ("init", BEFORE)

    @property
    def place_text(self) -> str:
        """``in backward of step 6``, ``during engine initialization``, ``before attaching``."""
        if not self.is_in_step:
            return BEFORE if self.phase == BEFORE else "during engine initialization"
        return f"in {self.phase.replace('_', ' ')} of {self.describe_steps()}"

    def describe_steps(self, *, with_micro_step: bool = False) -> str:
        """Return ``step 6``, ``step 6, micro-step 1``, ``steps 5 to 9``, ``steps 5 to 9 or after them``."""
        if self.step != self.last_step:
            return f"steps {self.step} to {self.last_step}{' or after them' if self.is_open else ''}"
        micro_step = f", micro-step {self.micro_step}" if with_micro_step and self.micro_step != UNKNOWN else ""
        return f"step {self.step}{' or after it' if self.is_open else micro_step}"

    @property
    def steps_text(self) -> str:
        """``478``, or ``478-481``."""
        return str(self.step) if self.step == self.last_step else f"{self.step}-{self.last_step}"


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """The peaks of one rank up to a cursor."""

    process: RankProcess
    phases: tuple[PhasePeak, ...]  # highest first
    reserved: PhasePeak | None  # the window with the highest reserved

    @property
    def owning_peak(self) -> PhasePeak:
        """The highest of a phase; that before attaching only where there is no other."""
        return next((peak for peak in self.phases if peak.phase != BEFORE), self.phases[0])

    @property
    def step_peak(self) -> PhasePeak | None:
        """The highest within a step, of which the rule of thumb tells; None if none is known to be of one phase."""
        return next((peak for peak in self.phases if peak.phase in _STEP_PHASES), None)

    @property
    def peak_before_entry(self) -> PhasePeak | None:
        """The peak before the probe was attached, if it is the highest."""
        return self.phases[0] if self.phases[0].phase == BEFORE else None


class _PeakCache:
    """The peaks up to each whole block of one table."""

    def __init__(self) -> None:
        self.best_until: list[_HighestPeaks] = [_NO_PEAKS]


def read_rank_peaks(at: At) -> tuple[RankPeaks, ...]:
    """Return the peaks of every rank process with an allocator, gone or not, in order of rank."""
    all_peaks = (read_peaks(at, source) for source in at.sources["allocator"])
    return tuple(sorted((peaks for peaks in all_peaks if peaks.phases), key=lambda peaks: peaks.process.rank))


@at_cursor
def read_peaks(at: At, source: Source) -> RankPeaks:
    """Return the peaks of one allocator's table. Whole blocks are read once; after that any cursor costs one block."""
    recording, cache, count = at.recording, keep(source, _PeakCache), source.count_until(at.cursor_ns)
    for begin in range((len(cache.best_until) - 1) * _BLOCK, count - _BLOCK + 1, _BLOCK):
        cache.best_until.append(_merge_range(cache.best_until[-1], recording, source, begin, begin + _BLOCK))
    blocks = count // _BLOCK
    phases, reserved = _merge_range(cache.best_until[blocks], recording, source, blocks * _BLOCK, count)
    peaks = [_build_peak(at, source, code, size, index) for code, (size, index) in phases.items()]
    reserved_peak, index = None, reserved[1]
    if index >= 0:
        owner = _find_owners(recording, source, index, index + 1)
        reserved_peak = _build_peak(at, source, int(owner[0]), int(source.array["allocated_peak_bytes"][index]), index)
    peaks.sort(key=lambda peak: (-peak.allocated_bytes, peak.place))
    return RankPeaks(identify_process(source), tuple(peaks), reserved_peak)


def _build_peak(at: At, source: Source, code: int, size: int, index: int) -> PhasePeak:
    row = source.array[index]
    # Of counted steps, readings between boundaries do not know the number.
    is_known = code != _MIXED_CODE and int(row["edge"]) != TICK
    number = int(row["step"])
    steps = WindowSteps(number, number) if is_known else find_window_steps(at.recording, source, index)
    ended = find_last_ended(at, source)
    return PhasePeak(
        phase=_NAMES[code],
        allocated_bytes=size,
        reserved_bytes=int(row["reserved_peak_bytes"]),
        exact=size == int(row["allocated_peak_bytes"]),
        step=steps.first,
        last_step=steps.last,
        is_open=steps.is_open,
        has_ended=ended is not None and steps.last <= ended and not steps.is_open,
        micro_step=int(row["micro_step"]) if is_known else UNKNOWN,
        unix_ns=int(row["time_ns"]) + source.offset_ns,
        place=index,
    )


def find_window_steps(recording: Recording, source: Source, index: int) -> WindowSteps:
    """Return the steps of a reading's window, by the ends of steps in the spans."""
    end_ns, number = int(source.array["time_ns"][index]), int(source.array["step"][index])
    begin_ns = int(_find_window_starts(source, index, index + 1)[0])
    steps = find_steps_between(recording, source, begin_ns, end_ns)
    return steps if steps is not None else WindowSteps(max(0, number), max(0, number))


def _merge_range(best: _HighestPeaks, recording: Recording, source: Source, begin: int, end: int) -> _HighestPeaks:
    """Return ``best`` with the higher values of a range of records; the first of equals stays."""
    if begin == end:
        return best
    phases, reserved = dict(best[0]), best[1]
    owners = _find_owners(recording, source, begin, end)
    allocated = _read_window_peaks(source, "allocated", begin, end)
    for code in np.flatnonzero(np.bincount(owners)).tolist():
        windows = np.flatnonzero(owners == code)
        index = int(windows[allocated[windows].argmax()])
        if code not in phases or allocated[index] > phases[code][0]:
            phases[code] = int(allocated[index]), begin + index
    sizes = _read_window_peaks(source, "reserved", begin, end)
    index = int(sizes.argmax())
    if sizes[index] > reserved[0]:
        reserved = int(sizes[index]), begin + index
    return phases, reserved


def _read_window_peaks(source: Source, kind: str, begin: int, end: int) -> Ints:
    """Return the highest in each window; where peaks are the process's, a window that did not raise it has its sample."""
    rows = source.array[max(0, begin - 1) : end]
    peaks: Ints = rows[f"{kind}_peak_bytes"].astype(np.int64)
    if source.header.get("peaks") != "window":
        raised = np.diff(peaks, prepend=peaks[0] if begin else -1) > 0
        peaks = np.where(raised, peaks, rows[f"{kind}_bytes"])
    return peaks[len(rows) - (end - begin) :]


def _find_owners(recording: Recording, source: Source, begin: int, end: int) -> NDArray[np.int64]:
    """Return the code (of _NAMES) of the phase that owns each window of a range of records."""
    rows = source.array[begin:end]
    ends: Ints = rows["time_ns"].astype(np.int64)
    starts, outermost = _find_window_starts(source, begin, end), PhaseIntervals(recording, source, begin, end)
    begins = rows["edge"] == BEGIN
    around = np.append(outermost.places.phase, 0)[outermost.find((starts + ends) // 2)]  # 0 between phases
    # A window that ends with a phase is the phase's. Another may have begun before the innermost phase did.
    own = np.where((rows["edge"] != END) | np.isin(around, list(_WHOLE_PHASES)), around, rows["phase"].astype(np.int64))
    own[own >= len(PHASES)] = PHASE_CODE["other"]  # a phase of a newer version
    if begin == 0:
        entered = recording.at(int(ends[0]) + source.offset_ns).process_events(Entered, identify_process(source))
        own[0] = _BEFORE_CODE if entered else PHASE_CODE["init"]
    # A step begins a moment before it is recognized and read.
    mixed = outermost.count_edges(starts + _FRESH_NS, ends - begins * _FRESH_NS) > 0
    return np.asarray(np.where(mixed, _MIXED_CODE, own), np.int64)


def _find_window_starts(source: Source, begin: int, end: int) -> Ints:
    """Return when each window began: at the last reading at an earlier edge; the first one just before its reading."""
    low = max(0, begin - _BLOCK)
    rows = source.array[low:end]
    times: Ints = rows["time_ns"].astype(np.int64)
    edges = np.where(rows["edge"] != TICK, np.arange(len(rows)), -1)
    last = np.concatenate([[-1], np.maximum.accumulate(edges)[:-1]])
    return np.where(last >= 0, times[last], times - 2)[begin - low :]
