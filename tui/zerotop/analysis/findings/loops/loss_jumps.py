"""The loss of the training became NaN or infinite, or is suddenly three times as high, and stays so.

The loss is compared with the run's own level and its own noise. A value counts once its step is over, or the job: then the
step that it belongs to is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.findings.loops.loss_causes import describe_before
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.stats.wander import stands_out
from zerotop.analysis.steps.logged_values import LoggedSeries, find_steps, read_logged
from zerotop.recording.samples import Floats, Ints
from zerotop_probe.recording.events import JobEnded

_BROKEN = FindingKind(
    name="loss_not_finite",
    confidence=0.99,
    headline="The loss is {word}[ in step {step}]",
    details="[Before it was {loss_before:.4g}[ in step {step_before}][; {before}].][ {raised}]",
    advice="{look}",
    fix="torch.autograd.set_detect_anomaly(True)",
)
_LASTING = _BROKEN.with_changes(
    severity=Severity.ERROR, headline="The loss is {word}[ from step {step} on]: {values:.0f} values in a row"
)
_JUMPED = FindingKind(
    name="loss_jumped",
    confidence=0.9,
    headline="The loss rose to {loss_after:.4g} from {loss_before:.4g}[ at step {step}]",
    details=(
        "All of {values_after:.0f} values are above the highest of the {values_before:.0f} before, {highest_before:.4g}."
        "[ Before: {before}.]"
    ),
    advice="{look}",
    fix="{clipping_fix}",
)
_LOOK = (
    "Find the operation that makes it: usual causes are a learning rate that is too high, a division by zero or a logarithm"
    " of zero in the loss, and a batch without labels."
)
# Finite values that show the usual level, and the last ones that show how it wanders.
_LEAST_BEFORE, _MOST_BEFORE = 10, 30
# Values that all have to be higher: fewer are a spike.
_AFTER = 5
_FACTOR = 2.8  # of the level before, so that three times a loss that falls is enough
# How far above the highest value before: noise exceeds it by less.
_ABOVE_HIGHEST = 1.5
# Distance of the levels, in ranges in which they wander, on a logarithmic scale; ranges below a tenth count as that.
_TIMES, _LEAST_WANDER = 2.0, 0.1
# NaN in a row that last.
_LASTING_VALUES = 3


class _Jump(NamedTuple):
    """A jump, as indices of values."""

    begin: int  # of the level before it
    first: int  # after it
    last: int  # with which it was seen


@in_each_attempt(None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each in the attempts of the job."""
    logged = read_logged(window.recording.recording)
    if "loss" not in logged:
        return
    search = _LossSearch(window.recording, window.subject, logged)
    new = window.steps(search.values)
    yield from search.find_broken(new)
    for jump in window.extend(partial(search.find_next_jump, new), 0):
        yield search.build_jump(jump)
    for end_ns in window.items([search.end_ns] if search.end_ns is not None else []):
        yield from search.find_error(end_ns)


