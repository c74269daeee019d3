"""Names, units and sentences of the ranks screen."""

from __future__ import annotations

from zerotop.analysis.formatting import format_count, format_percent, format_ranks
from zerotop.analysis.ranks.delays import Hang
from zerotop.analysis.ranks.matrix import RankMetric
from zerotop.analysis.ranks.nodes import Network
from zerotop.analysis.ranks.outliers import ALIKE_SHARE, WARNING_SHARE, Skew
from zerotop.ui.charts import choose_scale
from zerotop.ui.drawing.formatting import format_duration, format_fixed
from zerotop_probe.recording.metrics import SECONDS

ESTIMATE_MARK = "≈"
_PHASE_PHRASES = {
    RankMetric.DATA: "for its data",
    RankMetric.OTHER: "between the phases",
    RankMetric.APART: "saving or evaluating",
    RankMetric.FORWARD: "in forward",
    RankMetric.BACKWARD: "in backward",
    RankMetric.STEP: "in step",
}


def choose_unit(metric: RankMetric, largest: float) -> tuple[str, float]:
    """Return (unit, units per second, byte or core) for values up to ``largest``."""
    scale = choose_scale(metric.value.unit, largest, 8)
    return ("" if metric is RankMetric.CORES else scale.unit), scale.factor


def format_figure(value: float, largest: float, width: int) -> str:
    """Format a value with the decimals that suit values up to ``largest``, both in the same unit."""
    return format_fixed(value, 2 if largest < 9.995 else 1 if largest < 99.95 else 0, width)


def format_estimate(value: float, largest: float, width: int, *, is_estimate: bool) -> str:
    """Format a value as :func:`format_figure` does, with a mark if it is an estimate."""
    text = format_figure(value, largest, width)
    return f"{ESTIMATE_MARK}{text.strip()}".rjust(width) if is_estimate and text.startswith(" ") else text


def describe_skew(
    skew: Skew | None, rank: int | None, ranks: int, *, names_iteration: bool = False
) -> tuple[str, str, bool]:
    """Return (sentence on how ranks differ, a short version, whether it is a warning).

    ``rank`` is the rank that ``skew`` is about. ``names_iteration``: the short version says of which time a share is, beside
    figures of other iterations.
    """
    if ranks == 1:
        return "One rank, and no other one to compare it with: 3 shows where its time goes.", "One rank.", False
    if skew is None:
        return "Ranks are compared once two of them have finished a step.", "Nothing to compare.", False
    steps = f"the last {skew.steps} steps" if skew.steps > 1 else "the only step"
    if not skew.is_well_known:
        timed = skew.timed_steps if skew.fewest_timed is None else skew.fewest_timed
        text = f"of {steps} only {timed} of a rank {'was' if timed == 1 else 'were'} recorded with phases"
        return f"Too few steps to compare phases: {text}.", "Too few steps to compare phases.", False
    if not skew.is_clear:
        text = f"in {steps} phases vary more from step to step than between ranks"
        return f"No rank is clearly slower: {text}.", "No rank is clearly slower.", False
    if skew.is_alike:
        largest = max(skew.most_s, skew.lag_s, 0.0) / skew.iteration_s if skew.iteration_s > 0 else 0.0
        if largest >= ALIKE_SHARE:  # one takes less
            text = f"in {steps} no phase of a rank is longer than usual by {_format_small(ALIKE_SHARE)} of an iteration"
            return f"No rank is slower: {text}.", "No rank is slower.", False
        detail = f"in {steps} no phase differs by more than {_format_small(largest)} of an iteration"
        # Their memory and cores may differ.
        all_ranks = "Both ranks" if ranks == 2 else f"All {ranks} ranks"
        return f"{all_ranks} take the same time: {detail}.", f"{all_ranks} take the same time.", False
    others = "the other one" if ranks == 2 else "the others"
    own, usual = format_duration(skew.own_s), format_duration(skew.usual_s)
    share, phase = format_percent(skew.iteration_share), _PHASE_PHRASES[skew.metric]
    if skew.is_waited_for:
        delay_s, delay_share = (skew.told.late_s, skew.told.share) if skew.told else (skew.delay_s, skew.delay_share)
        what, share = f"Rank {rank} delays {others} by {format_duration(delay_s)}", format_percent(delay_share)
        steps = f" from step {skew.told.step} on" if skew.told else _name_steps(skew)
        takes = "averages" if skew.steps > 1 else "spends"
        text = f"{what} ({share} of an iteration){steps}: it {takes} {own} {phase}, {others} {usual}."
        on_average = "" if skew.is_in_each else " on average"
        if skew.told is None and skew.timed_steps < skew.steps:
            what = f"Rank {rank} delays {others} by {ESTIMATE_MARK}{format_duration(delay_s)}"
        of = f" of {format_duration(delay_s / delay_share)}" if names_iteration and delay_share > 0 else ""
        return text, f"{what}{on_average} ({share}{of}) {phase}.", skew.delays_others
    if skew.is_effect:
        most = _format_small(skew.longest_delay_s / skew.iteration_s)
        text = (
            f"No rank delays {others} by more than {most} of an iteration. Rank {rank} is {phase} for {own}, {others} for"
            f" {usual}: ranks wait for one another there."
        )
        return text, f"No rank delays {others}; rank {rank} is longest {phase}.", False
    text = f"Rank {rank} takes {own} {phase}{_name_steps(skew)}, {others} {usual}: {share} of an iteration."
    return (
        text,
        f"Rank {rank}: {own} {phase}, {others} {usual} ({share}).",
        skew.iteration_share >= WARNING_SHARE and skew.is_well_known,
    )


