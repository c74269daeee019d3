"""The data of the charts of a recording, as JSON values: the page's script and the PNG writer draw the same.

Every chart has time in seconds since the launch as its x. Long recordings are drawn in pieces: means, and the highest value
of each piece beside them, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.formatting import GIB
from zerotop.analysis.live_view import Floats
from zerotop.analysis.reports.recording_report import RecordingReport
from zerotop.analysis.timeline.timeline import Timeline
from zerotop.analysis.views.iterations import MAIN_PHASES
from zerotop.recording.samples import Rows
from zerotop_probe.recording.metrics import BYTES, SHARE
from zerotop_probe.recording.tables import METRICS

_MOST_PIECES = 1500
Chart = dict[str, Any]


# For each chart of samples: its title and its lines, each a name, a metric and a colour (a CSS variable). The area under the
# last line is filled.
_SAMPLE_CHARTS: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "gpu-memory": (
        "GPU memory",
        (
            ("device used (NVML)", "device", "memory-other"),
            ("reserved", "reserved", "memory-reserved"),
            ("allocated, highest", "peak", "memory-activations"),
            ("allocated", "allocated", "memory-allocated"),
        ),
    ),
    "gpu-load": ("GPU utilization", (("utilization", "utilization", "load"),)),
    "cores": (
        "CPU cores in use",
        (
            ("whole host", "host_cores", "load-others"),
            ("all ranks on it", "all_cores", "phase-transfer"),
            ("this rank", "cores", "load"),
        ),
    ),
    "host-memory": (
        "Host memory",
        (
            ("whole host", "host_memory", "memory-other"),
            ("all ranks on it", "all_rss", "memory-reserved"),
            ("this rank (RSS)", "rss", "memory-allocated"),
        ),
    ),
    "loss": ("Loss", (("loss", "loss", "primary"),)),
    "gradient-norm": ("Gradient norm", (("gradient norm", "grad_norm", "accent"),)),
    "learning-rate": ("Learning rate", (("learning rate", "learning_rate", "muted"),)),
}


def build_charts(report: RecordingReport) -> dict[str, Any]:
    """Return all charts of a recording that have data, and the marks of its findings."""
    charts = [*_iter_step_charts(report), *_iter_sample_charts(report)]
    return {"marks": _build_marks(report), "charts": charts, "end": _round_value((report.end_ns - report.begin_ns) / 1e9)}


def _build_marks(report: RecordingReport) -> list[dict[str, Any]]:
    return [
        {
            "x": _round_value((cost.finding.begin_ns - report.begin_ns) / 1e9),
            "number": number,
            "level": cost.finding.severity.value,
        }
        for number, cost in enumerate(report.findings, 1)
        if cost.finding.severity.value != "info"
    ]


def _iter_step_charts(report: RecordingReport) -> Iterator[Chart]:
    rows = report.source.job_steps
    if np.isnan(rows["iteration_s"]).all():
        return
    pieces = _Pieces(rows, report.begin_ns)
    seconds = pieces.mean(rows["iteration_s"])
    phases = {name: pieces.mean(rows[column]) for name, column in MAIN_PHASES.items()}
    phases["other"] = np.maximum(0.0, seconds - sum(phases.values()))
    if (is_unknown := np.isnan(phases["other"]) & ~np.isnan(seconds)).any():  # of counted steps
        phases["unknown"] = np.where(is_unknown, seconds, 0.0)
    factor, unit = (1e3, "ms") if np.nanmax(seconds) < 0.5 else (1.0, "s")
    labels = {"other": report.view.job.engine.outside_text}
    colours = {"unknown": "free"}
    series = [
        _build_series(labels.get(name, name), values * factor, colours.get(name, f"phase-{name}"))
        for name, values in phases.items()
    ]
    chart: Chart = {"id": "iterations", "title": "Time of each iteration", "unit": unit, "kind": "stack", "x": pieces.x}
    chart |= {"steps": pieces.steps, "series": series}
    if pieces.are_merged:
        longest = _build_series("longest", pieces.highest(rows["iteration_s"]) * factor, "error")
        chart["series"] = [*series, longest | {"line": True}]
    yield chart
    tokens = report.source.job_tokens
    if tokens.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = pieces.mean(np.where(tokens > 0, tokens, np.nan)) / seconds
        line = _build_series("tokens per second", rate, "primary") | {"fill": True}
        yield chart | {"id": "tokens", "title": "Tokens per second", "unit": "tokens/s", "kind": "line", "series": [line]}


class _Pieces:
    """Steps in at most ``_MOST_PIECES`` pieces, each drawn over its time."""

    def __init__(self, rows: Rows, begin_ns: int) -> None:
        count = min(len(rows), _MOST_PIECES)
        self._begins = np.linspace(0, len(rows), count, endpoint=False).astype(int)
        self.are_merged = count < len(rows)
        ends = np.append(self._begins[1:], len(rows)) - 1
        times = (np.append(rows["begin_unix_ns"][:1], rows["end_unix_ns"][ends]) - begin_ns) / 1e9
        self.x = _round_all(times)
        self.steps = [None, *rows["step"][ends].tolist()]

    def mean(self, values: NDArray[Any]) -> Floats:
        """Return the mean of the known values of each piece."""
        known = ~np.isnan(values)
        counts = np.add.reduceat(known.astype(np.float64), self._begins)
        sums = np.add.reduceat(np.where(known, values, 0.0), self._begins)
        means = np.full(len(counts), np.nan)
        np.divide(sums, counts, out=means, where=counts > 0)
        return means

    def highest(self, values: NDArray[Any]) -> Floats:
        """Return the highest known value of each piece."""
        highest: Floats = np.fmax.reduceat(values, self._begins)
        return highest


def _build_series(name: str, values: Floats, colour: str) -> dict[str, Any]:
    """Return a series of pieces; the first point is where the first piece begins, the others where pieces end."""
    rounded = _round_all(values)
    return {"name": name, "colour": colour, "values": [*rounded[:1], *rounded]}


def _iter_sample_charts(report: RecordingReport) -> Iterator[Chart]:
    for identifier, (title, lines) in _SAMPLE_CHARTS.items():
        by_rank = {str(rank): _build_lines(timeline, lines) for rank, timeline in report.timelines.items()}
        by_rank = {rank: series for rank, series in by_rank.items() if series}
        if by_rank:
            window = next(iter(report.timelines.values())).window
            spacing = {"x0": _round_value(window.first * window.column_ns / 1e9), "dx": window.column_ns / 1e9}
            limit, (unit, _) = _find_limit(report, identifier), _find_unit(lines[0][1])
            yield {"id": identifier, "title": title, "unit": unit, "kind": "line", "ranks": by_rank, **spacing, **limit}


def _build_lines(timeline: Timeline, lines: tuple[tuple[str, str, str], ...]) -> list[dict[str, Any]]:
    return [
        {"name": name, "colour": colour, "fill": name == lines[-1][0], "values": _round_all(_read_values(timeline, metric))}
        for name, metric, colour in lines
        if metric in timeline.values
    ]


def _find_unit(metric: str) -> tuple[str, float]:
    """Return the unit of a chart of a metric, and the factor to it."""
    unit = METRICS[metric].unit
    return {BYTES: ("GiB", 1 / GIB), SHARE: ("%", 100.0)}.get(unit, (unit, 1.0))


def _read_values(timeline: Timeline, metric: str) -> Floats:
    values = timeline.values[metric]
    return (values.highest if METRICS[metric].shows_highest else values.mean) * _find_unit(metric)[1]


def _find_limit(report: RecordingReport, identifier: str) -> dict[str, Any]:
    """Return the size of the device, the host or 100 %, where a chart has such a limit."""
    view = report.view
    limits: Mapping[str, Callable[[], float]] = {
        "gpu-memory": lambda: max((gpu.total_bytes for gpu in view.gpus), default=0) / GIB,
        "host-memory": lambda: max((host.memory_limit_bytes for host in view.hosts), default=0) / GIB,
        "cores": lambda: max((host.cores for host in view.hosts), default=0),
        "gpu-load": lambda: 100,
    }
    limit = limits.get(identifier, lambda: 0)()
    return {"limit": _round_value(limit)} if limit > 0 else {}


def _round_all(values: Floats) -> list[float | None]:
    """Return JSON values with four significant digits or more; None where unknown."""
    return [None if math.isnan(value) else _round_value(value) for value in values.tolist()]


def _round_value(value: float) -> float:
    """Round to a thousandth, or to four significant digits below one."""
    rounded = round(value, 3) if abs(value) >= 1 else float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded
