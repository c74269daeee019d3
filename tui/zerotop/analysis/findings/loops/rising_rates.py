"""The learning rate rises without bound, as by a scheduler whose factor is above 1: no training uses such a rate.

It is read from the optimizer now and then, so also where the job prints no loss, or one that is NaN by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, in_each_attempt
from zerotop.recording.table_files import Source
from zerotop_probe.recording.tables import LOGGED_BITS

_KIND = FindingKind(
    name="learning_rate_rises",
    confidence=0.95,
    headline="The learning rate rose from {first:.3g} to {rate:.3g} by step {last_step}",
    details="It was read as {before:.3g} before step {step}, and as {high:.3g} then.",
    advice="Look at its scheduler: a factor above 1 in each step, or a step counted in other units, multiplies the rate.",
    fix="print(scheduler.get_last_lr())",
)
# A rate that no training uses, and how many times the first one it is: a search for a good rate tries all up to 10.
_NO_RATE, _TIMES = 100.0, 1000.0


@dataclass
class _Readings:
    """What is known of the rates read so far."""

    counts: dict[Source, int] = field(default_factory=dict)
    first: float = 0.0  # that is not 0
    before: float = 0.0  # the last one that was not too high
    high: float = 0.0  # the first one that was
    highest: float = 0.0
    high_ns: int = 0  # when it was read


@in_each_attempt(kinds=None)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report a rate that is too high, and again where it has risen on."""
    known = window.keep(_Readings)
    samples = window.subject.lead.records("logged").read_new(known.counts)
    if not len(samples):
        return
    has_rate = (samples.rows["known"] & LOGGED_BITS["learning_rate"]) > 0
    for time_ns, rate in zip(
        samples.times[has_rate].tolist(), samples.rows["learning_rate"][has_rate].tolist(), strict=True
    ):
        if not rate > 0:
            continue
        known.first = known.first or rate
        if not rate >= max(_NO_RATE, _TIMES * known.first):
            known.before = rate if not known.high else known.before
        elif rate > known.highest:
            known.high, known.high_ns = (known.high, known.high_ns) if known.high else (rate, time_ns)
            known.highest = rate
            yield _build(window.subject, known, time_ns)


def _build(group: Group, known: _Readings, time_ns: int) -> Finding:
    step = group.lead.step_at(known.high_ns)
    last_step = group.lead.step_at(time_ns)
    return _KIND.at(
        group,
        known.high_ns,
        time_ns,
        {"first": known.first, "rate": known.highest, "before": known.before, "high": known.high},
        step=step,
        last_step=last_step,
    )
