"""``zerotop findings``: a recording's findings and fixes, as a list or as JSON."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Sequence

from zerotop.analysis.findings import Finding, LinkedFinding, name_relation, order_by_cause
from zerotop.analysis.reports.cost_text import OVERLAP, describe_cost
from zerotop.analysis.reports.finding_costs import overlap, rank_findings
from zerotop.analysis.reports.finding_json import list_findings_json
from zerotop.analysis.reports.no_findings import describe_no_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.open_recording import open_named
from zerotop.ui.drawing.formatting import format_clock

_WIDTH = 100
_INDENT = " " * 4
_PLACE = re.compile(r"\S+\.py:\d+( .*)?")  # train.py:47, or train.py:47 in collate (calls int)


def findings(options: argparse.Namespace) -> int:
    """Print the findings. Return 0."""
    with open_named(options.recording) as recording:
        run = RecordedRun(recording, memory=False)
        if options.json:
            print(json.dumps(list_findings_json(run), indent=1, allow_nan=False))
        elif run.findings:
            steps = run.source.job_steps
            costs = {id(cost.finding): cost for cost in rank_findings(run.findings, steps, run.source.end_ns)}
            if options.fix:
                print(_format_fixes([cost.finding for cost in costs.values()]))
                return 0
            for linked in order_by_cause(run.findings):
                cost = costs.get(id(linked.finding))
                text = describe_cost(cost, run.view) if cost is not None else ""
                print(_format_finding(linked, recording.begin_ns, text))
            if overlap(costs.values()):
                print(OVERLAP)
        else:
            print(describe_no_findings(run.source.job_steps, run.source.end_ns))
    return 0


def _format_fixes(findings: Sequence[Finding]) -> str:
    """Return what can be pasted, each under the headline of its finding as a comment, as is a line to look at."""
    fixes: dict[str, str] = {}
    for finding in findings:
        if finding.fix:
            fixes.setdefault(escape_unprintable(finding.fix), escape_unprintable(finding.headline))
    blocks = (f"# {headline}\n{'# See ' if _PLACE.fullmatch(fix) else ''}{fix}" for fix, headline in fixes.items())
    return "\n".join(blocks) or "No finding in this recording has a fix to paste."


def _format_finding(linked: LinkedFinding, begin_ns: int, cost: str) -> str:
    """Return the finding's lines, indented below its cause."""
    finding, cause, depth = linked
    margin = _INDENT * depth
    detected = f"detected at {format_clock((finding.detected_ns - begin_ns) / 1e9)}"
    when = f"step {finding.step} ({detected})" if finding.step is not None else detected
    head = f"{when}  {finding.name}  ({finding.severity.value})"
    texts = [
        finding.headline,
        cause and f"{name_relation(finding, cause)}: {cause.headline}.",
        finding.details,
        cost and f"Cost: {cost}.",
        finding.advice and f"-> {finding.advice}",
    ]
    indent = margin + _INDENT
    wrapped = (
        textwrap.fill(escape_unprintable(text), _WIDTH, initial_indent=indent, subsequent_indent=indent)
        for text in texts
        if text
    )
    fix = [f"{indent}   {escape_unprintable(finding.fix)}"] if finding.fix else []
    return "\n".join([margin + head, *wrapped, *fix])
