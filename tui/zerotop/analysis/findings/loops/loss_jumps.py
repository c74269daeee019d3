"""The loss of the training or its gradient norm became NaN or infinite, or the loss is suddenly three times as high.

The loss is compared with the run's own level and its own noise. A value counts once its step is over, or the job: then the
step that it belongs to is known.

What came before a loss that became NaN or jumped: a skipped step, another batch, another phase of the training.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from zerotop.analysis.failures.rank_ends import find_ends
from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.formatting import join_words
from zerotop.analysis.stats.wander import stands_out
from zerotop.analysis.steps.logged_values import NO_VALUES, LoggedSeries, find_steps, read_logged
from zerotop.analysis.steps.training_changes import describe_changes
from zerotop.recording.moments.rank_records import TRAINER
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop_probe.recording.events import JobEnded

# Steps up to that of the loss in which something may have caused it.
_STEPS_BEFORE = 2
# Earlier steps whose batches are the usual ones.
_USUAL_STEPS = 50
# A batch, a learning rate or a gradient norm has changed if it differs by this factor.
_BATCH_FACTOR, _RATE_FACTOR, _NORM_FACTOR = 1.1, 1.5, 5.0
# A rate that is too high takes some steps to make a loss infinite: so many of its last values count.
_RATE_VALUES = 5
# Logged values before that are the usual ones.
_USUAL_VALUES = 20
_RATE_ROSE = "the learning rate rose"
_PHASES = {"eval": "an evaluation", "checkpoint_save": "saving a checkpoint", "checkpoint_load": "loading a checkpoint"}


def describe_before(
    group: Group, step: int | None, time_ns: int, logged: dict[str, LoggedSeries], known_ns: int
) -> str | None:
    """Return in a sentence what came before a loss of ``step`` that was logged at ``time_ns``; None if nothing is known."""
    rows = group.lead.steps_until(known_ns)
    near = rows[(rows["step"] >= step - _STEPS_BEFORE) & (rows["step"] <= step)] if step is not None else rows[:0]
    found = [
        *_find_skipped(near),
        *_find_batch(rows, near),
        *_find_rate(logged, time_ns, known_ns),
        *_find_norm(logged, time_ns),
    ]
    if len(near):
        begin_ns, end_ns = int(near["begin_unix_ns"][0]), int(near["end_unix_ns"][-1])
        found += _find_phases(group, begin_ns, end_ns)
        changes = group.lead.find_changes(begin_ns, end_ns, known_ns)
        found += [describe_changes(changes)] if changes else []
    return join_words(found) or None


def _find_skipped(near: Rows) -> Iterator[str]:
    skipped = near["step"][near["skipped"]].tolist()
    if skipped:
        yield f"step {skipped[0]} was skipped because gradients overflowed"


def _find_batch(rows: Rows, near: Rows) -> Iterator[str]:
    if not len(near):
        return
    usual = rows[rows["step"] < near["step"][0]][-_USUAL_STEPS:]
    for column, unit in (("tokens", "tokens"), ("rows", "rows")):
        before, now = (some[column][some[column] > 0] for some in (usual, near))
        if not len(before) or not len(now):
            continue
        # Batches that vary are no news.
        low, high = float(before.min()), float(before.max())
        other = now[(now > high * _BATCH_FACTOR) | (now < low / _BATCH_FACTOR)]
        if len(other):
            step = int(near["step"][near[column] == other[0]][0])
            yield f"step {step} had {int(other[0]):,} {unit} instead of {int(np.median(before)):,}"
            return


def _find_rate(logged: dict[str, LoggedSeries], time_ns: int, known_ns: int) -> Iterator[str]:
    times = logged.get("learning_rate", NO_VALUES).times
    # That of an optimizer is read now and then: the next one may have been in use already.
    time_ns = next((later for later in times.tolist() if time_ns < later <= known_ns), time_ns)
    before, now = _split_usual(logged, "learning_rate", time_ns)
    values = np.append(before, now)
    for index in range(len(values) - 1, max(0, len(values) - 1 - _RATE_VALUES), -1):
        low, high = float(values[index - 1]), float(values[index])
        if low > 0 and max(low * _RATE_FACTOR, float(values[:index].max())) < high <= now:
            yield f"{_RATE_ROSE} from {low:.3g} to {high:.3g}"
            return


def _find_norm(logged: dict[str, LoggedSeries], time_ns: int) -> Iterator[str]:
    before, now = _split_usual(logged, "grad_norm", time_ns)
    if not len(before):
        return
    usual = float(np.median(before))
    # The norm of the step before, if that of this one is not finite either.
    last = now if math.isfinite(now) else float(before[-1])
    if usual > 0 and last >= _NORM_FACTOR * usual and last > np.sort(before)[-2:][0] * 2:
        yield f"the gradient norm was {last:.3g} instead of {usual:.3g}"


def _split_usual(logged: dict[str, LoggedSeries], name: str, time_ns: int) -> tuple[Floats, float]:
    """Return the finite values before, and the last one at a time, which may be none of them; NaN without any."""
    if name not in logged:
        return np.empty(0), math.nan
    values = logged[name].until(time_ns).values[-_USUAL_VALUES - 1 :]
    before = values[:-1]
    return before[np.isfinite(before)], float(values[-1]) if len(values) else math.nan


def _find_phases(group: Group, begin_ns: int, end_ns: int) -> Iterator[str]:
    for phase, words in _PHASES.items():
        times = group.lead.read_rare_phases(phase).times
        if ((times >= begin_ns) & (times <= end_ns)).any():
            yield f"{words} ended"


_BROKEN = FindingKind(
    name="loss_not_finite",
    confidence=0.99,
    headline="The loss[ {place}] is {word}",
    details="[Before it was {loss_before:.4g}[ in step {step_before}][; {before}].][ {raised}]",
    advice="{look}",
    fix="torch.autograd.set_detect_anomaly(True)",
)
_LASTING = _BROKEN.with_changes(severity=Severity.ERROR, headline="The loss {onset}: {values:.0f} values in a row")
# Its loss is finite, or not logged: the Trainer by default logs the mean of those losses that are finite.
_BROKEN_NORM = _LASTING.with_changes(
    headline="The gradient norm {onset}: {values:.0f} values in a row",
    details=(
        "[Before it was {norm_before:.4g}[ in step {step_before}][; {before}].][ The logged loss stays finite:"
        " {loss:.4g}[ in step {loss_step}][, as {filter} leaves out losses that are not].]"
    ),
)
_JUMPED = FindingKind(
    name="loss_jumped",
    confidence=0.9,
    headline="The loss rose to {highest_after:.4g} from {loss_before:.4g}[ {onset}]",
    details=(
        "All of {values_after:.0f} values since then, their median {loss_after:.4g}, are above the highest of the"
        " {values_before:.0f} before, {highest_before:.4g}."
        "[ The first ones were about as high, {loss_first:.4g}.][ Before: {before}.]"
    ),
    advice="{look}",
    fix="{clipping_fix}",
)
_BACK = _JUMPED.with_changes(
    advice=(
        "See what changed in the model and its batches there: inputs and labels that no longer belong together, or newly"
        " initialized weights, give such a loss."
    ),
    fix="",
)
_LOOK = (
    "Find the operation that makes it: usual causes are a learning rate that is too high, a division by zero or a logarithm"
    " of zero in the loss, and a batch without labels."
)
_LOOK_AT_RATE = "Lower the learning rate, and go back to a checkpoint before it rose."
# Finite values that show the usual level, and the last ones that show how it wanders.
_LEAST_BEFORE, _MOST_BEFORE = 10, 30
# A loss that has fallen may jump back to about where it began: the highest of so many values is exceeded by _FACTOR then.
_RECENT_BEFORE = 15
# It may have done so soon: then fewer values suffice, the highest of which is exceeded by far.
_NEAREST_BEFORE, _FAR_FACTOR = 6, 8.0
# It is where it began if it differs from the first values by less than this factor.
_FIRST_VALUES, _BACK_FACTOR = 3, 1.5
# Few values before suffice if it had fallen by half, and so many then stay at this part of the first one, or above.
_BACK_VALUES, _BACK_BELOW = 10, 0.9
# Values that all have to be higher: fewer are a spike.
_AFTER = 5
_FACTOR = 2.8  # of the level before, so that three times a loss that falls is enough
# Fewer values suffice where the loss explodes: so many times the largest before, or 1 if that is less.
_FEW, _EXPLODED = 3, 1000.0
# How far above the highest value before: noise exceeds it by less.
_ABOVE_HIGHEST = 1.5
# Distance of the levels, in ranges in which they wander, on a logarithmic scale; ranges below a tenth count as that.
_TIMES, _LEAST_WANDER = 2.0, 0.1
# NaN in a row that last. They are told again after each, and of many after this part more.
_LASTING_VALUES, _MORE = 3, 32


class _Jump(NamedTuple):
    """A jump, as indices of values."""

    begin: int  # of the level before it
    first: int  # after it
    last: int  # with which it was seen


@in_each_attempt(None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each in the attempts of the job."""
    logged = read_logged(window.recording.recording)
    if "grad_norm" in logged:
        norms = _LossSearch(window.recording, window.subject, logged, "grad_norm")
        yield from norms.find_broken_norms(window.steps(norms.values, of="grad_norm"))
    if "loss" not in logged:
        return
    search = _LossSearch(window.recording, window.subject, logged)
    new = window.steps(search.values)
    yield from search.find_broken(new)
    for jump in window.extend(partial(search.find_next_jump, new), 0):
        yield search.build_jump(jump)
    for end_ns in window.items([search.end_ns] if search.end_ns is not None else []):
        yield from search.find_end(end_ns)


