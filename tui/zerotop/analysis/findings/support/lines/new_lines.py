"""The line that is new in a phase which takes longer than before, from samples of that phase before and since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from zerotop.analysis.code_line import find_own, list_own
from zerotop.analysis.findings.support.lines.known_calls import find_known_call
from zerotop_probe.recording.events import Stacks

# The fewest samples before and since, and of the line.
_FEWEST_BEFORE, _FEWEST_SINCE, _FEWEST_OF_LINE = 15, 20, 5
# What a line took before, as a part of what it takes now, and the part of the added time that it explains, from and to.
# Lines that give Python's lock away for moments are seen too seldom.
_OLD_SHARE = 0.1
_EXPLAINED, _MOST_EXPLAINED = 0.35, 1.6
_INNERMOST_SHARE = 0.6  # of the samples that run through a line, those that run through no other one beneath it
_FEWEST_ALONE = 8  # of a line that alone shows that something takes longer
# Lines of a function so near to each other may share the time.
_ADJACENT = 2
# Where the GPU may have more to do, the host waits for it wherever it launches: the samples that a line would have had
# before if it had taken the same share of them.
_EXPECTED_BEFORE = 8.0

OwnLine = tuple[str, int, str]
"""File, number and function."""


class NewLine(NamedTuple):
    """A line, the functions beneath it, the seconds that its samples stand for, and its share of all samples."""

    line: OwnLine
    callees: tuple[str, ...]
    seconds: float
    share: float
    is_new: bool = True  # whether samples show that it hardly took time before


class _Sample(NamedTuple):
    """Samples of one stack: its own lines."""

    lines: frozenset[OwnLine]
    samples: int
    seconds: float
    waits: bool  # whether they may only wait for the GPU


class _Counts:
    """The samples of each own line, and of the lines that called it."""

    def __init__(self, sampled: Iterable[Stacks], *, counts_waits: bool) -> None:
        self.total = 0
        self.samples: Counter[OwnLine] = Counter()
        self.waits: Counter[OwnLine] = Counter()  # those that may only wait for the GPU, where these do not count
        self.depths: dict[OwnLine, int] = {}
        self.callees: dict[OwnLine, Counter[tuple[str, ...]]] = {}
        self._stacks: list[_Sample] = []
        for event in sampled:
            self.total += event.samples or 0
            for stack in event.stacks:
                own, found, count = list_own(event.frames, stack), find_own(event.frames, stack), stack.count or 0
                waits = found is not None and not counts_waits and _may_wait(found.callees)
                self._stacks.append(_Sample(frozenset(own), count, stack.seconds or 0.0, waits))
                for line in set(own):
                    (self.waits if waits else self.samples)[line] += count
                    self.depths[line] = max(self.depths.get(line, 0), own.index(line))
                if found is not None and not waits:
                    self.callees.setdefault(found[:3], Counter())[found.callees] += count

    def share(self, line: OwnLine) -> float:
        return self.samples[line] / self.total

    def measure(self, lines: Collection[OwnLine], *, with_waits: bool = False) -> tuple[int, float]:
        """Return the samples that run through any of these lines, and their seconds."""
        through = [one for one in self._stacks if (with_waits or not one.waits) and not one.lines.isdisjoint(lines)]
        return sum(one.samples for one in through), sum(one.seconds for one in through)


@lru_cache(maxsize=64)  # a change that is pending is judged again and again, before the same samples
def _count(sampled: tuple[Stacks, ...], counts_waits: bool) -> _Counts:
    return _Counts(sampled, counts_waits=counts_waits)


def _list_rows(lines: Iterable[OwnLine]) -> Iterator[list[OwnLine]]:
    """Yield the lines that are next to others in a function, as those of a loop's body are."""
    row: list[OwnLine] = []
    for line in sorted(lines, key=lambda one: (one[0], one[2], one[1])):
        if row and not (row[-1][::2] == line[::2] and line[1] - row[-1][1] <= _ADJACENT):
            yield row
            row = []
        row.append(line)
    yield row


