"""Iterations slowly become longer: by how much each, in which phase, and what else grew meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.causes import StepChange, find_drift_cause, name_part
from zerotop.analysis.annotations.support.evidence import Evidence, Group
from zerotop.analysis.annotations.support.thresholds import SHORTEST_ITERATION_S
from zerotop.analysis.formatting import Text
from zerotop.analysis.stats.change_points import SETTLED_STEPS
from zerotop.analysis.stats.trend import Rise, TrendFinder

_KIND = FindingKind(
    name="iteration_drift",
    severity=Severity.WARNING,
    confidence=0.6,
    headline="Each iteration takes {pace} longer: {before_s:seconds} became {after_s:seconds} in {steps:.0f} steps",
    details="{growth:change} from about step {step} on, {carried:seconds} of it {part}; {cause}.",
    advice="{breakdown}",
    fix="{breakdown_fix}",
)
# Advice and fix by the phase that takes longer.
_BY_PHASE = {
    "data_s": ("Check what the dataset keeps or reads again and again.", "py-spy dump --pid {pid}"),
    "other_s": (
        "Look for a list that grows between the steps, of logged values or kept outputs.",
        "py-spy dump --pid {pid}",
    ),
}
# As with a shift, so much is visible.
DRIFT_SHARE = 0.15
# Six blocks in a row are in order by chance once in 720 times. Each is higher by this share of an even rise.
DRIFT_BLOCKS = 6
DRIFT_EVENNESS = 0.2

_new_trend_finder = partial(TrendFinder, DRIFT_BLOCKS, DRIFT_EVENNESS)


def detect(recording: Evidence) -> Iterator[Annotation]:
    """Report each rise by DRIFT_SHARE, again if it goes on for long."""
    for group in recording.groups:
        values = group.lead.steps["iteration_s"]
        for rise in group.lead.get_state(_new_trend_finder).find_rises(values, SETTLED_STEPS, share=DRIFT_SHARE):
            if rise.high >= SHORTEST_ITERATION_S:
                yield _build_finding(group, rise)


def _build_finding(group: Group, rise: Rise) -> Annotation:
    rows = group.lead.steps[rise.begin : rise.end]
    change = StepChange(group, rows[: rise.block_length], rows[-rise.block_length :])
    changes = change.measure_phases(rise.high - rise.low)
    carrier = max(changes, key=lambda name: changes[name])
    cause, kind = find_drift_cause(change), _KIND
    if cause is not None:
        kind = _KIND.with_changes(confidence=cause.confidence, advice=cause.advice, fix=cause.fix)
    elif carrier in _BY_PHASE:
        advice, fix = _BY_PHASE[carrier]
        kind = _KIND.with_changes(advice=advice, fix=fix)
    evidence = {"slope_s": rise.slope, "before_s": rise.low, "after_s": rise.high, "steps": float(len(rows))}
    return kind.at_steps(
        group,
        rows,
        evidence | {f"{name.removesuffix('_s')}_change_s": value for name, value in changes.items()},
        pace=f"{rise.slope * 1e3:.2g} ms" if rise.slope >= 1e-4 else f"{rise.slope * 1e6:.2g} us",
        cost=1 - rise.low / rise.high,
        growth=rise.high / rise.low - 1,
        pid=group.lead.source.pid,
        carried=changes[carrier],
        part=name_part(carrier),
        cause=Text("meanwhile {text}", {"text": cause.text}) if cause else "no other change was recorded",
    )
