"""Reports of recordings as files: a page, or one chart as a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.recording_report import read_recording_report
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.model_config import find_shape
from zerotop.recording.atomic_write import write_atomically
from zerotop.recording.reader import Recording
from zerotop.recording.sweeps import read_sweep
from zerotop.report.charts import Chart, build_charts
from zerotop.report.recording_page import write_recording_page
from zerotop.report.sweep_page import build_sweep_charts, write_sweep_page


def build_page(recording: Recording, price: HourlyPrice | None = None) -> bytes:
    """Return the report of a recording as an HTML page."""
    return write_recording_page(read_recording_report(recording, price)).encode()


def build_sweep_page(path: Path, price: HourlyPrice | None = None) -> bytes:
    """Return the report of a sweep as an HTML page. ``price``: [the plan's]. Raises RecordingError."""
    sweep = read_sweep(path)
    if price is not None:
        sweep = replace(sweep, plan=replace(sweep.plan, price_per_hour=price.amount, currency=(price.before, price.after)))
    return write_sweep_page(sweep, find_shape(sweep.plan.model)).encode()


def draw_chart(recording: Recording, name: str | None) -> bytes:
    """Return a chart of a recording as PNG; None: its first one. Raises Problem for an unknown chart."""
    drawn = build_charts(read_recording_report(recording))
    if not drawn["charts"]:
        raise Problem(f"{recording.name} has nothing to draw: no step and no sample was recorded")
    return _draw_named(recording.name, drawn["charts"], name, drawn["marks"])


def draw_sweep_chart(path: Path, name: str | None) -> bytes:
    """Return a chart of a sweep as PNG; None: its first one. Raises Problem for an unknown chart."""
    sweep = read_sweep(path)
    charts = build_sweep_charts(sweep)
    if not charts:
        raise Problem(f"{sweep.name} has nothing to draw: no point was measured")
    return _draw_named(sweep.name, charts, name, [])


def _draw_named(title: str, charts: Sequence[Chart], name: str | None, marks: list[dict[str, Any]]) -> bytes:
    from zerotop.report.png import draw_png

    by_name = {chart["id"]: chart for chart in charts}
    if name is not None and name not in by_name:
        raise Problem(f"{title} has no chart {name!r}. Choose one of: {', '.join(by_name)}", USAGE)
    try:
        return draw_png(by_name[name or next(iter(by_name))], title, marks)
    except ImportError:
        raise Problem("PNG needs matplotlib: pip install 'zerotop[png]', or write the HTML page instead") from None


def write_report(path: Path, content: bytes) -> None:
    """Write a report and say so on standard error. Raises OSError."""
    with write_atomically(path) as partial, partial.open("xb") as stream:
        stream.write(content)
    print(escape_unprintable(f"{path}: {len(content) / 1024:,.0f} KiB"), file=sys.stderr)
