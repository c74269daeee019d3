"""``zerotop report``: a recording or a sweep as one HTML page to send, or one chart as PNG."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.new_files import choose_file
from zerotop.commands.common.open_recording import open_named
from zerotop.commands.common.report_files import build_page, build_sweep_page, draw_chart, draw_sweep_chart, write_report
from zerotop.recording.sweeps import find_sweep
from zerotop.report import OTHER_FORMATS


def report(options: argparse.Namespace) -> int:
    """Write the page or the picture. Return 0."""
    output = options.output
    is_picture = options.format == "png" if options.format else options.chart is not None or str(output).endswith(".png")
    if options.format is None and output is not None and (suffix := Path(output).suffix.lower()) in OTHER_FORMATS:
        raise Problem(f"A report is HTML or PNG, not {suffix[1:].upper()}: name another file, or add --format html", USAGE)
    if options.chart is not None and not is_picture:
        raise Problem("--chart goes with --format png: the page has all charts", USAGE)
    if is_picture and output == "-" and sys.stdout.isatty():
        raise Problem("PNG is binary and cannot be shown in a terminal: name a file with -o FILE", USAGE)
    if (sweep := find_sweep(options.recording)) is not None:
        name = sweep.resolve().name
        content = draw_sweep_chart(sweep, options.chart) if is_picture else build_sweep_page(sweep, options.price_per_hour)
    else:
        with open_named(options.recording) as recording:
            name = recording.name
            content = draw_chart(recording, options.chart) if is_picture else build_page(recording, options.price_per_hour)
    if output == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return 0
    name += ".png" if is_picture else ".html"
    path = Path(output or name)
    write_report(choose_file(path / name if path.is_dir() else path, options.force), content)
    return 0