class _LossSearch:
    """The search in one attempt's losses, or gradient norms, whose steps are known."""

    def __init__(self, recording: Evidence, group: Group, logged: dict[str, LoggedSeries], name: str = "loss") -> None:
        self._recording, self._group, self._logged = recording, group, logged
        later = [other.lead.source.created_ns for other in recording.groups[recording.groups.index(group) + 1 :]]
        ended = [event.unix_ns for event in recording.events_of(JobEnded)[-1:]]
        self.end_ns = next(iter(later or ended), None)
        """When the attempt had ended; None while it goes on."""
        # Of an attempt in progress the values of steps that are over count.
        steps_ns = int(group.lead.steps["end_unix_ns"][-1]) if len(group.lead.steps) else 0
        series = logged[name].until(recording.cursor_ns)
        own = slice(*np.searchsorted(series.times, (group.lead.source.created_ns, (self.end_ns or steps_ns) + 1)))
        self._series = series.select(own)
        self._times, self.values = self._series.times, self._series.values

    @cached_property
    def _steps(self) -> list[int | None]:
        steps = find_steps(self._group.lead.steps, self._series)
        return [step if step >= 0 else None for step in steps.tolist()]

    @cached_property
    def _runs(self) -> Ints:
        """The first values of the runs of values that are not finite."""
        broken = ~np.isfinite(self.values)
        return np.flatnonzero(broken & ~np.concatenate(([False], broken[:-1])))

    def _list_runs(self, new: slice) -> Iterator[tuple[int, list[int]]]:
        """Yield the first value of each run that goes on in new values, and those with which its length is told."""
        if new.start >= new.stop:
            return
        finite = np.flatnonzero(np.isfinite(self.values))
        earliest = max(0, int(np.searchsorted(self._runs, new.start, "right")) - 1)
        for first in self._runs[earliest:].tolist():
            at = int(np.searchsorted(finite, first))
            end = int(finite[at]) if at < len(finite) else len(self.values)
            lasts = range(max(first + _LASTING_VALUES - 1, new.start), end)
            yield first, [last for last in lasts if _is_told(last - first + 1)]

    def find_broken(self, new: slice) -> Iterator[Finding]:
        """Yield the values that are not finite, and again those that last."""
        for first, lasts in self._list_runs(new):
            if first >= new.start and self._is_reported(first, first):
                yield self._build_broken(first, first)
            for last in lasts:
                yield self._build_broken(first, last)

    def find_broken_norms(self, new: slice) -> Iterator[Finding]:
        """Yield norms that stay not finite though no step is skipped, where the logged loss does not show it."""
        rows, losses = self._group.lead.steps, self._logged.get("loss", NO_VALUES)
        for first, lasts in self._list_runs(new):
            before = np.flatnonzero(np.isfinite(self.values[:first]))
            if not len(before) or not lasts:
                continue
            known_ns = self._find_known(first + _LASTING_VALUES - 1)
            near = rows[(rows["step"] >= (self._steps[first] or 0)) & (rows["end_unix_ns"] <= known_ns)]
            if near["skipped"].any():
                continue
            for last in lasts:
                shown = losses.until(int(self._times[last]))
                if len(shown.values) and not np.isfinite(shown.values[-_LASTING_VALUES:]).all():
                    break
                values, loss = self.values[first : last + 1], float(shown.values[-1]) if len(shown.values) else None
                evidence = {"values": len(values), "norm_before": float(self.values[before[-1]]), "loss": loss}
                filtering = "the Trainer's logging_nan_inf_filter" if self._group.engine.library == TRAINER else None
                texts = {"step_before": self._steps[before[-1]], "loss_step": self._steps[last], "filter": filtering}
                onset = self._describe_onset(first, _name_values(values))
                yield self._build(_BROKEN_NORM, first, self._find_known(last), evidence, onset=onset, look=_LOOK, **texts)

    def find_end(self, end_ns: int) -> Iterator[Finding]:
        """Yield the last values once more if they are not finite, with the error in which the attempt ended."""
        last = len(self.values) - 1
        if last >= 0 and not np.isfinite(self.values[last]) and self._is_reported(first := int(self._runs[-1]), last):
            ends = find_ends(self._recording.at.at(end_ns), [one.source for one in self._group.processes])
            exception = next((end.traceback for end in ends if end.traceback is not None), None)
            raised = None
            if exception is not None:
                place = f" at {exception.place}" if exception.place else ""
                raised = f"Then the script raised {exception.error}{place}."
            yield self._build_broken(first, last, raised, end_ns)

    def _is_reported(self, first: int, last: int) -> bool:
        """Whether this is worth a finding: at the begin some logs have NaN until there is a loss."""
        return bool(np.isfinite(self.values[:first]).any()) or last - first + 1 >= _LASTING_VALUES

    def _build_broken(self, first: int, last: int, raised: str | None = None, known_ns: int | None = None) -> Finding:
        count = last - first + 1
        kind = _LASTING if count >= _LASTING_VALUES else _BROKEN
        before = self._find_value_before(first)
        word, step = _name_values(self.values[first : last + 1]), self._steps[first]
        way = "in" if self._find_gap(first) is None else "logged at"
        return self._build(
            kind,
            first,
            known_ns or self._find_known(last),
            {"values": count, "loss_before": float(self.values[before]) if before is not None else None},
            word=word,
            onset=self._describe_onset(first, word),
            place=f"{way} step {step}" if step is not None else None,
            step_before=self._steps[before] if before is not None else None,
            raised=raised,
            look=_LOOK,
        )

    def _find_value_before(self, first: int) -> int | None:
        """Return the index of the last finite value before the one at an index."""
        before = np.flatnonzero(np.isfinite(self.values[:first]))
        return int(before[-1]) if len(before) else None

    def _find_gap(self, first: int) -> tuple[int, int] | None:
        """Return the steps of a value and of the finite one before it if steps lie between, whose values nobody logged."""
        before, step = self._find_value_before(first), self._steps[first]
        step_before = self._steps[before] if before is not None else None
        return (step_before, step) if step is not None and step_before is not None and step > step_before + 1 else None

    def _describe_onset(self, first: int, word: str) -> str:
        """Return what the values are, and from where on: only that of a value each step is known to the step."""
        gap, step = self._find_gap(first), self._steps[first]
        if gap is not None:
            return f"became {word} between steps {gap[0]} and {gap[1]}"
        return f"is {word} from step {step} on" if step is not None else f"is {word}"

    def find_next_jump(self, new: slice, jump: _Jump | None) -> _Jump | None:
        """Return the next time that the last values are far above all before them, since the jump before."""
        for last in range(max(new.start, jump.last + 1 if jump is not None else 0), new.stop):
            for first, is_jump in ((last + 1 - _FEW, _has_exploded), (last + 1 - _AFTER, _is_jump)):
                if not np.isfinite(self.values[last]) or first <= 0:
                    continue
                # A loss that falls was high at first. After a jump, what was seen since then is no news.
                begin = jump.first if jump is not None else max(0, first - _MOST_BEFORE)
                if is_jump(self._find_finite(begin, first), self.values[first : last + 1]):
                    return _Jump(begin, first, last)
                if jump is not None or is_jump is not _is_jump:
                    continue
                recent, nearest = (max(0, first - count) for count in (_RECENT_BEFORE, _NEAREST_BEFORE))
                if self._is_back(recent, first, last):
                    return _Jump(recent, first, last)
                if _is_far(self._find_finite(nearest, first), self.values[first : last + 1]):
                    return _Jump(nearest, first, last)
                if _is_at_begin(self._find_finite(0, back := last + 1 - _BACK_VALUES), self.values[max(0, back) : last + 1]):
                    return _Jump(1, back, last)
        return None

    def _is_back(self, begin: int, first: int, last: int) -> bool:
        """Whether a loss that had fallen is far above its last values, if not above its first ones."""
        before, after = self._find_finite(begin, first), self.values[first : last + 1]
        return bool(_is_jump(before, after) and after.min() >= _FACTOR * before.max())

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
            "highest_after": float(after.max()),
            "values_before": len(before),
            "values_after": len(after),
        }
        start = float(self._find_finite(0, jump.begin)[:_FIRST_VALUES].max(initial=0.0))
        is_back = start / _BACK_FACTOR < evidence["loss_after"] < start * _BACK_FACTOR
        gap, step = self._find_gap(jump.first), self._steps[jump.first]
        onset = (
            f"between steps {gap[0]} and {gap[1]}" if gap is not None else f"at step {step}" if step is not None else None
        )
        look = "Look at the batches of these steps. If the loss stays high, go back to a checkpoint before them."
        values = {"onset": onset, "look": look, "loss_first": start if is_back else None}
        return self._build(_BACK if is_back else _JUMPED, jump.first, self._find_known(jump.last), evidence, **values)

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
        if before is not None and _RATE_ROSE in before:
            values["look"] = _LOOK_AT_RATE
        return kind.at(self._group, time_ns, known_ns, evidence, step=step, before=before, **values)


