"""A look through the microscope: every allocation of a few steps as a curve, its peak, and what was alive then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.phases import innermost, name
from zerotop.session.reader import Event, Session, Source
from zerotop_probe.recording.tables import HISTORY_ACTIONS

Ints = NDArray[np.int64]

_ALLOC = HISTORY_ACTIONS.index("alloc")
_FREE = HISTORY_ACTIONS.index("free_completed")
_LARGEST = 12


@dataclass(frozen=True, slots=True)
class Block:
    """One that was alive at the peak and had been allocated during the look."""

    size_bytes: int
    phase: str  # in which it was allocated
    age_ns: int  # at the peak


@dataclass(frozen=True, slots=True)
class Look:
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
    largest: tuple[Block, ...]
    before_bytes: int  # in blocks that were there before the look, at the peak
    snapshot: str | None  # PyTorch's own file beside the recording


def looks(session: Session, cursor_ns: int) -> tuple[Look, ...]:
    """All looks that were over by the cursor, by request and rank."""
    found = [_look(session, event) for event in _told(session, cursor_ns)]
    return tuple(sorted(found, key=lambda look: (look.request, look.rank)))


class Looks:
    """The latest look of a rank at any cursor; each is computed once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: tuple[Event, Look] | None = None

    def at(self, cursor_ns: int, rank: int) -> Look | None:
        """None where there was none."""
        mine = [event for event in _told(self._session, cursor_ns) if event.rank == rank]
        if not mine:
            return None
        last = max(mine, key=lambda event: (int(event.facts["request"]), event.unix_ns))
        if self._known is None or self._known[0] != last:
            self._known = last, _look(self._session, last)
        return self._known[1]


def _told(session: Session, cursor_ns: int) -> list[Event]:
    return list(session.told("microscope", cursor_ns))


def _look(session: Session, event: Event) -> Look:
    facts = event.facts
    source = _of(session, "history", event)
    offset_ns = source.offset_ns if source is not None else 0
    rows = _rows(source, int(facts["request"]))
    curve = int(facts["baseline"].get("requested_bytes", 0)) + np.cumsum(_signed(rows), dtype=np.int64)
    peak = int(np.argmax(curve)) if len(curve) else None
    times_ns = rows["time_ns"] + offset_ns
    phases = _phases(session, event, times_ns) if len(rows) else np.empty(0, np.int16)
    changes_ns = _changes(session, event, int(facts["begin_ns"]) + offset_ns, int(facts["end_ns"]) + offset_ns)
    alive = _alive(rows, peak) if peak is not None else []
    largest = sorted(alive, key=lambda place: -int(rows["size_bytes"][place]))[:_LARGEST]
    return Look(
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
        changed_to=_phases(session, event, changes_ns),
        peak_bytes=int(curve[peak]) if peak is not None else 0,
        peak_ns=int(times_ns[peak]) if peak is not None else 0,
        peak_phase=name(int(phases[peak])) if peak is not None else "",
        largest=tuple(
            Block(int(rows["size_bytes"][place]), name(int(phases[place])), int(times_ns[peak] - times_ns[place]))
            for place in largest
        ),
        before_bytes=int(curve[peak] - rows["size_bytes"][alive].sum()) if peak is not None else 0,
        snapshot=facts.get("snapshot"),
    )


def _of(session: Session, table: str, event: Event) -> Source | None:
    """That table of the process that wrote the event."""
    who = (event.host, event.pid, event.rank)
    return next((s for s in session.sources[table] if (s.host, s.pid, s.rank) == who), None)


def _rows(source: Source | None, request: int) -> NDArray[Any]:
    """Allocations and frees of that look, in order."""
    if source is None:
        return np.empty(0, [("time_ns", "<i8"), ("address", "<i8"), ("size_bytes", "<i8"), ("action", "<u2")])
    history = source.array
    mine: NDArray[Any] = history[(history["request"] == request) & np.isin(history["action"], (_ALLOC, _FREE))]
    return mine


def _signed(rows: NDArray[Any]) -> Ints:
    return np.where(rows["action"] == _ALLOC, rows["size_bytes"], -rows["size_bytes"])


def _changes(session: Session, event: Event, begin_ns: int, end_ns: int) -> Ints:
    """The moments between two at which the event's process began or ended a phase, and the first of them itself."""
    found = [np.array([begin_ns], np.int64)]
    for table, columns in (("spans", ("begin_ns", "end_ns")), ("begins", ("time_ns",))):
        source = _of(session, table, event)
        if source is not None:
            known = source.array[source.count_known(begin_ns) : source.count_known(end_ns)]
            found += [known[column].astype(np.int64) + source.offset_ns for column in columns]
    moments = np.unique(np.concatenate(found))
    return moments[(moments >= begin_ns) & (moments < end_ns)]


def _phases(session: Session, event: Event, times_ns: Ints) -> NDArray[np.int16]:
    begins, spans = _of(session, "begins", event), _of(session, "spans", event)
    if begins is None:
        return np.zeros(len(times_ns), np.int16)
    return np.maximum(innermost(begins, spans, times_ns, event.unix_ns), 0)


def _alive(rows: NDArray[Any], peak: int) -> list[int]:
    """Places of the allocations up to the peak that were not freed by then."""
    addresses, actions = rows["address"][: peak + 1].tolist(), rows["action"][: peak + 1].tolist()
    found: dict[int, int] = {}
    for place, (address, action) in enumerate(zip(addresses, actions, strict=True)):
        if action == _ALLOC:
            found[address] = place
        else:
            found.pop(address, None)
    return list(found.values())
