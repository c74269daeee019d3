"""The verdict on a sweep: how many points ran, the fastest and the smallest of them, and the line through memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from zerotop.analysis.formatting import format_bytes, format_count, format_long_time
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.verdict import Outcome, Verdict
from zerotop.analysis.sweeps.line_report import LineReport, describe_line
from zerotop.analysis.sweeps.series import SweepSeries, build_series, choose_axis
from zerotop.analysis.sweeps.settings import MICRO_BATCH, SEQ_LENGTH, describe_settings
from zerotop.recording.sweeps import CRASHED, HUNG, OK, OUT_OF_MEMORY, SKIPPED, Point, Result, Sweep

# For one point, and for several.
_WORDS = {
    OUT_OF_MEMORY: ("ran out of memory", "ran out of memory"),
    HUNG: ("hung", "hung"),
    CRASHED: ("crashed", "crashed"),
    SKIPPED: ("was left out", "were left out"),
}
# Fitted lines in the verdict; the others are described below the charts only.
_MOST_LINES = 1
# The most series for which the verdict names the values that fit.
_MOST_SERIES = 4


def build_sweep_verdict(sweep: Sweep, lines: Sequence[LineReport]) -> Verdict:
    """Judge a sweep that may not have finished, or not begun."""
    counts = Counter(point.result.outcome for point in sweep.points if point.result is not None)
    waiting = len(sweep.points) - len(sweep.finished)
    sentences = [
        *_describe_largest(sweep),
        *_describe_best(sweep),
        *(" ".join(describe_line(line)) for line in lines[:_MOST_LINES]),
    ]
    if cost := describe_sweep_cost(sweep):
        sentences.append(cost)
    outcome = Outcome.OPEN if waiting else Outcome.WARNING if counts[HUNG] or counts[CRASHED] else Outcome.GOOD
    return Verdict(outcome, _describe_points(sweep, counts, waiting), tuple(sentences))


def describe_answer(sweep: Sweep) -> str:
    """Return the answer in one sentence: the largest value that fits, else the fastest point; "" without either."""
    axis, fits = choose_axis(sweep.plan), []
    for series in build_series(sweep, axis)[:_MOST_SERIES] if axis in (SEQ_LENGTH, MICRO_BATCH) else ():
        largest, failing = _find_largest(series, axis)
        if failing is not None:
            label = f" ({series.label})" if series.label else ""
            fits.append(f"{'none' if largest is None else f'{largest:,}'}{label}")
    if fits:
        return f"Largest {axis.replace('_', '-')} that fits: {', '.join(fits)}."
    fastest = find_fastest(sweep)
    if fastest is None:
        return ""
    return f"Fastest: {describe_settings(sweep.plan, fastest[0].settings)}, {_describe_rate(*fastest)}."


def _describe_rate(point: Point, tokens_per_s: float) -> str:
    """Return the tokens per second, and those of its slowest and fastest iteration where known."""
    text, result = f"{tokens_per_s:,.0f} tokens per second", point.result
    if result is None or not result.iterations_per_s or result.slowest_per_s is None or result.fastest_per_s is None:
        return text
    tokens = tokens_per_s / result.iterations_per_s
    return f"{text} ({result.slowest_per_s * tokens:,.0f} to {result.fastest_per_s * tokens:,.0f} in single iterations)"


def _find_largest(series: SweepSeries, axis: str) -> tuple[int | None, int | None]:
    """Return the largest value that fits, and the smallest that does not."""
    failing = min((int(point.settings[axis]) for point in series.out_of_memory), default=None)
    values = [int(point.settings[axis]) for point in series.points]
    return max((value for value in values if failing is None or value < failing), default=None), failing


def find_fastest(sweep: Sweep) -> tuple[Point, float] | None:
    """Return the point with the most tokens per second, and those."""
    return _find_best(_list_measured(sweep), lambda result: result.tokens_per_s)


def _list_measured(sweep: Sweep) -> list[tuple[Point, Result]]:
    return [(point, point.result) for point in sweep.points if point.result is not None and point.result.outcome == OK]


def _describe_points(sweep: Sweep, counts: Counter[str], waiting: int) -> str:
    total = format_count(len(sweep.points), "point")
    if not sweep.finished:
        return f"None of {total} has run yet."
    others = [f"{counts[name]} {words[counts[name] > 1]}" for name, words in _WORDS.items() if counts[name]]
    others += [f"{waiting} {'has' if waiting == 1 else 'have'} not run yet"] if waiting else []
    return "; ".join((f"{counts[OK]} of {total} trained", *others)) + "."


def _describe_largest(sweep: Sweep) -> Iterator[str]:
    """Yield where memory ends: for each series the largest value that fits, and the smallest that does not."""
    axis = choose_axis(sweep.plan)
    if axis not in (SEQ_LENGTH, MICRO_BATCH):
        return
    for series in build_series(sweep, axis)[:_MOST_SERIES]:
        fitting, failing = _find_largest(series, axis)
        if failing is None:
            continue
        name, head = axis.replace("_", "-"), f"{series.label}: " if series.label else ""
        fits = f"{fitting:,} fits and " if fitting is not None else ""
        yield f"{head}{name} {fits}{failing:,} does not{'' if fits else ' fit'}."


def _describe_best(sweep: Sweep) -> Iterator[str]:
    measured, fastest = _list_measured(sweep), find_fastest(sweep)
    if fastest is not None:
        yield f"The fastest is {describe_settings(sweep.plan, fastest[0].settings)}: {_describe_rate(*fastest)}."
    smallest = _find_best(measured, lambda result: -size if (size := result.reserved_peak_bytes) else None)
    if smallest is not None:
        settings, size = describe_settings(sweep.plan, smallest[0].settings), format_bytes(-smallest[1])
        yield f"The smallest is {settings}: {size} of GPU memory reserved at its peak."


def _find_best(
    measured: Sequence[tuple[Point, Result]], read: Callable[[Result], float | None]
) -> tuple[Point, float] | None:
    values = [(point, value) for point, result in measured if (value := read(result)) is not None]
    return max(values, key=lambda pair: pair[1], default=None)


def read_sweep_price(sweep: Sweep) -> HourlyPrice | None:
    """Return the price of the plan; None without one."""
    plan = sweep.plan
    return None if plan.price_per_hour is None else HourlyPrice(plan.price_per_hour, *plan.currency)


def describe_sweep_cost(sweep: Sweep) -> str:
    """Return a sentence about time and cost of all finished points; "" without a price."""
    price = read_sweep_price(sweep)
    if price is None or not sweep.finished:
        return ""
    seconds = sum(point.result.machine_seconds for point in sweep.points if point.result is not None)
    return f"The points took {format_long_time(seconds)} and cost {price.format_cost(seconds)} at {price.text}."
