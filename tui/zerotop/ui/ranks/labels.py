"""Words and figures of the ranks screen."""

from __future__ import annotations

from zerotop.analysis.ranks.matrix import Metric
from zerotop.analysis.ranks.outliers import ALIKE, Skew
from zerotop.ui.charts import Kind, scale
from zerotop.ui.drawing.formatting import fixed, seconds

NAMES = {
    Metric.ITERATION: "iteration",
    Metric.WAIT: "waited for",
    Metric.FORWARD: "forward",
    Metric.BACKWARD: "backward",
    Metric.STEP: "step",
    Metric.DATA: "data",
    Metric.OTHER: "in between",
    Metric.PEAK: "peak allocated",
    Metric.FREE: "least free",
    Metric.CORES: "CPU cores",
}
STYLES = {
    Metric.DATA: "phase-data",
    Metric.FORWARD: "phase-forward",
    Metric.BACKWARD: "phase-backward",
    Metric.STEP: "phase-step",
    Metric.OTHER: "phase-other",
}
_KINDS = {Metric.PEAK: Kind.BYTES, Metric.FREE: Kind.BYTES, Metric.CORES: Kind.CORES}
_MUCH = 0.1  # of an iteration, from which on a difference where ranks meet asks for attention
_IN = {
    Metric.DATA: "for its data",
    Metric.OTHER: "between the phases",
    Metric.FORWARD: "in forward",
    Metric.BACKWARD: "in backward",
    Metric.STEP: "in step",
}


def unit(metric: Metric, largest: float) -> tuple[str, float]:
    """(unit, how many of it are one of what is measured) for values up to ``largest``."""
    found = scale(_KINDS.get(metric, Kind.SECONDS), largest, 8)
    return ("" if metric is Metric.CORES else found.unit), found.factor


def figure(value: float, largest: float, width: int) -> str:
    """A value beside others up to ``largest``, all of them in its unit."""
    return fixed(value, 2 if largest < 9.995 else 1 if largest < 99.95 else 0, width)


def told(skew: Skew | None, rank: int | None, ranks: int) -> tuple[str, str, bool]:
    """(what to say about how ranks differ, the same in few words, whether it asks for attention).

    ``rank`` is the one that ``skew`` is about.
    """
    if ranks == 1:
        return "One rank: there is no other to compare it with.", "One rank.", False
    if skew is None:
        return "Ranks are compared once two of them have finished a step.", "Nothing to compare yet.", False
    steps = f"the last {skew.steps} steps" if skew.steps > 1 else "the one step there is"
    if skew.alike:
        most = max(0.0, skew.share) * 100
        off = f"in no phase of {steps} is one more than {_percent(most)} of an iteration off"
        return f"All {ranks} ranks are alike: {off}.", f"All {ranks} ranks are alike.", False
    others = "the other one" if ranks == 2 else "the others"
    each = "each of " if skew.steps > 1 else ""
    own, usual, late = seconds(skew.own_s), seconds(skew.usual_s), seconds(skew.late_s)
    what = f"Rank {rank} takes {own} {_IN[skew.metric]} in {each}{steps}, {others} {usual}"
    waits = "that one waits" if ranks == 2 else "they wait"
    end = f"; {waits} {late} for it" if skew.waited_for else ""
    share = f"{skew.share * 100:.0f} %"
    short = f"Rank {rank}: {own} {_IN[skew.metric]}, {others} {usual} ({share})."
    return f"{what}{end}: {share} of an iteration.", short, skew.waited_for or skew.share >= _MUCH


def _percent(value: float) -> str:
    return f"{value:.1f} %" if value < ALIKE * 100 else f"{value:.0f} %"
