"""The pace of a loop whose steps are not seen, by the rising number that it prints: ``gen 12``, ``step 40``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, Severity, in_job
from zerotop.analysis.stats.change_points import Shift, ShiftFinder
from zerotop.recording.output.tail import LineFollower, PrintedLine
from zerotop.recording.samples import Floats
from zerotop_probe.recording import events

_UNSEEN = FindingKind(
    name="steps_printed",
    severity=Severity.INFO,
    confidence=0.9,
    headline="No steps seen; the output prints '{word} N' every {pace_s:seconds}",
    details=(
        "In the {seen_s:seconds} of these {lines:,.0f} lines no step of PyTorch's modules, autograd and optimizers was seen:"
        " steps and phases are not recorded. If the lines come more slowly, it is told."
    ),
)
_SLOWER = FindingKind(
    name="printed_pace",
    confidence=0.85,
    headline="'{word} N' is printed every {after_s:seconds} instead of {before_s:seconds} from {number} on",
    details=(
        "These are the times between printed lines with a rising number: {lines_before:,.0f} before and {lines_after:,.0f}"
        " after. Steps are not seen in this job, and so neither their phases nor their lines."
    ),
    advice="See what else the loop does from there on. While it runs, py-spy shows its lines.",
    fix="py-spy dump --subprocesses --pid {pid}",
)
# Words that scripts print before the number of a step of training.
_COUNTER = re.compile(
    r"\b(gen(?:eration)?|step|it(?:er(?:ation)?)?|episode|epoch|update|round|trial)\b[\s:=#\[(]{0,3}(\d+)", re.IGNORECASE
)
# So many lines, and for so long (s), before it is told that they are all there is.
_LEAST_LINES, _LEAST_SECONDS = 20, 10.0
# A pace that changes by less, as a share, may be wandering; and of so many of the last times all but a few must agree.
_LEAST_CHANGE, _LAST_TIMES = 0.2, 20
# Lines that come at the same time were held back in a buffer: their times say nothing.
_LEAST_APART_S, _APART_SHARE = 0.001, 0.9
# A rank that prints the same may be so many steps behind.
_BEHIND = 3


@dataclass
class _Series:
    """The lines with a rising number after one word."""

    word: str
    finder: ShiftFinder = field(default_factory=ShiftFinder)
    numbers: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)

    def add(self, time_ns: int, number: int) -> None:
        """Add a line, or begin again if its number is less than before."""
        last = self.numbers[-1] if self.numbers else -1
        if number < last - _BEHIND:
            self.finder, self.numbers, self.times_ns = ShiftFinder(), [], []
        elif number <= last:
            return
        self.numbers.append(number)
        self.times_ns.append(time_ns)

    @property
    def paces(self) -> Floats:
        """The seconds for each number, between one line and the next."""
        return np.asarray(np.diff(self.times_ns) / 1e9 / np.maximum(1, np.diff(self.numbers)), np.float64)

    @property
    def is_timed(self) -> bool:
        """Whether its lines were printed one by one, and enough of them."""
        if len(self.times_ns) <= _LEAST_LINES:
            return False
        return float((np.diff(self.times_ns) >= _LEAST_APART_S * 1e9).mean()) >= _APART_SHARE


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding | None]:
    """Report the pace of printed lines once, and where it gets lower; nothing of a job with steps, or with no probe."""
    recording = window.recording
    if any(len(process.steps) for process in recording.processes) or recording.events_of(events.ProbeMissing):
        window.is_closed = True
        return
    # Each line of the output is read once.
    follower, known = window.keep(LineFollower), window.keep(dict[str, _Series])
    for lines in follower.read_new(recording.at):
        _add_lines(known, lines)
    timed = [series for series in known.values() if series.is_timed]
    if timed:
        series = max(timed, key=lambda series: len(series.numbers))
        yield window.find_once(lambda: _tell_unseen(series))
        for shift in series.finder.find_shifts(series.paces):
            yield _tell_shift(recording, series, shift)


def _add_lines(known: dict[str, _Series], lines: Iterable[PrintedLine]) -> None:
    for time_ns, text in lines:
        for match in _COUNTER.finditer(text):
            word = match[1]
            known.setdefault(word, _Series(word)).add(time_ns, int(match[2]))


def _tell_unseen(series: _Series) -> Finding | None:
    since_ns = series.times_ns[0]
    end_ns = next((one for one in series.times_ns[_LEAST_LINES:] if one >= since_ns + _LEAST_SECONDS * 1e9), None)
    if end_ns is None:
        return None
    lines = series.times_ns.index(end_ns) + 1
    evidence = {"pace_s": float(np.median(series.paces[:lines])), "seen_s": (end_ns - since_ns) / 1e9, "lines": float(lines)}
    return _UNSEEN.at(None, since_ns, end_ns, evidence, word=series.word)


def _tell_shift(recording: Evidence, series: _Series, shift: Shift) -> Finding | None:
    """Return the finding if the change is large and all times around it are beyond those on its other side."""
    paces = series.paces
    before, after = paces[shift.before], paces[shift.first : shift.last + 1]
    before_s, after_s = float(np.median(before)), float(np.median(after))
    if len(before) < _LAST_TIMES // 2 or not after_s >= (1 + _LEAST_CHANGE) * before_s > 0:
        return None
    if np.percentile(after, 10) <= np.percentile(before, 90):
        return None
    evidence = {"before_s": before_s, "after_s": after_s, "lines_before": len(before), "lines_after": len(after)}
    begin_ns, known_ns = series.times_ns[shift.first], series.times_ns[shift.last + 1]
    started = recording.events_of(events.JobStarted)
    values: dict[str, Any] = {
        "word": series.word,
        "number": series.numbers[shift.first + 1],
        "pid": started[-1].pid if started else "PID",
    }
    return _SLOWER.at(None, begin_ns, known_ns, evidence, cost=1 - before_s / after_s, **values)