def _is_told(count: int) -> bool:
    return count % (1 << max(0, (count // _MORE).bit_length() - 1)) == 0


def _name_values(values: Floats) -> str:
    words = {"NaN" if np.isnan(value) else "infinite" for value in values.tolist()}
    return words.pop() if len(words) == 1 else "NaN or infinite"


def _has_exploded(before: Floats, after: Floats) -> bool:
    """Whether all values of ``after`` are so high that a few of them suffice."""
    return len(before) >= _FEW and bool(after.min() >= _EXPLODED * max(1.0, float(np.abs(before).max())))


def _is_at_begin(before: Floats, after: Floats) -> bool:
    """Whether a loss that had fallen by half after few values is back where it began, and stays there."""
    if not _FEW <= len(before) < _LEAST_BEFORE or before[-1] <= 0:
        return False
    is_fallen = before[1:].max() < before[0] >= 2 * before[-1]
    return bool(is_fallen and after.min() >= _BACK_BELOW * before[0] and after.max() <= _BACK_FACTOR * before[0])


def _is_jump(before: Floats, after: Floats) -> bool:
    """Whether all values of ``after`` are far above those of ``before``, which are positive."""
    if len(before) < _LEAST_BEFORE or before.min() <= 0 or after.min() < _ABOVE_HIGHEST * before.max():
        return False
    level = before[-_MOST_BEFORE:]
    return bool(np.median(after) >= _FACTOR * np.median(level[-_LEAST_BEFORE:])) and _leaves_range(level, after)


def _is_far(before: Floats, after: Floats) -> bool:
    """Whether all values of ``after`` are many times the highest of a few before."""
    is_few = len(before) == _NEAREST_BEFORE and before.min() > 0
    return bool(is_few and after.min() >= _FAR_FACTOR * before.max()) and _leaves_range(before, after)


def _leaves_range(level: Floats, after: Floats) -> bool:
    return stands_out(_remove_fall(np.log(level)), np.log(after), times=_TIMES, floor=_LEAST_WANDER)


def _remove_fall(values: Floats) -> Floats:
    """Return values that fall in a line without their fall, which is no wandering, at the height of the last ones."""
    places = np.arange(len(values)) - (len(values) - 1)
    return values - min(0.0, float(np.polyfit(places, values, 1)[0])) * places
