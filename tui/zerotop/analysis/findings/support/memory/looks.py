"""The probe's looks at the lines that allocate memory, and how findings wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

from zerotop.analysis.code_line import CodeLine
from zerotop.analysis.findings.support.evidence import Process
from zerotop.analysis.findings.support.lines.stack_lines import find_deadline
from zerotop.analysis.formatting import Text, join_words
from zerotop.analysis.memory.block_lines import Look, read_look
from zerotop_probe.recording import events
from zerotop_probe.recording.directory import STACKS_SETTING

# How long a finding waits for a look (ns), which has to fit into the probe's budget.
_PATIENCE_NS = 10_000_000_000
# The least share of the growth, or of a peak, of a line that is named. Backward allocates as much again, without lines.
_NOTABLE_SHARE = 0.1
# Lines whose blocks have become larger alike: how many, by how much they differ, and their share of what all lines grew by.
_LEAST_ALIKE, _SCALE_SHARE, _SCALED_SHARE = 2, 0.1, 0.7
# A line whose largest block is so many times as large as before allocates other sizes. So many of these are named, if
# their blocks have this share of the largest one's size.
_LARGER_TIMES, _MOST_LARGER, _LARGE_SHARE = 1.2, 3, 0.5
# A column of the allocator's table that is as old as the looks.
_AS_OLD_AS_LOOKS = "device_allocs"


class FoundLook(NamedTuple):
    """A look, or None, and when that is known (unix nanoseconds)."""

    look: Look | None
    known_ns: int


def read_looks(process: Process, why: str) -> Iterator[Look]:
    """Iterate over the looks of a process for a reason, in order."""
    for event in process.events_of(events.MemoryLines):
        if event.why == why:
            yield read_look(process.at.at(event.unix_ns), event)


def await_look(
    process: Process, why: str, fits: Callable[[Look], bool], known_ns: int, patience_ns: int = _PATIENCE_NS
) -> FoundLook | None:
    """Return the first suitable look for a finding; None while one may still come.

    ``known_ns``: when the finding is known without it.
    """
    deadline_ns = find_deadline(process, known_ns, patience_ns)
    for look in read_looks(process, why):
        if fits(look) and look.known_ns <= deadline_ns:
            return FoundLook(look, max(known_ns, look.known_ns))
    if not _may_look(process):
        return FoundLook(None, known_ns)
    return FoundLook(None, deadline_ns) if process.at.cursor_ns >= deadline_ns else None


def _may_look(process: Process) -> bool:
    if process.at.recording.info.get(STACKS_SETTING) is not True:
        return False
    sources = process.tables("allocator")
    return any(_AS_OLD_AS_LOOKS in (source.array.dtype.names or ()) for source in sources)


class LineGrowth(NamedTuple):
    """A line, and the bytes by which its blocks have grown since an earlier look."""

    line: CodeLine
    grown_bytes: int
    counts: tuple[int, int] | None = None  # of its blocks before and now, if there are more of the same sizes


def find_growth(look: Look, before: Look | None) -> LineGrowth | None:
    """Return the line whose blocks have grown most since an earlier look, or hold the most; None if none is notable."""
    last = _sum_by_place(before) if before is not None else {}
    grown = {place: size - last.get(place, 0) for place, size in _sum_by_place(look).items()}
    whole = look.whole_bytes - (before.whole_bytes if before is not None else look.before_bytes)
    place = max(grown, key=lambda one: grown[one], default=None)
    if place is None or grown[place] < _NOTABLE_SHARE * max(whole, 1):
        return None
    line = next(blocks.line for blocks in look.blocks if blocks.line is not None and blocks.place == place)
    return LineGrowth(line, grown[place], _find_counts(look, before, place) if before is not None else None)


def find_scale(look: Look, before: Look) -> float | None:
    """Return how many times as large as before the blocks are of the lines that allocate most more; None without one.

    There are several such lines, all alike, and each allocates as many blocks as before.
    """
    last, scales = _sum_by_place(before), []
    grown = {place: size - last.get(place, 0) for place, size in _sum_by_place(look).items() if last.get(place, 0) < size}
    for place in grown.keys() & last.keys():
        if _count_by_size(before, place).total() == _count_by_size(look, place).total():
            scales.append((1 + grown[place] / max(1, last[place]), grown[place]))
    usual = median([scale for scale, _ in scales]) if len(scales) >= _LEAST_ALIKE else 0.0
    alike = [size for scale, size in scales if abs(scale - usual) <= _SCALE_SHARE * usual]
    explains = sum(alike) >= _SCALED_SHARE * max(sum(grown.values()), 1)
    return usual if usual >= 1 + _SCALE_SHARE and len(alike) >= _LEAST_ALIKE and explains else None


def describe_larger(look: Look, before: Look) -> Text | None:
    """Return a sentence about the lines whose largest block is larger than in an earlier look; None without any."""
    now, then = ({place: max(_count_by_size(one, place)) for place in _sum_by_place(one)} for one in (look, before))
    larger = [place for place, size in now.items() if size > _LARGER_TIMES * then.get(place, 0)]
    least = _LARGE_SHARE * max((now[place] for place in larger), default=0)
    if not larger or least < _NOTABLE_SHARE * _LARGE_SHARE * (look.whole_bytes - look.before_bytes):
        return None
    places = sorted((place for place in larger if now[place] >= least), key=lambda place: now[place], reverse=True)
    values: dict[str, Any] = {"now": look.first_step, "then": before.first_step}
    for number, place in enumerate(places[:_MOST_LARGER]):
        values |= {f"size{number}": now[place], f"line{number}": place}
    parts = [f"{{line{number}}} ({{size{number}:size}})" for number in range(len(places[:_MOST_LARGER]))]
    return Text(f"In step {{now}}, larger blocks than in step {{then}} are allocated at {join_words(parts)}.", values)


def _find_counts(look: Look, before: Look, place: str) -> tuple[int, int] | None:
    """Return how many blocks a line had before and now, if it allocates the same sizes more often."""
    then, now = _count_by_size(before, place), _count_by_size(look, place)
    is_same = bool(then) and then.keys() == now.keys() and all(now[size] > then[size] for size in then)
    return (then.total(), now.total()) if is_same else None


def _count_by_size(look: Look, place: str) -> Counter[int]:
    counts = Counter[int]()
    for blocks in look.blocks:
        if blocks.line is not None and blocks.place == place:
            counts.update(dict(blocks.sizes))
    return counts


def _sum_by_place(look: Look) -> dict[str, int]:
    sums: dict[str, int] = {}
    for blocks in look.blocks:
        if blocks.line is not None:
            sums[blocks.place] = sums.get(blocks.place, 0) + blocks.total_bytes
    return sums
