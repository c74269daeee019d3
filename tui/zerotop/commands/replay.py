"""``zerotop replay``: a recording from its first step, on the live screens."""

from __future__ import annotations

import argparse
import sys

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.common.escape import print_escaped
from zerotop.commands.common.terminal import has_terminal
from zerotop.recording import catalog
from zerotop.recording.reader import Recording


def replay(options: argparse.Namespace) -> int:
    """Replay the recording; without a terminal, print its summary. Return 0 unless the screen failed."""
    from zerotop.ui.app.playhead import SPEEDS

    if not SPEEDS[0] <= options.speed <= SPEEDS[-1]:  # false for NaN
        raise Problem(f"A speed is from {SPEEDS[0]:g} to {SPEEDS[-1]:g}, not {options.speed:g}", USAGE)
    recording = Recording.open(catalog.find_recording(options.recording))
    if not has_terminal():
        from zerotop.analysis.reports.headline import summarize_recording

        print_escaped(summarize_recording(recording))
        print("The screens need a terminal: this is a summary. All findings: zerotop findings", file=sys.stderr)
        return 0
    from zerotop.analysis.views.recording_source import RecordingSource
    from zerotop.commands.common.user_settings import load_settings
    from zerotop.ui.app.app import ZerotopApp

    source = RecordingSource(recording, price=options.price_per_hour)
    app = ZerotopApp(source, title=recording.name, play_from_ns=source.first_step_ns, settings=load_settings())
    app.viewer.playhead.speed = options.speed
    app.run()
    return app.return_code or 0
