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

from zerotop.analysis.reports.comparison import compare_paths
from zerotop.analysis.reports.measures import Comparison, Measure
from zerotop.commands.common.errors import USAGE, Problem
from zerotop.recording import catalog
from zerotop.recording.reader import Recording

# The width of output that is not a terminal, at least; the width in a terminal, at most.
_MIN_WIDTH, _MAX_WIDTH = 120, 240
_COLUMN_WIDTH = 34


def compare(options: argparse.Namespace) -> int:
    """Print a table, or JSON. Return 0."""
    if len(options.recordings) < 2:
        raise Problem("compare needs two or more recordings", USAGE)
    comparison = compare_recordings([catalog.find_recording(text) for text in options.recordings])
    if options.json:
        print(json.dumps(build_json(comparison), indent=1))
    else:
        _print_table(comparison)
    return 0


def compare_recordings(paths: Sequence[Path]) -> Comparison:
    """Compare the recordings in these paths. Raises RecordingError."""
    return compare_paths([Recording.open(path) for path in paths], [path.name for path in paths])


def build_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values."""
    return {"recordings": comparison.names, "rows": [_build_row(measure) for measure in comparison.measures]}


def _build_row(measure: Measure) -> dict[str, Any]:
    facts = {"section": measure.section, "name": measure.name.strip(), "unit": measure.unit.value}
    return facts | {"values": measure.values, "differs": measure.is_different}


def _print_table(comparison: Comparison) -> None:
    from zerotop.ui.compare.drawing import draw_table
    from zerotop.ui.drawing.glyphs import choose_glyphs
    from zerotop.ui.drawing.rows import row_text

    width = max(_MIN_WIDTH, _COLUMN_WIDTH * (1 + len(comparison.names)))
    if sys.stdout.isatty():
        width = min(_MAX_WIDTH, shutil.get_terminal_size().columns)
    for row in draw_table(comparison, width, choose_glyphs(os.environ, sys.stdout.encoding)):
        print(row_text(row).rstrip())
