"""A sweep without a screen: a line for each attempt and result, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from zerotop.analysis.formatting import format_bytes, format_count
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.text_tables import align_columns
from zerotop.recording.sweeps import CRASHED, HUNG, OK, OUT_OF_MEMORY, SKIPPED, Point, Result, Sweep

OUTCOME_TEXTS = {OK: "ok", OUT_OF_MEMORY: "out of memory", HUNG: "hung", CRASHED: "crashed", SKIPPED: "skipped"}

_HEADINGS = ("allocated", "reserved", "NVML", "host", "cores in step", "it/s", "tokens/s", "seconds", "outcome")


def describe_result(result: Result) -> str:
    """Return a result in one line."""
    if result.outcome != OK:
        return f"{OUTCOME_TEXTS[result.outcome]}. {result.reason}".strip()
    sizes = (("allocated", result.allocated_peak_bytes), ("reserved", result.reserved_peak_bytes))
    parts = [f"{format_bytes(size)} {name}" for name, size in sizes if size is not None]
    if not parts and result.host_peak_bytes is not None:
        parts = [f"{format_bytes(result.host_peak_bytes)} host"]
    rates = ((result.iterations_per_s, "it/s"), (result.tokens_per_s, "tokens/s"))
    parts += [f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}" for value, unit in rates if value]
    parts += [f"{result.seconds:.0f} s"] if result.seconds is not None else []
    parts += [f"attempt {result.attempts}"] if result.attempts > 1 else []
    return f"{', '.join(parts)}. {result.reason}".removesuffix(". ")


def format_table(sweep: Sweep) -> list[str]:
    """Return the finished points as aligned lines, with the reasons of those without a measurement below."""
    names = list(sweep.plan.settings)
    rows: list[Sequence[str]] = [("point", *(name.replace("_", "-") for name in names), *_HEADINGS)]
    rows += [_format_row(point, point.result, names) for point in sweep.points if point.result is not None]
    lines = align_columns(rows, ">" * (len(rows[0]) - 1) + "<")
    failed = [(point, point.result) for point in sweep.points if point.result is not None and point.result.reason]
    if failed:
        lines.append("")
    return [*lines, *(f"  point {point.number}: {result.reason}" for point, result in failed)]


def _format_row(point: Point, result: Result, names: Sequence[str]) -> tuple[str, ...]:
    sizes = (result.allocated_peak_bytes, result.reserved_peak_bytes, result.nvml_peak_bytes, result.host_peak_bytes)
    numbers = (
        (result.step_cores, ".1f"),
        (result.iterations_per_s, ".3f"),
        (result.tokens_per_s, ",.0f"),
        (result.seconds, ".0f"),
    )
    return (
        str(point.number),
        *(str(point.settings.get(name, "")) for name in names),
        *(format_bytes(size) if size is not None else "-" for size in sizes),
        *(format(value, style) if value is not None else "-" for value, style in numbers),
        OUTCOME_TEXTS[result.outcome],
    )


def describe_cost(sweep: Sweep) -> str:
    """Return the time of all jobs and its price: `` in 12:34, $6.28``; "" without a price."""
    plan = sweep.plan
    if plan.price_per_hour is None:
        return ""
    seconds = sum(point.result.machine_seconds for point in sweep.finished if point.result is not None)
    minutes, second = divmod(round(seconds), 60)
    return f" in {minutes}:{second:02}, {HourlyPrice(plan.price_per_hour, *plan.currency).format_cost(seconds)}"


def describe_end(sweep: Sweep, problem: str) -> str:
    """Return a sentence about the sweep's progress, and how to continue it."""
    total, done = len(sweep.points), len(sweep.finished)
    if done == total:
        failed = sum(point.result is not None and point.result.outcome == CRASHED for point in sweep.points)
        crashes = f"; {failed} crashed" if failed else ""
        return f"{format_count(total, 'point')} done{describe_cost(sweep)}{crashes}. Results: {sweep.path}/results.csv"
    resume = f"zerotop sweep --resume {sweep.path}"
    return f"{problem} {done} of {total} points are done{describe_cost(sweep)}. Continue with: {resume}".strip()
