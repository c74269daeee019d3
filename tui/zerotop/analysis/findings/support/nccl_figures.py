"""What NCCL's own figures say of a straggler and of a link: see the event ``nccl_figures``.

A collective ends in all its ranks at about the same time, so the rank that begins it last is in it for the shortest time.
Its bus bandwidth is that of the links; in those of the others is their wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zerotop.analysis.findings.support.evidence import Process
from zerotop_probe.recording.events import NcclFigure, NcclFigures

_Key = tuple[str, str]  # communicator and collective
# The time within which each rank that calls collectives has new figures: they are written at least once a minute.
LATEST_NS = 70 * 10**9
# A bandwidth that falls by less may be chance.
_LESS = 0.9


class NcclWait(NamedTuple):
    """The time that all other ranks spend in a collective beyond that of a straggler."""

    collective: str
    share: float  # of the time
    known_ns: int


class Bandwidth(NamedTuple):
    """The highest bus bandwidth of a collective before and after a time, in GB/s."""

    collective: str
    before_gbs: float
    after_gbs: float
    known_ns: int


def find_wait(processes: Sequence[Process], straggler: Process, begin_ns: int) -> NcclWait | None:
    """Return how long the others are in a collective beyond the straggler, from the first figures since ``begin_ns``.

    None before each rank has some, and where the straggler is not the last to come to a collective.
    """
    firsts = {process.rank: next(iter(_list_figures(process, begin_ns)), None) for process in processes}
    known = [event for event in firsts.values() if event is not None]
    if len(known) < len(firsts):
        return None
    known_ns = max(event.unix_ns for event in known)
    shares = {rank: _read_shares(event) for rank, event in firsts.items() if event is not None}
    own = shares.pop(straggler.rank)
    waits = []
    for key, share in own.items():
        others = [found[key] for found in shares.values() if key in found]
        if others and min(others) > share:
            waits.append(NcclWait(key[1], min(others) - share, known_ns))
    return max(waits, key=lambda wait: wait.share, default=None)


def _read_shares(event: NcclFigures) -> dict[_Key, float]:
    """Return the share of its time that a rank spends in each collective; none where more were left out than measured."""
    seconds = event.seconds
    known = [(key, one) for key, one in _iterate([event]) if (one.missed or 0) <= (one.count or 0)]
    return {key: one.seconds / seconds for key, one in known if one.seconds is not None} if seconds else {}


def find_bandwidths(process: Process, fault_ns: int) -> Bandwidth | None:
    """Return the collective whose bus bandwidth fell most with a fault of the rank's GPU, from its first figures since then.

    None if none fell, or that is not known.
    """
    later = _list_figures(process, fault_ns)[:1]
    if not later:
        return None
    before = _find_best(event for event in _list_figures(process, 0) if event.unix_ns <= fault_ns)
    after = _find_best(later)
    fallen = [Bandwidth(key[1], before[key], after[key], later[0].unix_ns) for key in before.keys() & after.keys()]
    worst = min(fallen, key=lambda one: (one.after_gbs / one.before_gbs, one.collective), default=None)
    return worst if worst is not None and worst.after_gbs < _LESS * worst.before_gbs else None


def _find_best(events: Iterable[NcclFigures]) -> Mapping[_Key, float]:
    best: dict[_Key, float] = {}
    for key, one in _iterate(events):
        if one.bus_gbs is not None and one.bus_gbs > 0:
            best[key] = max(one.bus_gbs, best.get(key, 0.0))
    return best


def _iterate(events: Iterable[NcclFigures]) -> Iterable[tuple[_Key, NcclFigure]]:
    for event in events:
        for one in event.figures or ():
            if one.communicator is not None and one.collective is not None:
                yield (one.communicator, one.collective), one


def _list_figures(process: Process, begin_ns: int) -> list[NcclFigures]:
    """Return a rank's figures that are about times after ``begin_ns`` only, in order."""
    return [
        event
        for event in process.at.events_of(NcclFigures)
        if (event.writer.host, event.pid) == process.key and event.unix_ns - int(1e9 * (event.seconds or 0.0)) >= begin_ns
    ]