def describe_alike(metrics: list[RankMetric], least_s: float) -> str:
    """Name the metrics in which ranks are alike; times by how far they may be apart, a large part of a short phase."""
    times = ", ".join(metric.value.label for metric in metrics if metric.value.unit == SECONDS)
    values = ", ".join(metric.value.label for metric in metrics if metric.value.unit != SECONDS)
    parts = (
        f"less than {format_duration(least_s)} apart: {times}" if times else "",
        values and f"alike on all ranks: {values}",
    )
    return "; ".join(part for part in parts if part)


def _name_steps(skew: Skew) -> str:
    """Name the steps that the figures are of; some were only counted, and their phases are not known."""
    if skew.steps == 1:
        return " in the only step"
    if skew.timed_steps < skew.steps:
        since = f" since step {skew.since_step}" if skew.since_step is not None else ""
        which = f"the {skew.steps} steps{since}" if since else f"the last {skew.steps} steps"
        return f", estimated from {skew.timed_steps} of {which}"
    if skew.since_step is not None:
        return f" in each step since step {skew.since_step}"
    return f" in each of the last {skew.steps} steps" if skew.is_in_each else f" in the last {skew.steps} steps on average"


def describe_network(network: Network) -> str:
    """Return how many nodes send full detail, and how well the clocks of nodes agree; "" where neither is known."""
    parts = []
    if network.reduced:
        parts.append(f"{format_count(network.full, 'node')} full, {len(network.reduced):,} reduced")
    if network.clock_error_ns is not None:
        parts.append(f"clocks within {format_duration(network.clock_error_ns / 1e9)}")
    return "; ".join(parts)


def describe_hang(hang: Hang, ranks: int) -> str:
    """Return a sentence on whom the ranks of a job waited for, or wait for."""
    where = f"In step {hang.step} t" if hang.is_over and hang.step is not None else "T"
    if ranks == 1 or not hang.ranks:
        return f"{where}raining {'stood' if hang.is_over else 'stands'} still."
    who, verb = ("he other rank", "waits") if ranks == 2 else ("he others", "wait")
    return f"{where}{who} {'waited' if hang.is_over else verb} for {format_ranks(hang.ranks)}."


def _format_small(share: float) -> str:
    return format_percent(share, 1 if share < ALIKE_SHARE else 0)