def _may_wait(callees: tuple[str, ...]) -> bool:
    """Whether a line may wait for the GPU: by a call, or by a comparison or index, of which no call is known."""
    known = find_known_call(callees)
    return not callees or (known is not None and known.waits_for_gpu)


def has_new_line(before: Iterable[Stacks], since: Iterable[Stacks], *, is_gpu_idle: bool = True) -> bool:
    """Whether samples show a line that hardly took time before, by more than chance, however much it explains."""
    old, new = (_count(tuple(sampled), is_gpu_idle) for sampled in (before, since))
    if old.total < _FEWEST_BEFORE or new.total < _FEWEST_SINCE:
        return False
    return any(
        samples >= _FEWEST_ALONE
        and old.share(line) <= _OLD_SHARE * new.share(line)
        and old.total * new.share(line) >= _EXPECTED_BEFORE
        for line, samples in new.samples.items()
    )


def find_new_line(
    before: Iterable[Stacks],
    since: Iterable[Stacks],
    levels: tuple[float, float],
    *,
    is_gpu_idle: bool = True,
    is_alone: bool = False,
    is_on_cpu: bool = False,
) -> NewLine | None:
    """Return the innermost line that hardly took time before, and explains why the place takes longer since then.

    Where no line does alone, lines next to each other may do so together. With too few samples before, it is only a line
    that takes much longer now than the whole place did, in a process ``is_on_cpu``, whose host was not ahead of a GPU.

    ``levels``: the seconds of the place in an iteration before and since. ``is_gpu_idle``: whether the GPU has no more work
    than before. Otherwise the line at which the host waits for it says nothing: it may have been another one before.
    ``is_alone``: nothing else shows that the place takes longer, so that chance has to be excluded.
    """
    old, new = (_count(tuple(sampled), is_gpu_idle) for sampled in (before, since))
    is_known = old.total >= _FEWEST_BEFORE
    if new.total < _FEWEST_SINCE or not (is_known or (is_on_cpu and not is_alone)):
        return None
    fewest = _FEWEST_ALONE if is_alone else _FEWEST_OF_LINE
    before_s, since_s = levels

    def explains(lines: Collection[OwnLine]) -> bool:
        now = new.measure(lines)[0]
        if not is_known:  # it takes longer even if it took all of the time before
            lengthening = (now / new.total * since_s - before_s) / (since_s - before_s)
            innermost = sum(sum(new.callees.get(line, Counter()).values()) for line in lines)
            return now >= fewest and innermost >= _INNERMOST_SHARE * now and lengthening >= _EXPLAINED
        then = old.measure(lines)[0] / old.total
        if now < fewest or ((is_alone or not is_gpu_idle) and old.total * now / new.total < _EXPECTED_BEFORE):
            return False
        if len(lines) > 1:  # one of them may wait for the work that the others launch
            then, now = old.measure(lines, with_waits=True)[0] / old.total, new.measure(lines, with_waits=True)[0]
        then_s, now_s = then * before_s, now / new.total * since_s
        is_new = then_s <= _OLD_SHARE * now_s
        return is_new and _EXPLAINED <= (now_s - then_s) / (since_s - before_s) <= _MOST_EXPLAINED

    sampled = new.samples.keys() | new.waits.keys()
    rows = (row for row in _list_rows(line for line in sampled if not old.samples[line] + old.waits[line]) if len(row) > 1)
    found = [lines for lines in (*([line] for line in new.samples), *rows) if explains(lines)]
    if not found:
        return None
    lines = max(found, key=lambda some: max(new.depths[line] for line in some))
    line = max(lines, key=lambda one: new.samples[one])
    beneath = new.callees.get(line, Counter()).most_common(1)
    count, seconds = new.measure(lines, with_waits=len(lines) > 1)
    return NewLine(line, beneath[0][0] if beneath else (), seconds, count / new.total, is_known)
