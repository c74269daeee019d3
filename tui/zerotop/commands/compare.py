"""``zerotop compare``: recordings side by side."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerotop.analysis.reports.comparison import compare_sessions as side_by_side
from zerotop.analysis.reports.measures import Comparison, Measure
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.session import catalog
from zerotop.session.reader import Session

# Where nobody says how wide the output is.
_WIDTH, _WIDEST = 120, 240


def compare(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Returns 0."""
    if len(options.sessions) < 2:
        raise Problem("There is nothing to compare one session with: name two or more", USAGE)
    comparison = compare_recordings([catalog.find_session(text) for text in options.sessions])
    if options.json:
        print(json.dumps(_build_dict(comparison), indent=1))
    else:
        _print_table(comparison)
    return 0


def compare_recordings(paths: Sequence[Path]) -> Comparison:
    """Reads them all. Raises SessionError."""
    return side_by_side([Session.open(path) for path in paths], [path.name for path in paths])


def _build_dict(comparison: Comparison) -> dict[str, Any]:
    """Sizes in bytes, times in seconds."""
    return {"sessions": comparison.names, "rows": [_build_row(measure) for measure in comparison.measures]}


def _build_row(measure: Measure) -> dict[str, Any]:
    facts = {"section": measure.section, "name": measure.name.strip(), "unit": measure.unit.value}
    return facts | {"values": measure.values, "differs": measure.is_different}


def _print_table(comparison: Comparison) -> None:
    from zerotop.ui.compare.drawing import draw_table
    from zerotop.ui.drawing.glyphs import choose_glyphs
    from zerotop.ui.drawing.rows import row_text

    width = min(_WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _WIDTH
    if not sys.stdout.isatty():
        width = max(_WIDTH, 34 + 34 * len(comparison.names))
    for row in draw_table(comparison, width, choose_glyphs(os.environ, sys.stdout.encoding)):
        print(row_text(row).rstrip())
