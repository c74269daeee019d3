"""The report of a recording as one HTML page: the verdict first, then numbers, findings, charts, memory, configuration."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from datetime import datetime

import numpy as np

from zerotop.analysis.findings import Finding, name_relation
from zerotop.analysis.formatting import (
    format_bytes,
    format_count,
    format_long_time,
    format_percent,
    format_ranks,
    format_seconds,
)
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.reports.cost_text import OVERLAP, describe_share
from zerotop.analysis.reports.finding_costs import FindingCost, overlap
from zerotop.analysis.reports.measures import NOISE, Unit
from zerotop.analysis.reports.no_findings import describe_no_findings
from zerotop.analysis.reports.recording_report import RecordingReport
from zerotop.analysis.steps.job_pace import find_usual, measure_iteration, measure_token_rate, measure_whole_token_rate
from zerotop.report.charts import build_charts
from zerotop.report.elements import Element, element, table
from zerotop.report.ledger import build_memory
from zerotop.report.page import build_header, write_page

# Findings beyond these are folded away: those above cost more.
_SHOWN_FINDINGS = 6
_DEFAULT_OPEN_CONFIG = 60


def write_recording_page(report: RecordingReport) -> str:
    charts = build_charts(report)
    content = (
        _build_header(report),
        _build_figures(report),
        _build_findings(report),
        _build_charts(report, charts["charts"]),
        build_memory(report),
        _build_configuration(report),
        _build_footer(report),
    )
    return write_page(f"{report.name}: zerotop report", content, charts)


def _build_header(report: RecordingReport) -> Element:
    began = datetime.fromtimestamp(report.begin_ns / 1e9).astimezone()
    job = report.view.job
    setup = job.engine.describe_engine() if job.engine.has_begun else ""
    facts = f"{began:%d %B %Y, %H:%M %Z}".lstrip("0")
    return build_header("report", report.name, report.verdict, ". ".join(filter(None, (setup, facts))))


def _build_figures(report: RecordingReport) -> Element | None:
    figures = [
        element("div", element("dt", label), element("dd", value), element("dd", note, class_="muted"))
        for label, value, note in _iter_figures(report)
    ]
    return element("dl", figures, class_="figures") if figures else None


def _iter_figures(report: RecordingReport) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, note)."""
    view, rows, tokens = report.view, report.source.job_steps, report.source.job_tokens
    seconds = rows["iteration_s"]
    if not np.isnan(seconds).all():
        spread = np.percentile(seconds[find_usual(seconds, rows["skipped"])], [5, 95])
        note = f"median; 90 % take {format_seconds(spread[0])} to {format_seconds(spread[1])}"
        yield "Iteration", format_seconds(measure_iteration(rows)), note
        if not math.isnan(rate := measure_token_rate(rows, tokens)):
            whole = measure_whole_token_rate(rows, tokens)
            over_all = f"; {whole:,.0f} over all the time" if whole < (1 - NOISE) * rate else ""
            yield "Tokens per second", f"{rate:,.0f}", f"all ranks, mean of iterations{over_all}"
    yield from _iter_memory_figures(view)
    if not math.isnan(load := _measure_load(report)):
        yield "GPU utilization", format_percent(load), "mean while training"
    if report.price is not None:
        elapsed_s = view.progress.elapsed_s
        yield "Price", report.price.format_cost(elapsed_s), f"{format_long_time(elapsed_s)} at {report.price.text}"
    if not math.isnan(view.cost.probe_share):
        yield "Cost of recording", f"{view.cost.probe_share * 100:.2f} %", "of the time, at the end"


def _iter_memory_figures(view: LiveView) -> Iterator[tuple[str, str, str]]:
    gpus = [gpu for gpu in view.gpus if gpu.reserved_peak_bytes]
    if gpus:
        gpu = max(gpus, key=lambda gpu: gpu.reserved_peak_bytes or 0)
        share = f"{format_percent((gpu.reserved_peak_bytes or 0) / gpu.total_bytes)} of " if gpu.total_bytes else ""
        yield (
            "GPU memory peak",
            format_bytes(gpu.reserved_peak_bytes or 0),
            f"reserved, {share}{format_bytes(gpu.total_bytes)}",
        )
    peak = max((rank.rss_peak_bytes for rank in view.ranks), default=0)
    if peak:
        yield "Host memory peak", format_bytes(peak), "RSS of the largest rank"


def _measure_load(report: RecordingReport) -> float:
    """Return the mean utilization of the shown GPUs while steps ran, 0 to 1; NaN without GPUs."""
    rows = report.source.job_steps
    loads = []
    for timeline in report.timelines.values():
        if "utilization" in timeline.values and len(rows):
            times = (
                timeline.origin_ns + (timeline.window.first + np.arange(timeline.window.columns)) * timeline.window.column_ns
            )
            inside = (times >= rows["begin_unix_ns"][0]) & (times < rows["end_unix_ns"][-1])
            values = timeline.values["utilization"].mean[inside]
            loads += [float(np.nanmean(values))] if not np.isnan(values).all() else []
    return float(np.mean(loads)) if loads else math.nan


def _build_findings(report: RecordingReport) -> Element:
    cards = [_build_finding(number, cost, report) for number, cost in enumerate(report.findings, 1)]
    shown, others = cards[:_SHOWN_FINDINGS], cards[_SHOWN_FINDINGS:]
    more = element("details", element("summary", f"{format_count(len(others), 'more finding')}"), element("ol", others))
    text = (
        "Those that cost most come first. Their numbers mark them in the charts."
        if cards
        else describe_no_findings(report.source.job_steps, report.end_ns)
    )
    text += f" {OVERLAP}" if overlap(report.findings) else ""
    return element(
        "section",
        element("h2", "Findings"),
        element("p", text, class_="muted"),
        element("ol", shown) if shown else None,
        more if others else None,
        id="findings",
    )


