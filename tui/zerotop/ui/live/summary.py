"""The summary of a job that has ended: the costliest findings, speed, peaks, and the cost of watching."""

from __future__ import annotations

from enum import Enum

from zerotop.analysis.findings import Severity
from zerotop.analysis.formatting import format_count, format_percent
from zerotop.analysis.live_view import JobState, LiveView
from zerotop.analysis.reports.cost_text import SHARE_OF, describe_cost, describe_share
from zerotop.analysis.reports.end_summary import EndSummary
from zerotop.analysis.reports.finding_costs import FindingCost, overlap
from zerotop.analysis.reports.verdict import describe_memory
from zerotop.analysis.views.watching_cost import describe_share as describe_watching_share
from zerotop.ui.base.findings import choose_style, describe_finding, wrap_sentence
from zerotop.ui.drawing.formatting import is_known
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, align_ends, fit_height, fit_row, row_width
from zerotop.ui.drawing.table import draw_rule, panel_title
from zerotop.ui.drawing.text import fit_text, sanitize
from zerotop.ui.drawing.units import get_units

MOST_ROWS = 9  # title, three findings, speed, the last runs, memory, watching, price
_OVERLAP = "shares may overlap"
_NO_FINDINGS = "No finding has a cost in time or memory."


class _Form(Enum):
    """The level of detail at which the cost of a finding in time is described."""

    WHOLE = "about 5.40 s, 23 % of the training time"
    SHARE = "23 % of the training time"
    PERCENT = "23 %"  # the title says of what


def draw_summary(
    summary: EndSummary, view: LiveView, width: int, height: int, glyphs: Glyphs, *, focused: bool = False
) -> list[Row]:
    """Draw a row for each finding with its cost, then a sentence a row."""
    notes = [SHARE_OF] * (_choose_form(summary, view, width) is _Form.PERCENT) + [_OVERLAP] * overlap(summary.findings)
    heading = f" {', '.join(notes)}" if notes else ""
    title = panel_title("Summary", focused)
    rows: list[Row] = [(*draw_rule(title, width - len(heading), glyphs), (heading, "heading"))]
    rows += _draw_lines(summary, view, width, height - 1, glyphs)
    return fit_height([fit_row(row, width, glyphs) for row in rows], width, height, glyphs)


def count_summary_rows(summary: EndSummary, view: LiveView, width: int, glyphs: Glyphs) -> int:
    """Return the rows that a summary needs, at most ``MOST_ROWS``."""
    most = MOST_ROWS - (not summary.past)
    return 1 + len(_draw_lines(summary, view, width, most - 1, glyphs))


def _draw_lines(summary: EndSummary, view: LiveView, width: int, most_rows: int, glyphs: Glyphs) -> list[Row]:
    """Draw at most ``most_rows`` rows, if the findings are not more."""
    form = _choose_form(summary, view, width)
    rows = [_draw_finding(cost, form, view, width, glyphs) for cost in summary.findings]
    if not summary.findings and not view.job.exit_code and view.job.state is not JobState.LOST:
        rows.append(((f"  {_NO_FINDINGS}", "good"),))
    sentences = (
        summary.pace,
        summary.past,
        *describe_memory(view, get_units().sizes[:3]),
        _describe_watching(view),
        view.cost_sentence,
    )
    said = [sentence for sentence in sentences if sentence]
    for number, sentence in enumerate(said):
        most = max(1, most_rows - len(rows) - (len(said) - number - 1))
        rows += [((f"  {line}", "text"),) for line in wrap_sentence(sentence, max(1, width - 2), most, glyphs)]
    return rows


def _choose_form(summary: EndSummary, view: LiveView, width: int) -> _Form:
    """Return the longest form of costs in time that fits beside every finding, so that all have the same."""
    for form in (_Form.WHOLE, _Form.SHARE):
        rights = [_write_cost(cost, form, view) for cost in summary.findings if cost.seconds is not None]
        lefts = [describe_finding(cost.finding) for cost in summary.findings if cost.seconds is not None]
        if all(len(left) + len(right) + 5 <= width for left, right in zip(lefts, rights, strict=True)):
            return form
    return _Form.PERCENT


def _write_cost(cost: FindingCost, form: _Form, view: LiveView) -> str:
    if form is _Form.WHOLE or cost.share is None:
        return describe_cost(cost, view, get_units().sizes[:3])
    return describe_share(cost.share, cost.finding.name) if form is _Form.SHARE else format_percent(cost.share)


def _draw_finding(cost: FindingCost, form: _Form, view: LiveView, width: int, glyphs: Glyphs) -> Row:
    finding = cost.finding
    mark, style = (glyphs.bullet if finding.severity is Severity.INFO else "!"), choose_style(finding)
    price = _write_cost(cost, form, view)
    right: Row = ((f" {sanitize(price, glyphs)}", "value"),) if price else ()
    if row_width(right) > width // 2:
        right = ()
    text = fit_text(sanitize(describe_finding(finding), glyphs), max(1, width - row_width(right) - 3), glyphs)
    return align_ends(((f"{mark} ", style), (text, style)), right, width, glyphs)


def _describe_watching(view: LiveView) -> str:
    cost = view.cost
    if not is_known(cost.probe_share):
        return ""
    once = f", and {cost.one_time_s:.1f} s once" if is_known(cost.one_time_s) and cost.one_time_s >= 0.05 else ""
    lost = f"; {format_count(cost.lost_records, 'record')} lost" if cost.lost_records else ""
    return f"Watching cost {describe_watching_share(cost.probe_share)}{once}{lost}."
