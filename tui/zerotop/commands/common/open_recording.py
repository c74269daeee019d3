"""Opening a recording for a command that prints from it, with warnings about unreadable parts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from zerotop.analysis.views.notices import describe_damage, describe_thinning
from zerotop.recording import catalog
from zerotop.recording.reader import Recording


@contextlib.contextmanager
def open_named(name: str) -> Iterator[Recording]:
    """Open the recording that the user named; at the end report damage on standard error. Raises RecordingError."""
    recording = Recording.open(catalog.find_recording(name))
    yield recording
    # Records are checked when they are read.
    for sentence in (*describe_damage(recording), *describe_thinning(recording.at(recording.end_ns))):
        print(f"zerotop: {sentence}", file=sys.stderr)
