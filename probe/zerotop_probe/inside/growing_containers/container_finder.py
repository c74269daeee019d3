"""Find the containers that grow while host memory does, and record where they are.

All of it runs on the training thread, after a step. While all objects are listed nothing can be freed, so no code may run
that would free a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from zerotop_probe.inside.budget import read_budget
from zerotop_probe.inside.growing_containers.containers import (
    CACHED,
    ContainerGrowth,
    find_growing,
    measure_lengths,
    read_limit,
)
from zerotop_probe.inside.growing_containers.host_watch import (
    HostReading,
    HostWatch,
    can_end_look,
    is_too_late,
    read_held_bytes,
)
from zerotop_probe.inside.growing_containers.names import OwnerPlace
from zerotop_probe.inside.growing_containers.reachable_values import find_places, find_untracked_dicts
from zerotop_probe.inside.guard import CostMeter, Guard, now
from zerotop_probe.inside.stacks.own_lines import OwnPlace
from zerotop_probe.inside.stacks.paths import PathNames
from zerotop_probe.recording import events

NAME = "growing containers"
"""The name in the probe's errors."""

# Containers that are named: those whose new entries hold at least this share of what host memory has grown by, or keep the
# graphs of tensors. Of each name one counts.
_MOST_NAMED = 3
_LEAST_SHARE = 0.2
# Entries with graphs that are added in each step, at least: a few of them hold no memory of note. Of others, one may.
_LEAST_RATE = 0.5


class ContainerFinder:
    """The looks of one rank."""

    def __init__(self, write_event: Callable[..., None], meter: CostMeter) -> None:
        """``write_event`` is the recorder's."""
        self._write_event = write_event
        self._meter = meter
        self._guard = Guard(NAME, meter)
        self._watch = HostWatch(read_budget())
        self._begin: HostReading | None = None
        self._lengths: dict[int, int] = {}
        self._cost_ns = 0  # of the look in progress

    def is_due(self, time_ns: int) -> bool:
        """Whether it is time to call :meth:`end_step`."""
        return self._guard.is_on and self._watch.is_due(time_ns)

    def end_step(self, time_ns: int, step: int) -> None:
        """Read the memory in use after a step, and start a look if it grows. A look counts as a one-time cost."""
        try:
            self._follow(HostReading(time_ns, step, read_held_bytes()))
        except BaseException as error:
            self._lengths = {}
            self._guard.settle(error)

    def _follow(self, reading: HostReading) -> None:
        is_growing = self._watch.add_reading(reading)
        if self._begin is None:
            if is_growing:
                untracked = find_untracked_dicts(sys._getframe(), PathNames.for_this_process())
                self._begin, self._lengths = reading, measure_lengths(untracked)
                self._cost_ns = self._note_cost(reading.time_ns)
        elif is_too_late(self._begin, reading):
            self._begin, self._lengths = None, {}
            self._watch.end_look(reading.time_ns, self._cost_ns, named=False)
        elif can_end_look(self._begin, reading):
            begin, lengths = self._begin, self._lengths
            self._begin, self._lengths = None, {}
            self._record(begin, reading, lengths)

    def _record(self, begin: HostReading, end: HostReading, lengths: dict[int, int]) -> None:
        steps, grown_bytes = end.step - begin.step, end.held_bytes - begin.held_bytes
        named: dict[OwnerPlace, ContainerGrowth] = {}
        frame, paths = sys._getframe(), PathNames.for_this_process()
        lines: dict[OwnerPlace, list[OwnPlace]] = {}
        growing = find_growing(lengths, find_untracked_dicts(frame, paths))
        matters = [
            one
            for one in growing
            if (one.keeps_graph and one.added >= _LEAST_RATE * steps) or one.added_bytes >= _LEAST_SHARE * grown_bytes
        ]
        places = find_places([one.container for one in matters], frame, paths)
        for growth in matters:
            place = places.get(id(growth.container)) if len(named) < _MOST_NAMED else None
            if place is not None and place not in named:
                named[place] = growth
                lines[place] = find_lines(place, growth.container, frame, paths) if place.own else []
        del frame
        self._cost_ns += self._note_cost(end.time_ns)
        self._watch.end_look(end.time_ns, self._cost_ns, named=bool(named))
        if named:
            facts: dict[str, Any] = {"first_step": begin.step, "last_step": end.step, "begin_ns": begin.time_ns}
            facts |= {"end_ns": end.time_ns, "grown_bytes": grown_bytes, "seconds": self._cost_ns / 1e9}
            containers = [_describe_container(place, growth, lines[place]) for place, growth in named.items()]
            self._write_event(now(), events.GrowingContainers, containers=containers, **facts)

    def _note_cost(self, since_ns: int) -> int:
        """Count the time of this part of a look, which is part of a hook's time, as a one-time cost."""
        spent_ns = now() - since_ns
        self._meter.move_to_one_time(spent_ns)
        return spent_ns


def find_lines(place: OwnerPlace, container: Any, frame: FrameType, paths: PathNames) -> list[OwnPlace]:
    """Return where the job's own code adds to a container; of a cache, the line that defines its function."""
    if type(container) is not CACHED:
        return place.find_additions(frame, paths)
    function = object.__getattribute__(container, "__dict__").get("__wrapped__")
    code = function.__code__ if type(function) is FunctionType else None
    file = paths.name_file(code.co_filename) if code is not None else None
    return [OwnPlace(file.text, code.co_firstlineno, function.__qualname__)] if code and file and file.is_own else []


def _describe_container(place: OwnerPlace, growth: ContainerGrowth, lines: list[OwnPlace]) -> dict[str, Any]:
    limit = read_limit(growth.container)
    kind = "lru_cache" if type(growth.container) is CACHED else type(growth.container).__name__
    facts = {"kind": kind, "length": growth.length, "added": growth.added}
    facts |= {"added_bytes": growth.added_bytes, "entry": growth.entry, "keeps_graph": growth.keeps_graph}
    facts |= {"limit": limit} if limit is not None else {}
    facts |= {"viewed_bytes": growth.viewed_bytes} if growth.viewed_bytes else {}
    if len(lines) == 1:
        facts |= {"added_file": lines[0].file, "added_line": lines[0].line, "added_function": lines[0].function}
    return {**place._asdict(), **facts}
