"""Which lanes the timeline has, and how many rows each gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

MARKS, RIBBONS, STEPS, TIME, SUMMARY = "marks", "ribbons", "steps", "time", "summary"


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of values. It is there where any of its values is recorded."""

    name: str
    values: tuple[str, ...]
    least: int  # rows
    most: int
    importance: int
    weight: int  # how often it gets a row more


# Under one another in this order: what computes, then where memory is, then what follows from both.
LANES = (
    Lane("utilization", ("utilization",), 1, 6, 9, 3),
    Lane("cores", ("cores", "all_cores", "host_cores"), 1, 6, 8, 3),
    Lane("memory", ("allocated", "reserved", "process", "device"), 2, 8, 7, 3),
    Lane("host memory", ("rss", "all_rss", "host_memory"), 2, 8, 3, 3),
    Lane("pcie", ("sent", "received"), 1, 4, 4, 2),
    Lane("iteration", ("iteration",), 1, 4, 6, 2),
    Lane("power", ("power",), 1, 3, 2, 1),
)
_ROOMY = 22  # rows from which on power, which follows utilization, is worth one
BY_NAME = {lane.name: lane for lane in LANES}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a lane, or another part of the picture, is. ``tall``: rows of the first of several ribbons."""

    name: str
    top: int
    height: int
    tall: int = 1


def shown_lanes(recorded: Collection[str]) -> list[Lane]:
    """The lanes of which there is something. Host memory matters most where there is no GPU."""
    there = [lane for lane in LANES if any(value in recorded for value in lane.values)]
    if any(lane.name == "memory" for lane in there):
        return there
    return [replace(lane, importance=7) if lane.name == "host memory" else lane for lane in there]


def plan(height: int, recorded: Collection[str], ranks: int, *, marks: bool) -> list[Place]:
    """Where everything goes in so many rows. ``ranks``: how many ribbons there could be."""
    rows = _fixed(height, ranks > 0, marks)
    room = height - sum(rows.values())
    kept: list[Lane] = []
    for lane in sorted(shown_lanes(recorded), key=lambda lane: -lane.importance):
        if lane.least <= room and (height >= _ROOMY or lane.name != "power"):
            kept.append(lane)
            rows[lane.name] = lane.least
            room -= lane.least
    gaps = len(kept) if height >= 28 and room > 2 * len(kept) else 0
    room -= gaps
    tall = 1
    if RIBBONS in rows:
        tall += min(2, room // 12)
        rows[RIBBONS] = tall + max(0, min(ranks - 1, room // 3 if ranks > 4 else room * 3 // 5))
        room -= rows[RIBBONS] - 1
    _grow(rows, kept, room)
    return _placed(rows, tall, gaps > 0)


def ribbons(places: Sequence[Place]) -> int:
    """How many ribbons there is room for."""
    return next((place.height - place.tall + 1 for place in places if place.name == RIBBONS), 0)


def _fixed(height: int, ribbons: bool, marks: bool) -> dict[str, int]:
    """Rows of what is no lane of values."""
    wanted = ((TIME, 4, True), (RIBBONS, 1, ribbons), (SUMMARY, 7, True), (STEPS, 12, ribbons), (MARKS, 10, marks))
    return {name: 1 for name, least, there in wanted if there and height >= least}


def _grow(rows: dict[str, int], lanes: Sequence[Lane], room: int) -> None:
    """Gives lanes more rows, those first that have the fewest for their weight; when all have the most, some more yet."""
    while room > 0 and lanes:
        wanting = [lane for lane in lanes if rows[lane.name] < lane.most] or lanes
        poorest = min(wanting, key=lambda lane: (rows[lane.name] / lane.weight, -lane.importance))
        rows[poorest.name] += 1
        room -= 1


def _placed(rows: dict[str, int], tall: int, spaced: bool) -> list[Place]:
    order = (MARKS, RIBBONS, *(lane.name for lane in LANES), STEPS, TIME, SUMMARY)
    places: list[Place] = []
    top = 0
    for name in order:
        if name in rows:
            top += 1 if spaced and name in BY_NAME else 0
            places.append(Place(name, top, rows[name], tall if name == RIBBONS else 1))
            top += rows[name]
    return places
