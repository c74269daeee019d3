"""The line that is new in a phase which takes longer than before, from samples of that phase before and since."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
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
_FEWEST_ALONE = 8  # of a line that alone shows that something takes longer
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


class _Counts:
    """The samples of each own line, and of the lines that called it."""

    def __init__(self, sampled: Iterable[Stacks], *, counts_waits: bool) -> None:
        self.total = 0
        self.samples: Counter[OwnLine] = Counter()
        self.seconds: defaultdict[OwnLine, float] = defaultdict(float)
        self.depths: dict[OwnLine, int] = {}
        self.callees: dict[OwnLine, Counter[tuple[str, ...]]] = {}
        for event in sampled:
            self.total += event.samples or 0
            for stack in event.stacks:
                own, found = list_own(event.frames, stack), find_own(event.frames, stack)
                if found is not None and not counts_waits and _may_wait(found.callees):
                    continue
                for line in set(own):
                    self.samples[line] += stack.count or 0
                    self.seconds[line] += stack.seconds or 0.0
                    self.depths[line] = max(self.depths.get(line, 0), own.index(line))
                if found is not None:
                    self.callees.setdefault(found[:3], Counter())[found.callees] += stack.count or 0

    def share(self, line: OwnLine) -> float:
        return self.samples[line] / self.total


def _may_wait(callees: tuple[str, ...]) -> bool:
    """Whether a line may wait for the GPU: by a call, or by a comparison or index, of which no call is known."""
    known = find_known_call(callees)
    return not callees or (known is not None and known.waits_for_gpu)


def has_new_line(before: Iterable[Stacks], since: Iterable[Stacks], *, is_gpu_idle: bool = True) -> bool:
    """Whether samples show a line that hardly took time before, by more than chance, however much it explains."""
    old, new = (_Counts(sampled, counts_waits=is_gpu_idle) for sampled in (before, since))
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
) -> NewLine | None:
    """Return the innermost line that hardly took time before, and explains why the place takes longer since then.

    ``levels``: the seconds of the place in an iteration before and since. ``is_gpu_idle``: whether the GPU has no more work
    than before. Otherwise the line at which the host waits for it says nothing: it may have been another one before.
    ``is_alone``: nothing else shows that the place takes longer, so that chance has to be excluded.
    """
    old, new = (_Counts(sampled, counts_waits=is_gpu_idle) for sampled in (before, since))
    if old.total < _FEWEST_BEFORE or new.total < _FEWEST_SINCE:
        return None
    fewest = _FEWEST_ALONE if is_alone else _FEWEST_OF_LINE
    before_s, since_s = levels
    explains: list[OwnLine] = []
    for line in new.samples:
        then_s, now_s = old.share(line) * before_s, new.share(line) * since_s
        is_new = then_s <= _OLD_SHARE * now_s and new.samples[line] >= fewest
        is_new &= (is_gpu_idle and not is_alone) or old.total * new.share(line) >= _EXPECTED_BEFORE
        if is_new and _EXPLAINED <= (now_s - then_s) / (since_s - before_s) <= _MOST_EXPLAINED:
            explains.append(line)
    if not explains:
        return None
    line = max(explains, key=lambda one: new.depths[one])
    beneath = new.callees.get(line, Counter()).most_common(1)
    return NewLine(line, beneath[0][0] if beneath else (), new.seconds[line], new.share(line))
