"""A look through the microscope: every allocation of a few steps as a curve, its peak, and what was alive then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.phases import find_innermost, phase_name
from zerotop.session.reader import Event, Session, Source
from zerotop_probe.recording.tables import HISTORY_ACTIONS

Ints = NDArray[np.int64]

_ALLOC = HISTORY_ACTIONS.index("alloc")
_FREE = HISTORY_ACTIONS.index("free_completed")
_LARGEST = 12


@dataclass(frozen=True, slots=True)
class AliveBlock:
    """One that was alive at the peak and had been allocated during the look."""

    size_bytes: int
    phase: str  # in which it was allocated
    age_ns: int  # at the peak


@dataclass(frozen=True, slots=True)
class AllocationTrace:
    """What one rank's allocator did in ``steps`` steps from ``first_step`` on. Times are unix nanoseconds.

    The curve is of requested bytes, before rounding to blocks: ``curve_bytes`` (n,) holds from ``times_ns`` (n,) on.
    """

    rank: int
    request: int
    first_step: int
    steps: int
    begin_ns: int
    end_ns: int
    known_ns: int  # from when on it could be seen
    refused: str  # why there is no curve, as a sentence; else ""
    times_ns: Ints
    curve_bytes: Ints
    phases: NDArray[np.int16]  # (n,) the innermost phase (index into PHASES) at those times
    changes_ns: Ints  # (m,) when one phase gave way to another
    changed_to: NDArray[np.int16]  # (m,) that one
    peak_bytes: int
    peak_ns: int
    peak_phase: str
    largest: tuple[AliveBlock, ...]
    before_bytes: int  # in blocks that were there before the look, at the peak
    snapshot: str | None  # PyTorch's own file beside the recording


def read_traces(session: Session, cursor_ns: int) -> tuple[AllocationTrace, ...]:
    """All looks that were over by the cursor, by request and rank."""
    found = [_build_trace(session, event) for event in _find_events(session, cursor_ns)]
    return tuple(sorted(found, key=lambda look: (look.request, look.rank)))


class AllocationTraces:
    """The latest look of a rank at any cursor; each is computed once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._cached: tuple[Event, AllocationTrace] | None = None

    def trace_at(self, cursor_ns: int, rank: int) -> AllocationTrace | None:
        """None where there was none."""
        mine = [event for event in _find_events(self._session, cursor_ns) if event.rank == rank]
        if not mine:
            return None
        last = max(mine, key=lambda event: (int(event.facts["request"]), event.unix_ns))
        if self._cached is None or self._cached[0] != last:
            self._cached = last, _build_trace(self._session, last)
        return self._cached[1]


def _find_events(session: Session, cursor_ns: int) -> list[Event]:
    return list(session.events_named("microscope", cursor_ns))


def _build_trace(session: Session, event: Event) -> AllocationTrace:
    facts = event.facts
    source = _find_source(session, "history", event)
    offset_ns = source.offset_ns if source is not None else 0
    rows = _read_rows(source, int(facts["request"]))
    curve = int(facts["baseline"].get("requested_bytes", 0)) + np.cumsum(_compute_signed_sizes(rows), dtype=np.int64)
    peak = int(np.argmax(curve)) if len(curve) else None
    times_ns = rows["time_ns"] + offset_ns
    phases = _find_phases(session, event, times_ns) if len(rows) else np.empty(0, np.int16)
    changes_ns = _find_phase_changes(session, event, int(facts["begin_ns"]) + offset_ns, int(facts["end_ns"]) + offset_ns)
    alive = _find_alive(rows, peak) if peak is not None else []
    largest = sorted(alive, key=lambda place: -int(rows["size_bytes"][place]))[:_LARGEST]
    return AllocationTrace(
        rank=event.rank,
        request=int(facts["request"]),
        first_step=int(facts["first_step"]),
        steps=int(facts["steps"]),
        begin_ns=int(facts["begin_ns"]) + offset_ns,
        end_ns=int(facts["end_ns"]) + offset_ns,
        known_ns=event.unix_ns,
        refused=str(facts.get("why") or ""),
        times_ns=times_ns,
        curve_bytes=curve,
        phases=phases,
        changes_ns=changes_ns,
        changed_to=_find_phases(session, event, changes_ns),
        peak_bytes=int(curve[peak]) if peak is not None else 0,
        peak_ns=int(times_ns[peak]) if peak is not None else 0,
        peak_phase=phase_name(int(phases[peak])) if peak is not None else "",
        largest=tuple(
            AliveBlock(int(rows["size_bytes"][place]), phase_name(int(phases[place])), int(times_ns[peak] - times_ns[place]))
            for place in largest
        ),
        before_bytes=int(curve[peak] - rows["size_bytes"][alive].sum()) if peak is not None else 0,
        snapshot=facts.get("snapshot"),
    )


def _find_source(session: Session, table: str, event: Event) -> Source | None:
    """That table of the process that wrote the event."""
    who = (event.host, event.pid, event.rank)
    return next((s for s in session.sources[table] if (s.host, s.pid, s.rank) == who), None)


def _read_rows(source: Source | None, request: int) -> NDArray[Any]:
    """Allocations and frees of that look, in order."""
    if source is None:
        return np.empty(0, [("time_ns", "<i8"), ("address", "<i8"), ("size_bytes", "<i8"), ("action", "<u2")])
    history = source.array
    mine: NDArray[Any] = history[(history["request"] == request) & np.isin(history["action"], (_ALLOC, _FREE))]
    return mine


def _compute_signed_sizes(rows: NDArray[Any]) -> Ints:
    return np.where(rows["action"] == _ALLOC, rows["size_bytes"], -rows["size_bytes"])


def _find_phase_changes(session: Session, event: Event, begin_ns: int, end_ns: int) -> Ints:
    """The moments between two at which the event's process began or ended a phase, and the first of them itself."""
    found = [np.array([begin_ns], np.int64)]
    for table, columns in (("spans", ("begin_ns", "end_ns")), ("begins", ("time_ns",))):
        source = _find_source(session, table, event)
        if source is not None:
            known = source.between(begin_ns, end_ns)
            found += [known[column].astype(np.int64) + source.offset_ns for column in columns]
    moments = np.unique(np.concatenate(found))
    return moments[(moments >= begin_ns) & (moments < end_ns)]


def _find_phases(session: Session, event: Event, times_ns: Ints) -> NDArray[np.int16]:
    begins, spans = _find_source(session, "begins", event), _find_source(session, "spans", event)
    if begins is None:
        return np.zeros(len(times_ns), np.int16)
    return np.maximum(find_innermost(begins, spans, times_ns, event.unix_ns), 0)


def _find_alive(rows: NDArray[Any], peak: int) -> list[int]:
    """Places of the allocations up to the peak that were not freed by then."""
    addresses, actions = rows["address"][: peak + 1].tolist(), rows["action"][: peak + 1].tolist()
    found: dict[int, int] = {}
    for place, (address, action) in enumerate(zip(addresses, actions, strict=True)):
        if action == _ALLOC:
            found[address] = place
        else:
            found.pop(address, None)
    return list(found.values())
