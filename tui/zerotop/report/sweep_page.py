"""The report of a sweep as one HTML page: the verdict first, then charts, the lines through memory, all points, the plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from zerotop.analysis.formatting import GIB, format_count, pluralize
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.reports.sweep_verdict import build_sweep_verdict
from zerotop.analysis.reports.verdict import Verdict
from zerotop.analysis.sweeps.line_report import LineReport, describe_line, report_lines
from zerotop.analysis.sweeps.series import HOST, SweepSeries, build_series, choose_axis, list_charts, read_measurement
from zerotop.analysis.sweeps.settings import format_values
from zerotop.recording.sweeps import Point, Sweep, Value
from zerotop.report.charts import Chart
from zerotop.report.elements import Element, element, table
from zerotop.report.page import build_header, write_page
from zerotop.ui.sweep.charts import TITLES
from zerotop.ui.sweep.model import SERIES_STYLES
from zerotop.ui.sweep.table import OUTCOME_STYLES

_BYTES = ("allocated_peak_bytes", "reserved_peak_bytes", "nvml_peak_bytes", HOST)
_COLUMNS = {
    "allocated_peak_bytes": "allocated, GiB",
    "reserved_peak_bytes": "reserved, GiB",
    "nvml_peak_bytes": "NVML, GiB",
    HOST: "host, GiB",
    "step_cores": "cores in step()",
    "iterations_per_s": "iterations/s",
    "tokens_per_s": "tokens/s",
    "seconds": "took, s",
}
_OUTCOME_COLOURS = {"good": "success", "alert": "error", "warn": "warning", "muted": "muted"}


def write_sweep_page(sweep: Sweep, shape: ModelShape | None = None) -> str:
    """Return the page. ``shape``: of the model; None where it is not known."""
    lines, charts = report_lines(sweep, shape), build_sweep_charts(sweep)
    content = (
        _build_header(sweep, build_sweep_verdict(sweep, lines)),
        _build_charts(charts),
        _build_lines(lines),
        _build_points(sweep),
        _build_plan(sweep),
        element(
            "footer", element("p", "Peaks are of the fullest GPU or node over all measured steps. 1 GiB is 1024³ bytes.")
        ),
    )
    return write_page(f"{sweep.name}: zerotop report", content, {"marks": [], "charts": charts} if charts else None)


def _build_header(sweep: Sweep, verdict: Verdict) -> Element:
    plan = sweep.plan
    setup = [plan.model, f"{format_count(plan.steps, 'step')} of each point, {plan.warmup} of them not measured"]
    return build_header("report of a sweep", sweep.name, verdict, "; ".join(filter(None, setup)))


def build_sweep_charts(sweep: Sweep) -> list[Chart]:
    """Return the charts that have points: each measurement over the setting of the axis, as report.js draws them."""
    axis = choose_axis(sweep.plan)
    if not axis:
        return []
    series = build_series(sweep, axis)
    tried = {point.settings[axis] for point in sweep.points}  # a search tries few of its values
    values = [value for value in sweep.plan.settings[axis] if value in tried]
    is_numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    ordered: Sequence[Value] = sorted(values, key=float) if is_numeric else values
    charts = []
    for measurement in list_charts(sweep):
        factor, unit = (1 / GIB, "GiB") if measurement in _BYTES else (1.0, "")
        drawn = [
            _build_series(one, axis, ordered, measurement, factor, SERIES_STYLES[number % len(SERIES_STYLES)])
            for number, one in enumerate(series)
        ]
        if any(value is not None for one in drawn for value in one["values"]):
            charts.append(
                {
                    "id": measurement.replace("_", "-"),
                    "title": TITLES[measurement],
                    "unit": unit,
                    "kind": "points",
                    "axis": axis.replace("_", "-"),
                    "x": list(ordered) if is_numeric else list(range(len(ordered))),
                    "labels": None if is_numeric else [str(value) for value in ordered],
                    "series": drawn,
                }
            )
    return charts


def _build_series(
    series: SweepSeries, axis: str, ordered: Sequence[Value], measurement: str, factor: float, colour: str
) -> dict[str, Any]:
    numbers = read_measurement(series, measurement)
    known = {point.settings[axis]: value for point, value in zip(series.points, numbers.tolist(), strict=True)}
    values = [known.get(value, math.nan) * factor for value in ordered]
    rounded = [None if math.isnan(value) else float(f"{value:.6g}") for value in values]
    is_numeric = all(isinstance(value, (int, float)) for value in ordered)
    failed = [point.settings[axis] for point in series.out_of_memory]
    places = failed if is_numeric else [list(ordered).index(value) for value in failed]
    return {"name": series.label or TITLES[measurement], "colour": colour, "values": rounded, "failed": places}


def _build_charts(charts: Sequence[Chart]) -> Element | None:
    if not charts:
        return None
    hint = "Click a name to hide its line. The charts move together. A cross at the upper edge: out of memory."
    return element(
        "section",
        element("h2", "Charts"),
        element("p", hint, class_="muted screen-only"),
        element("noscript", element("p", "The charts need JavaScript; everything else on this page does not.")),
        (element("figure", id=f"chart-{chart['id']}", class_="chart") for chart in charts),
        id="charts",
    )


def _build_lines(lines: Sequence[LineReport]) -> Element | None:
    if not lines:
        return None
    items = (element("p", " ".join(describe_line(line))) for line in lines)
    return element("section", element("h2", "The line through memory"), items, id="lines")


def _build_points(sweep: Sweep) -> Element:
    shown = [name for name in _COLUMNS if any(getattr(point.result, name, None) is not None for point in sweep.points)]
    names = sweep.plan.varied or list(sweep.plan.settings)  # others are in the plan
    numbers = (element("th", _COLUMNS[name], scope="col", class_="number") for name in shown)
    head: list[Element | str] = ["", *(name.replace("_", "-") for name in names), "outcome", *numbers]
    rows = (element("tr", _iter_cells(point, names, shown)) for point in sweep.points)
    return element(
        "section",
        element("h2", "All points"),
        table(head, rows, class_="points"),
        (element("p", text, class_="muted") for text in _iter_reasons(sweep)),
        id="points",
    )


def _iter_reasons(sweep: Sweep) -> Iterator[str]:
    """Yield why points failed or were left out, with the numbers of the points."""
    by_reason: dict[str, list[int]] = {}
    for point in sweep.points:
        if point.result is not None and point.result.reason:
            by_reason.setdefault(point.result.reason, []).append(point.number)
    for reason, numbers in by_reason.items():
        yield f"{pluralize(len(numbers), 'Point')} {', '.join(map(str, numbers))}: {reason}"


def _iter_cells(point: Point, names: Sequence[str], shown: Sequence[str]) -> Iterator[Element]:
    yield element("td", str(point.number), class_="muted")
    for name in names:
        yield element("th", str(point.settings.get(name, "")), scope="row")
    result = point.result
    word, style = OUTCOME_STYLES.get(result.outcome, (result.outcome, "muted")) if result else ("not run yet", "muted")
    colour = f"color:var(--{_OUTCOME_COLOURS[style]})"
    yield element("td", element("b", word, style=colour))
    for name in shown:
        yield element("td", _format_number(name, getattr(result, name, None)), class_="number")


def _format_number(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name in _BYTES:
        return f"{value / GIB:.2f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _build_plan(sweep: Sweep) -> Element:
    plan = sweep.plan
    facts = {name.replace("_", "-"): format_values(values) for name, values in plan.settings.items()}
    facts |= {"data type": plan.dtype, "folder": str(sweep.path)}
    rows = (element("tr", element("th", name, scope="row"), element("td", value)) for name, value in facts.items())
    command = element("pre", shlex.join(plan.command), class_="command") if plan.command else None
    return element("section", element("h2", "Plan"), command, table((), rows, class_="facts"), id="configuration")
