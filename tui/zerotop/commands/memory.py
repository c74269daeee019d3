"""``zerotop memory``: measured and expected memory, the owner of the peak, and why the job ran out of memory."""

from __future__ import annotations

import argparse
import json

from zerotop.analysis.reports.memory import build_json, read_report
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.common.errors import Problem
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.memory_text import format_report
from zerotop.recording import catalog
from zerotop.recording.reader import Recording


def memory(options: argparse.Namespace) -> int:
    """Print the report. Return 0."""
    recording = Recording.open(catalog.find_recording(options.recording))
    report = read_report(recording, options.at)
    if report is None:
        last = RecordingSource(recording).last_step
        known = "no step finished" if last is None else f"the last finished step is {last}"
        raise Problem(f"Step {options.at} did not finish in this recording: {known}")
    if options.json:
        print(json.dumps(build_json(report), indent=1))
    else:
        print("\n".join(map(escape_unprintable, format_report(report))))
    return 0