def _build_finding(number: int, cost: FindingCost, report: RecordingReport) -> Element:
    finding = cost.finding
    where = [f"step {finding.step}" if finding.step is not None else "", format_ranks(cost.ranks) if cost.ranks else ""]
    after = format_long_time(max(0.0, (finding.begin_ns - report.begin_ns) / 1e9))
    price = []
    if cost.seconds is not None:
        share = "" if cost.share is None else describe_share(cost.share, cost.finding.name)
        of = ", ".join(filter(None, (cost.seconds_text.strip(), share)))
        price.append(element("p", element("b", f"{_format_cost(cost.seconds)}"), element("span", of)))
        if report.price is not None:
            price.append(element("p", element("b", report.price.format_cost(cost.seconds)), element("span", "of the price")))
    if cost.bytes is not None:
        kind = "host" if cost.on_host else "GPU"
        price.append(element("p", element("b", format_bytes(cost.bytes)), element("span", f"of {kind} memory")))
    return element(
        "li",
        element("div", str(number), class_="number"),
        element(
            "div",
            element("p", finding.headline, class_="headline"),
            _build_cause(cost.finding, cost.cause, report) if cost.cause is not None else None,
            element("p", finding.details) if finding.details else None,
            _build_advice(finding) if finding.advice or finding.fix else None,
            element(
                "p",
                " · ".join(filter(None, (finding.severity.value, *where, f"after {after}", finding.name))),
                class_="muted",
            ),
        ),
        element("div", price, class_="cost"),
        class_=f"finding {finding.severity.value}",
        id=f"finding-{number}",
    )


def _build_cause(effect: Finding, cause: Finding, report: RecordingReport) -> Element:
    """Return a sentence that names the explaining finding, with a link to it."""
    number = next(number for number, other in enumerate(report.findings, 1) if other.finding is cause)
    link = element("a", f"finding {number}", href=f"#finding-{number}")
    return element("p", f"{name_relation(effect, cause)} ", link, f": {cause.headline}.")


def _build_advice(finding: Finding) -> Element:
    """Return the advice and the text to copy; the script adds a button."""
    fix = element("code", finding.fix, class_="fix") if finding.fix else None
    return element(
        "div", element("p", element("b", "What to do: "), finding.advice) if finding.advice else None, fix, class_="advice"
    )


def _format_cost(seconds: float) -> str:
    return f"≈ {format_long_time(seconds) if seconds >= 10 else format_seconds(seconds)}"


def _build_charts(report: RecordingReport, charts: list[dict[str, object]]) -> Element | None:
    if not charts:
        return None
    ranks = [element("option", f"rank {rank}", value=str(rank)) for rank in report.timelines]
    choice = element("label", "Samples of ", element("select", ranks, id="rank"), class_="muted") if len(ranks) > 1 else None
    return element(
        "section",
        element("h2", "Over time"),
        element(
            "p",
            "Drag to zoom, double-click to see all, click a name to hide its line. The charts move together.",
            class_="muted screen-only",
        ),
        choice,
        element("noscript", element("p", "The charts need JavaScript; everything else on this page does not.")),
        (element("figure", id=f"chart-{chart['id']}", class_="chart") for chart in charts),
        id="charts",
    )


def _build_configuration(report: RecordingReport) -> Element:
    facts = [(measure.name, _format_fact(measure.values[0], measure.unit)) for measure in report.setup]
    hosts = [
        f"{host.name}: {format_count(host.cores, 'core')}, {format_bytes(host.memory_limit_bytes)}"
        for host in report.view.hosts
    ]
    facts += [("host", text) for text in hosts]
    sections = [
        ("Script options", report.options, True),
        ("Environment", report.environment, True),
        ("DeepSpeed's effective settings", report.config, len(report.config) <= _DEFAULT_OPEN_CONFIG),
    ]
    return element(
        "section",
        element("h2", "Configuration"),
        element("pre", shlex.join(report.source.recording.info.get("command") or report.view.job.command), class_="command"),
        _build_facts(dict(facts)),
        (_fold(title, values, is_open) for title, values, is_open in sections if values),
        id="configuration",
    )


def _format_fact(value: object, unit: Unit) -> str:
    return f"{value:,}" if unit is Unit.COUNT and isinstance(value, int) else str(value)


def _build_facts(facts: dict[str, str]) -> Element:
    rows = (element("tr", element("th", name, scope="row"), element("td", value)) for name, value in facts.items())
    return table((), rows, class_="facts")


def _fold(title: str, values: dict[str, str], is_open: bool) -> Element:
    attributes = {"open": ""} if is_open else {}
    return element("details", element("summary", f"{title} ({len(values)})"), _build_facts(values), **attributes)


def _build_footer(report: RecordingReport) -> Element:
    lost = report.view.cost.lost_records
    notices = [*report.notices, *([f"{format_count(lost, 'record')} could not be written."] if lost else [])]
    return element(
        "footer",
        (element("p", notice) for notice in notices),
        element(
            "p", "Costs in seconds are estimates from the evidence of each finding; sizes are exact. 1 GiB is 1024³ bytes."
        ),
    )
