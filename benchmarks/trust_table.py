"""Prints the findings of each recording in a folder, and writes them into a table of judged jobs.

    python benchmarks/trust_table.py FOLDER [--prefix PREFIX] [--table docs/trust.md --without KIND ...]

For each recording: severity, step, headline, details and cost of each finding, in the order of ``zerotop findings``; a line
of code is named in the headline or the details. With ``--table`` the last cell of each row whose first cell names a
recording (without the prefix) is replaced, and no other text; ``--without`` leaves kinds of findings out of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from zerotop.analysis.findings import Finding, Severity, order_by_cause
from zerotop.analysis.reports.cost_text import describe_cost
from zerotop.analysis.reports.finding_costs import rank_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.recording.packed.packing import SUFFIX
from zerotop.recording.reader import Recording


def main() -> None:
    """Print the findings of all recordings; update the table if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of recordings, packed or not")
    parser.add_argument("--prefix", default="", help="only recordings whose name begins so; tables leave it out")
    parser.add_argument("--table", type=Path, help="Markdown file whose tables get the findings as their last column")
    parser.add_argument(
        "--without", nargs="+", default=(), metavar="KIND", help="kinds of findings to leave out of the table"
    )
    options = parser.parse_args()
    cells = {}
    for path in sorted(options.folder.glob(f"{options.prefix}*")):
        name = path.name.removesuffix(SUFFIX)
        told = list(_list_findings(path))
        print(f"\n{name}")
        for finding, cost in told:
            print(f"  {finding.severity.value:7}  step {finding.step}  {finding.headline}\n    {finding.details}  {cost}")
        cells[name.removeprefix(options.prefix)] = "<br>".join(
            _format_cell(*item) for item in told if item[0].name not in options.without
        )
    if options.table:
        lines = options.table.read_text().splitlines()
        options.table.write_text("\n".join(_replace_last_cell(line, cells) for line in lines) + "\n")


def _list_findings(path: Path) -> Iterator[tuple[Finding, str]]:
    """Yield the findings of a recording with their costs, or no text where they have none."""
    recording = Recording.open(path)
    run = RecordedRun(recording, memory=False)
    steps = run.source.job_steps
    costs = {id(cost.finding): cost for cost in rank_findings(run.findings, steps, run.source.end_ns)}
    for finding in (linked.finding for linked in order_by_cause(run.findings)):
        cost = costs.get(id(finding))
        yield finding, describe_cost(cost, run.view) if cost is not None else ""


def _format_cell(finding: Finding, cost: str) -> str:
    """Return a finding for a cell of the table: warnings with their details and cost, notes without."""
    told = f"**{finding.headline}.** {finding.details}" + (f" Cost: {cost}." if cost else "")
    text = finding.headline if finding.severity == Severity.INFO else told
    return text.replace("<", "&lt;").replace("|", "&#124;")


def _replace_last_cell(line: str, cells: dict[str, str]) -> str:
    first, *rest = line.strip("|").split("|") if line.startswith("|") else ("", "")
    if (told := cells.get(first.strip(" *"))) is None:
        return line
    return "|".join(["", first, *rest[:-1], f" {told or 'nothing'} ", ""])


if __name__ == "__main__":
    main()
