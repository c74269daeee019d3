"""The table of ``docs/conformance.md``: made of rows, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from conformance.experiment import Row

SAME = "same"
UNLISTED = "**a defect: not listed as intended**"
_INTRODUCTION = """\
# What a job notices of zerotop

Each row is one behaviour of a job, observed by a test when the job runs alone and when the same job runs under
`zerotop run --headless --recording DIR --`.

{counts}

This page is written by the test: `python -m pytest tests/real/conformance --snapshot-update`. The test fails when a row
differs from this page, and when a difference is found that is not listed with its reason in
`tests/real/conformance/intended.py`.
"""
_HEAD = "| behaviour | alone | under zerotop | |\n|---|---|---|---|\n"


def format_row(row: Row, reasons: Mapping[str, str]) -> str:
    """Return the row as a line of Markdown."""
    equal = row.alone == row.under
    cells = (row.behaviour, row.alone, SAME if equal else row.under, "" if equal else reasons.get(row.behaviour, UNLISTED))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def format_page(sections: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return the whole page from titles and formatted rows."""
    parts: list[str] = []
    lines: list[str] = []
    for title, rows in sections:
        parts.append(f"\n## {title}\n\n{_HEAD}" + "".join(f"{row}\n" for row in rows))
        lines += rows
    equal = sum(row.endswith(f"| {SAME} |  |") for row in lines)
    counts = f"Of {len(lines)} behaviours {equal} are the same; the others differ for the reason in the last column."
    return _INTRODUCTION.format(counts=counts) + "".join(parts)


def parse_page(page: str) -> list[tuple[str, list[str]]]:
    """Return the titles and formatted rows of a page."""
    sections: list[tuple[str, list[str]]] = []
    for line in page.splitlines():
        if line.startswith("## "):
            sections.append((line[3:], []))
        elif line.startswith("| ") and not line.startswith("| behaviour |"):
            sections[-1][1].append(line)
    return sections


def read_behaviour(line: str) -> str:
    """Return the first cell of a formatted row."""
    return line.removeprefix("| ").replace("\\|", "\0").split(" | ", 1)[0].replace("\0", "|")
