"""A microscope trace: every allocation of a few steps as a curve, its peak, and the blocks that were alive then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.phases import find_innermost, find_phase_name
from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop.recording.moments.moment import at_event
from zerotop.recording.reader import Source
from zerotop_probe.recording.events import Microscope
from zerotop_probe.recording.tables import HISTORY_ACTIONS

Ints = NDArray[np.int64]

_ALLOC = HISTORY_ACTIONS.index("alloc")
_FREE = HISTORY_ACTIONS.index("free_completed")
_LARGEST = 12


@dataclass(frozen=True, slots=True)
class AliveBlock:
    """A block that was allocated during the trace and alive at the peak."""

    size_bytes: int
    phase: str  # in which it was allocated
    age_ns: int  # at the peak


@dataclass(frozen=True, slots=True)
class AllocationTrace:
    """One rank's allocations in ``steps`` steps from ``first_step`` on. Times are unix nanoseconds.

    The curve is of requested bytes, before rounding to blocks: ``curve_bytes`` (n,) holds from ``times_ns`` (n,) on.
    """

    rank: int
    request: int
    first_step: int
    steps: int
    begin_ns: int
    end_ns: int
    known_ns: int  # when it was recorded
    refused: str  # why there is no curve, as a sentence; else ""
    times_ns: Ints
    curve_bytes: Ints
    phases: NDArray[np.int16]  # (n,) the innermost phase (index into PHASES) at those times
    changes_ns: Ints  # (m,) times at which the phase changed
    changed_to: NDArray[np.int16]  # (m,) the phase from then on
    peak_bytes: int
    peak_ns: int
    peak_phase: str
    largest: tuple[AliveBlock, ...]
    before_bytes: int  # in blocks from before the trace, at the peak
    snapshot: str | None  # PyTorch's own file beside the recording


def read_traces(at: At) -> tuple[AllocationTrace, ...]:
    """Return all traces that were recorded by the cursor, by request and rank."""
    traces = [_build_trace(at, event) for event in at.events_of(Microscope)]
    return tuple(sorted(traces, key=lambda trace: (trace.request, trace.rank)))


def read_last_trace(at: At, rank: int) -> AllocationTrace | None:
    """Return the latest trace of a rank; None before the first."""
    events = [event for event in at.events_of(Microscope) if event.writer.rank == rank]
    return _build_trace(at, max(events, key=lambda event: (event.request, event.unix_ns))) if events else None


@at_event()
def _build_trace(at: At, event: Microscope) -> AllocationTrace:
    source = _find_table(at, "history", event)
    offset_ns = source.offset_ns if source is not None else 0
    begin_ns, end_ns = (time_ns + offset_ns for time_ns in (event.begin_ns, event.end_ns))
    rows = _read_rows(source, event.request)
    signed_sizes = np.where(rows["action"] == _ALLOC, rows["size_bytes"], -rows["size_bytes"])
    curve = event.baseline.get("requested_bytes", 0) + np.cumsum(signed_sizes, dtype=np.int64)
    peak = int(np.argmax(curve)) if len(curve) else None
    times_ns = rows["time_ns"] + offset_ns
    phases = _find_phases(at, event, times_ns) if len(rows) else np.empty(0, np.int16)
    changes_ns = _find_phase_changes(at, event, begin_ns, end_ns)
    alive = _find_alive(rows, peak) if peak is not None else []
    largest = sorted(alive, key=lambda index: -int(rows["size_bytes"][index]))[:_LARGEST]
    return AllocationTrace(
        rank=event.writer.rank,
        request=event.request,
        first_step=event.first_step,
        steps=event.steps,
        begin_ns=begin_ns,
        end_ns=end_ns,
        known_ns=event.unix_ns,
        refused=event.why or "",
        times_ns=times_ns,
        curve_bytes=curve,
        phases=phases,
        changes_ns=changes_ns,
        changed_to=_find_phases(at, event, changes_ns),
        peak_bytes=int(curve[peak]) if peak is not None else 0,
        peak_ns=int(times_ns[peak]) if peak is not None else 0,
        peak_phase=find_phase_name(int(phases[peak])) if peak is not None else "",
        largest=tuple(
            AliveBlock(
                int(rows["size_bytes"][index]), find_phase_name(int(phases[index])), int(times_ns[peak] - times_ns[index])
            )
            for index in largest
        ),
        before_bytes=int(curve[peak] - rows["size_bytes"][alive].sum()) if peak is not None else 0,
        snapshot=event.snapshot,
    )


def _find_table(at: At, name: str, event: Microscope) -> Source | None:
    return at.at(event.unix_ns).find_table(name, RankProcess(*event.process_key, event.writer.rank))


def _read_rows(source: Source | None, request: int) -> NDArray[Any]:
    """Return the allocations and frees of a trace, in order."""
    if source is None:
        return np.empty(0, [("time_ns", "<i8"), ("address", "<i8"), ("size_bytes", "<i8"), ("action", "<u2")])
    history = source.array
    rows: NDArray[Any] = history[(history["request"] == request) & np.isin(history["action"], (_ALLOC, _FREE))]
    return rows


def _find_phase_changes(at: At, event: Microscope, begin_ns: int, end_ns: int) -> Ints:
    """Return the begin of a period, and the times in it at which the event's process began or ended a phase."""
    times = np.unique(np.concatenate([np.array([begin_ns], np.int64), *_iter_edges(at, event, begin_ns, end_ns)]))
    return times[(times >= begin_ns) & (times < end_ns)]


def _iter_edges(at: At, event: Microscope, begin_ns: int, end_ns: int) -> Iterator[Ints]:
    for table, columns in (("spans", ("begin_ns", "end_ns")), ("begins", ("time_ns",))):
        source = _find_table(at, table, event)
        if source is not None:
            rows = source.between(begin_ns, end_ns)
            yield from (rows[column].astype(np.int64) + source.offset_ns for column in columns)


def _find_phases(at: At, event: Microscope, times_ns: Ints) -> NDArray[np.int16]:
    begins = _find_table(at, "begins", event)
    if begins is None:
        return np.zeros(len(times_ns), np.int16)
    return np.maximum(find_innermost(begins, _find_table(at, "spans", event), times_ns, event.unix_ns), 0)


def _find_alive(rows: NDArray[Any], peak: int) -> list[int]:
    """Return the indices of the allocations up to the peak that were not freed by then."""
    addresses, actions = rows["address"][: peak + 1].tolist(), rows["action"][: peak + 1].tolist()
    alive: dict[int, int] = {}
    for index, (address, action) in enumerate(zip(addresses, actions, strict=True)):
        if action == _ALLOC:
            alive[address] = index
        else:
            alive.pop(address, None)
    return list(alive.values())
