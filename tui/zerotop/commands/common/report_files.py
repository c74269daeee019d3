"""Reports of recordings as files: a page, or one chart as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.session_report import read_session_report
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.report.charts import build_charts
from zerotop.report.session_page import write_session_page
from zerotop.session.atomic_write import write_atomically
from zerotop.session.reader import Session


def build_page(session: Session, price: HourlyPrice | None = None) -> bytes:
    """Return the report of a recording as an HTML page."""
    return write_session_page(read_session_report(session, price)).encode()


def draw_chart(session: Session, name: str | None) -> bytes:
    """Return a chart of a recording as PNG; None: its first one. Raises Problem for a chart that it does not have."""
    from zerotop.report.png import draw_png

    drawn = build_charts(read_session_report(session))
    charts = {chart["id"]: chart for chart in drawn["charts"]}
    if not charts:
        raise Problem(f"{session.name} has nothing to draw: no step and no sample was recorded")
    if name is not None and name not in charts:
        raise Problem(f"{session.name} has no chart {name!r}. Choose one of: {', '.join(charts)}", USAGE)
    try:
        return draw_png(charts[name or next(iter(charts))], session.name, drawn["marks"])
    except ImportError:
        raise Problem("PNG needs matplotlib: pip install 'zerotop[png]', or write the HTML page instead") from None


def write_report(path: Path, content: bytes) -> None:
    """Write a report and say so on standard error. Raises OSError."""
    with write_atomically(path) as partial, partial.open("xb") as stream:
        stream.write(content)
    print(escape_unprintable(f"{path}: {len(content) / 1024:,.0f} KiB"), file=sys.stderr)
