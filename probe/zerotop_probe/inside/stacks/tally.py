"""Counts of the stacks sampled in one place, in the form of an event."""

from __future__ import annotations

from typing import Any

from zerotop_probe.inside.stacks.frames import PythonFrame, Stack

# Stacks of one event; the rarest are left out, those of a line that is there already first.
_MOST_STACKS = 12
# Distinct stacks that are counted.
_MOST_COUNTED = 200


class Tally:
    """Samples of the training thread in one place, perhaps in several iterations."""

    def __init__(self, begin_ns: int, step: int) -> None:
        self.begin_ns, self.end_ns = begin_ns, begin_ns
        self.first_step = self.last_step = step
        self.samples = 0
        self._counts: dict[Stack, list[int]] = {}

    def add(self, stack: Stack, time_ns: int, step: int, seen_ns: int) -> None:
        """Count a stack that stands for the last ``seen_ns``."""
        self.end_ns, self.last_step = time_ns, step
        self.samples += 1
        if stack not in self._counts and len(self._counts) >= _MOST_COUNTED:
            return
        count = self._counts.setdefault(stack, [0, 0])
        count[0] += 1
        count[1] += seen_ns

    def make_facts(self) -> dict[str, Any]:
        """Return the fields of an event that describes these samples."""
        ordered = self._order_stacks()[:_MOST_STACKS]
        stacks = [(stack, {"count": count, "seconds": seen_ns / 1e9}) for stack, (count, seen_ns) in ordered]
        return {
            "step": self.first_step,
            "last_step": self.last_step,
            "begin_ns": self.begin_ns,
            "end_ns": self.end_ns,
            "samples": self.samples,
            **format_stacks(stacks),
        }

    def _order_stacks(self) -> list[tuple[Stack, list[int]]]:
        """Return the stacks by their time; but first the longest one of each line of the job's own code."""
        ordered = sorted(self._counts.items(), key=lambda item: item[1][1], reverse=True)
        lines: set[PythonFrame | None] = set()
        first: list[tuple[Stack, list[int]]] = []
        others: list[tuple[Stack, list[int]]] = []
        for item in ordered:
            own = next((frame for frame in item[0].frames if frame.own), None)
            (others if own in lines else first).append(item)
            lines.add(own)
        return first + others


def format_stacks(stacks: list[tuple[Stack, dict[str, Any]]]) -> dict[str, Any]:
    """Return the fields ``frames`` and ``stacks`` of an event, for stacks with facts of their own."""
    numbers: dict[PythonFrame, int] = {}
    entries = [
        {**facts, **_name_call(stack), "frames": [numbers.setdefault(frame, len(numbers)) for frame in stack.frames]}
        for stack, facts in stacks
    ]
    return {"frames": [frame._asdict() for frame in numbers], "stacks": entries}


def _name_call(stack: Stack) -> dict[str, str]:
    return {"call": stack.call} if stack.call else {}
