"""The loss of the training became NaN or infinite, or is suddenly three times as high, and stays so.

The loss is compared with the run's own level and its own noise. A value counts once its step is over, or the job: then the
step that it belongs to is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.findings.loops.loss_causes import describe_before
from zerotop.analysis.findings.support.evidence import Evidence, Floats, Group
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.stats.wander import stands_out
from zerotop.analysis.steps.logged_values import LoggedSeries, find_steps, read_logged
from zerotop_probe.recording.events import JobEnded

_BROKEN = FindingKind(
    name="loss_not_finite",
    severity=Severity.WARNING,
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
    severity=Severity.WARNING,
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


class _State:
    """The place in the series of values: a level lasts from one jump to the next, however far back that is."""

    def __init__(self) -> None:
        self.checked = 0  # values
        self.begin = 0  # of the level: the first value after the last jump
        self.broken = -1  # index of the first of the last values, all of which are not finite
        self.has_ended = False


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report each in the attempts of the job."""
    logged = read_logged(recording.recording)
    if "loss" not in logged:
        return
    series = logged["loss"].until(recording.cursor_ns)
    begins = [group.lead.source.created_ns for group in recording.groups]
    job_ends = [event.unix_ns for event in recording.events_of(JobEnded)]
    ends = [*begins[1:], job_ends[-1] if job_ends else None]
    for group, begin_ns, next_ns in zip(recording.groups, begins, ends, strict=False):
        # Of an attempt in progress the values of steps that are over count.
        steps_ns = int(group.lead.steps["end_unix_ns"][-1]) if len(group.lead.steps) else 0
        low, high = np.searchsorted(series.times, (begin_ns, (next_ns or steps_ns) + 1))
        own = LoggedSeries(series.times[low:high], series.values[low:high])
        if len(own.times):
            yield from _LossSearch(recording, group, own, logged, next_ns).find_all()


class _LossSearch:
    """The search in one attempt's values whose steps are known."""

    def __init__(
        self,
        recording: Evidence,
        group: Group,
        series: LoggedSeries,
        logged: dict[str, LoggedSeries],
        end_ns: int | None,
    ) -> None:
        """``end_ns``: when the attempt had ended; None while it goes on."""
        self._recording, self._group, self._series, self._logged = recording, group, series, logged
        self._end_ns = end_ns
        self._state = group.get_state(_State)

    @cached_property
    def _steps(self) -> list[int | None]:
        steps = find_steps(self._group.lead.steps, self._series.times)
        return [step if step >= 0 else None for step in steps.tolist()]

    def find_all(self) -> Iterator[Finding]:
        """Yield the findings that are new."""
        state, values = self._state, self._series.values
        for index in range(state.checked, len(values)):
            if np.isfinite(values[index]):
                state.broken = -1
                yield from self._check_jump(index)
            else:
                yield from self._check_broken(index)
        state.checked = len(values)
        if self._end_ns is not None and not state.has_ended:
            state.has_ended = True
            if state.broken >= 0 and self._is_reported(state.broken, len(values) - 1):
                ends = find_ends(self._recording.at.at(self._end_ns), [one.source for one in self._group.processes])
                exception = next((end.traceback for end in ends if end.traceback is not None), None)
                if exception is not None:
                    place = f" at {exception.place}" if exception.place else ""
                    yield self._build_broken(
                        len(values) - 1, f"Then the script raised {exception.error}{place}.", self._end_ns
                    )

    def _check_broken(self, index: int) -> Iterator[Finding]:
        state = self._state
        if state.broken < 0:
            state.broken = index
            if self._is_reported(index, index) and self._group.count_report(_BROKEN.name):
                yield self._build_broken(index)
        elif index - state.broken + 1 == _LASTING_VALUES:
            yield self._build_broken(index)

    def _is_reported(self, first: int, last: int) -> bool:
        """Whether this is worth a finding: at the begin some logs have NaN until there is a loss."""
        return bool(np.isfinite(self._series.values[:first]).any()) or last - first + 1 >= _LASTING_VALUES

    def _build_broken(self, index: int, raised: str | None = None, known_ns: int | None = None) -> Finding:
        first, values = self._state.broken, self._series.values
        count = index - first + 1
        kind = _LASTING if count >= _LASTING_VALUES else _BROKEN
        before = np.flatnonzero(np.isfinite(values[:first]))
        words = {"NaN" if np.isnan(value) else "infinite" for value in values[first : index + 1].tolist()}
        evidence = {"values": count, "loss_before": float(values[before[-1]]) if len(before) else None}
        return self._build(
            kind,
            first,
            known_ns or self._find_known(index),
            evidence,
            word=words.pop() if len(words) == 1 else "NaN or infinite",
            step_before=self._steps[before[-1]] if len(before) else None,
            raised=raised,
            look=_LOOK,
        )

    def _check_jump(self, index: int) -> Iterator[Finding]:
        """Check whether the last values, up to ``index``, are far above all before them."""
        state, first = self._state, index + 1 - _AFTER
        # A loss that falls was high at first. After a jump, what was seen since then is no news.
        begin = state.begin if state.begin else max(0, first - _MOST_BEFORE)
        before, after = self._series.values[begin : max(begin, first)], self._series.values[max(0, first) : index + 1]
        finite = before[np.isfinite(before)]
        if not _is_jump(finite, after):
            return
        state.begin = first
        if self._group.count_report(_JUMPED.name):
            evidence = {
                "loss_before": float(np.median(finite[-_LEAST_BEFORE:])),
                "loss_after": float(np.median(after)),
                "highest_before": float(finite.max()),
                "values_before": len(finite),
                "values_after": len(after),
            }
            look = "Look at the batches of these steps. If the loss stays high, go back to a checkpoint before them."
            yield self._build(_JUMPED, first, self._find_known(index), evidence, look=look)

    def _find_known(self, index: int) -> int:
        """Return when a value and its step were known."""
        time_ns, ends = int(self._series.times[index]), self._group.lead.steps["end_unix_ns"]
        after = bisect_left(ends, time_ns)
        return int(ends[after]) if after < len(ends) else self._end_ns or self._recording.cursor_ns

    def _build(
        self, kind: FindingKind, first: int, known_ns: int, evidence: Mapping[str, float | None], **values: Any
    ) -> Finding:
        time_ns, step = int(self._series.times[first]), self._steps[first]
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