class _LossSearch:
    """The search in one attempt's values whose steps are known."""

    def __init__(self, recording: Evidence, group: Group, logged: dict[str, LoggedSeries]) -> None:
        self._recording, self._group, self._logged = recording, group, logged
        later = [other.lead.source.created_ns for other in recording.groups[recording.groups.index(group) + 1 :]]
        ended = [event.unix_ns for event in recording.events_of(JobEnded)[-1:]]
        self.end_ns = next(iter(later or ended), None)
        """When the attempt had ended; None while it goes on."""
        # Of an attempt in progress the values of steps that are over count.
        steps_ns = int(group.lead.steps["end_unix_ns"][-1]) if len(group.lead.steps) else 0
        series = logged["loss"].until(recording.cursor_ns)
        own = slice(*np.searchsorted(series.times, (group.lead.source.created_ns, (self.end_ns or steps_ns) + 1)))
        self._times, self.values = series.times[own], series.values[own]

    @cached_property
    def _steps(self) -> list[int | None]:
        steps = find_steps(self._group.lead.steps, self._times)
        return [step if step >= 0 else None for step in steps.tolist()]

    @cached_property
    def _runs(self) -> Ints:
        """The first values of the runs of values that are not finite."""
        broken = ~np.isfinite(self.values)
        return np.flatnonzero(broken & ~np.concatenate(([False], broken[:-1])))

    def find_broken(self, new: slice) -> Iterator[Finding]:
        """Yield the values that are not finite, and again those that last."""
        for first in self._runs[self._runs > new.start - _LASTING_VALUES].tolist() if new.start < new.stop else []:
            values = self.values[first : first + _LASTING_VALUES]
            if self._is_reported(first, first):
                yield self._build_broken(first, first)
            if len(values) == _LASTING_VALUES and not np.isfinite(values).any():
                yield self._build_broken(first, first + _LASTING_VALUES - 1)

    def find_error(self, end_ns: int) -> Iterator[Finding]:
        """Yield the last values once more, with the error in which the attempt ended, if they are not finite."""
        last = len(self.values) - 1
        if last >= 0 and not np.isfinite(self.values[last]) and self._is_reported(first := int(self._runs[-1]), last):
            ends = find_ends(self._recording.at.at(end_ns), [one.source for one in self._group.processes])
            exception = next((end.traceback for end in ends if end.traceback is not None), None)
            if exception is not None:
                place = f" at {exception.place}" if exception.place else ""
                yield self._build_broken(first, last, f"Then the script raised {exception.error}{place}.", end_ns)

    def _is_reported(self, first: int, last: int) -> bool:
        """Whether this is worth a finding: at the begin some logs have NaN until there is a loss."""
        return bool(np.isfinite(self.values[:first]).any()) or last - first + 1 >= _LASTING_VALUES

    def _build_broken(self, first: int, last: int, raised: str | None = None, known_ns: int | None = None) -> Finding:
        count = last - first + 1
        kind = _LASTING if count >= _LASTING_VALUES else _BROKEN
        before = np.flatnonzero(np.isfinite(self.values[:first]))
        words = {"NaN" if np.isnan(value) else "infinite" for value in self.values[first : last + 1].tolist()}
        evidence = {"values": count, "loss_before": float(self.values[before[-1]]) if len(before) else None}
        return self._build(
            kind,
            first,
            known_ns or self._find_known(last),
            evidence,
            word=words.pop() if len(words) == 1 else "NaN or infinite",
            step_before=self._steps[before[-1]] if len(before) else None,
            raised=raised,
            look=_LOOK,
        )

    def find_next_jump(self, new: slice, jump: _Jump | None) -> _Jump | None:
        """Return the next time that the last values are far above all before them, since the jump before."""
        for last in range(max(new.start, jump.last + 1 if jump is not None else 0), new.stop):
            first = last + 1 - _AFTER
            if np.isfinite(self.values[last]) and first > 0:
                # A loss that falls was high at first. After a jump, what was seen since then is no news.
                begin = jump.first if jump is not None else max(0, first - _MOST_BEFORE)
                if _is_jump(self._find_finite(begin, first), self.values[first : last + 1]):
                    return _Jump(begin, first, last)
        return None

    def _find_finite(self, begin: int, end: int) -> Floats:
        values = self.values[begin : max(begin, end)]
        return values[np.isfinite(values)]

    def build_jump(self, jump: _Jump) -> Finding:
        """Return the finding about a jump."""
        before, after = self._find_finite(jump.begin, jump.first), self.values[jump.first : jump.last + 1]
        evidence = {
            "loss_before": float(np.median(before[-_LEAST_BEFORE:])),
            "loss_after": float(np.median(after)),
            "highest_before": float(before.max()),
            "values_before": len(before),
            "values_after": len(after),
        }
        look = "Look at the batches of these steps. If the loss stays high, go back to a checkpoint before them."
        return self._build(_JUMPED, jump.first, self._find_known(jump.last), evidence, look=look)

    def _find_known(self, index: int) -> int:
        """Return when a value and its step were known."""
        time_ns, ends = int(self._times[index]), self._group.lead.steps["end_unix_ns"]
        after = bisect_left(ends, time_ns)
        return int(ends[after]) if after < len(ends) else self.end_ns or self._recording.cursor_ns

    def _build(
        self, kind: FindingKind, first: int, known_ns: int, evidence: Mapping[str, float | None], **values: Any
    ) -> Finding:
        time_ns, step = int(self._times[first]), self._steps[first]
        before = describe_before(self._group, step, time_ns, self._logged, known_ns)
        return kind.at(self._group, time_ns, known_ns, evidence, step=step, before=before, **values)


def _is_jump(before: Floats, after: Floats) -> bool:
    """Whether all values of ``after`` are far above those of ``before``, which are positive."""
    if len(before) < _LEAST_BEFORE or before.min() <= 0 or after.min() < _ABOVE_HIGHEST * before.max():
        return False
    level = before[-_MOST_BEFORE:]
    if np.median(after) < _FACTOR * np.median(level[-_LEAST_BEFORE:]):
        return False
    return stands_out(_remove_fall(np.log(level)), np.log(after), times=_TIMES, floor=_LEAST_WANDER)


def _remove_fall(values: Floats) -> Floats:
    """Return values that fall in a line without their fall, which is no wandering, at the height of the last ones."""
    places = np.arange(len(values)) - (len(values) - 1)
    return values - min(0.0, float(np.polyfit(places, values, 1)[0])) * places
