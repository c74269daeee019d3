"""The learning rates of all groups of parameters stay 0, or fall so far, so that no step changes a parameter.

The probe reads them now and then. A logged rate does not count: it is that of the first group, which may be frozen, and what
a job prints may be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.recording.samples import Rows
from zerotop.recording.table_files import Source
from zerotop_probe.recording.events import Engine, TotalSteps
from zerotop_probe.recording.tables import LOGGED_BITS, NO_RATE, RATES_ARE_0

_LASTING = FindingKind(
    name="learning_rate_0",
    confidence=0.97,
    headline="The learning rate has been {rate} since step {step}: nothing is learned",
    details=(
        "All groups of parameters had a learning rate {exact} at each of {readings:count reading} up to step"
        " {last_step}.[ {fell}]"
    ),
    advice=(
        "Look at the rate that the optimizer is given, and at its scheduler: an integer division of steps by those of the"
        " warm-up is 0 until the warm-up is over."
    ),
    fix="print(scheduler.get_last_lr())",
)
_OVER = _LASTING.with_changes(
    headline="The learning rate was {rate} in steps {step} to {last_step}: nothing was learned in them",
    details="All groups of parameters had a learning rate {exact} at each of {readings:count reading}.[ {fell}]",
)
_DECAY = (
    "Look at its scheduler: one that is meant to be stepped once an epoch, but is stepped with each batch, multiplies the"
    " rate by its factor each time."
)
_ENDED = (
    "Look at its scheduler: it may have reached its end, as early as one does that is stepped with each micro-batch, or was"
    " given fewer steps than the job makes."
)
# Steps with a rate of 0, or half of a short training: a warm-up begins with one, and rises from then on. After it has risen
# it falls to 0 in the last steps: fewer suffice, if they are this part of those before.
_STEPS, _SHARE, _LEAST_STEPS = 50, 0.5, 10
_FALLEN_STEPS, _FALLEN_SHARE = 20, 0.25


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report rates that stay 0, and again when they have risen."""
    yield from window.keep(lambda: _RateSearch(window.subject)).find_new()


class _RateSearch:
    """The search in the readings of an attempt, each of which is read once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._counts: dict[Source, int] = {}
        self._has_risen = False
        self._told: Finding | None = None
        self._times: list[int] = []  # of the readings of 0 in a row
        self._is_exact = True  # whether all of these are exactly 0
        self._highest = 0.0
        self._last = 0, 0.0  # time and rate of the last reading that was not 0

    def find_new(self) -> Iterator[Finding]:
        """Yield the findings since the last call."""
        samples = self._group.lead.records("logged").read_new(self._counts)
        # Each stage of a pipeline, and each engine, has its own groups of parameters.
        if not len(samples) or self._group.has_stages or any(one.engine for one in self._group.lead.events_of(Engine)):
            return
        known, rates = samples.rows["known"], samples.rows["learning_rate"]
        is_zero = (known & RATES_ARE_0) > 0
        is_rate = ((known & LOGGED_BITS["learning_rate"]) > 0) & ~(np.abs(rates) <= NO_RATE)
        for place in np.flatnonzero(is_zero | is_rate).tolist():
            time_ns = int(samples.times[place])
            if is_zero[place]:
                self._times.append(time_ns)
                self._is_exact &= rates[place] == 0
                rows = self._read_steps()
                if self._told is None and rows["steps"][~rows["skipped"]].sum() >= self._find_least(time_ns):
                    self._told = self._build(_LASTING, int(rows["begin_unix_ns"][0]), int(rows["step"][0]), time_ns)
                    yield self._told
            else:
                if self._told is not None:
                    yield self._build(_OVER, self._told.begin_ns, self._told.step, time_ns)
                self._times, self._has_risen, self._told, self._is_exact = [], True, None, True
                self._last = time_ns, float(rates[place])
                self._highest = max(self._highest, self._last[1])

    def _read_steps(self) -> Rows:
        """Return the steps from that of the first reading to that of the last one."""
        steps = self._group.lead.steps
        first, last = steps["end_unix_ns"].searchsorted((self._times[0], self._times[-1]), "right").tolist()
        return steps[max(0, first - (not self._has_risen)) : last]  # after a rise, a reading is of the next step

    def _find_least(self, known_ns: int) -> float:
        before = self._group.lead.steps["end_unix_ns"].searchsorted(self._times[0], "right")
        if self._has_risen:
            return min(_STEPS, max(_FALLEN_STEPS, _FALLEN_SHARE * before))
        planned = [event.steps for event in self._group.lead.events_of(TotalSteps) if event.unix_ns <= known_ns]
        return min(_STEPS, max(_LEAST_STEPS, _SHARE * planned[-1])) if planned else _STEPS

    def _build(self, kind: FindingKind, begin_ns: int, step: int | None, known_ns: int) -> Finding:
        values: dict[str, Any] = {"rate": "0", "exact": "of exactly 0", "fell": None}
        if self._highest:
            last_ns, rate = self._last
            values["fell"] = (
                f"Before, it was up to {self._highest:.3g}, and {rate:.3g} at step {self._group.step_at(last_ns)}."
            )
            kind = kind.with_changes(advice=_ENDED)
        if not self._is_exact:
            below, kind = f"below {NO_RATE:.0e}", kind.with_changes(advice=_DECAY)
            values |= {"rate": below, "exact": below}
        values["last_step"] = int(self._read_steps()["step"][-1])
        return kind.at(self._group, begin_ns, known_ns, {"readings": len(self._times)}, step=step, **values)
