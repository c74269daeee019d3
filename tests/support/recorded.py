"""A recording of ``tests/recordings`` with what tests ask of it, each made once."""

from __future__ import annotations

from functools import cached_property

import recordings
from zerotop.analysis.findings import Detection, Finding, begin_detection
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording


class Recorded:
    """One recording, analysed to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_found: bool | None = None  # by the detection, once it is there

    @cached_property
    def recording(self) -> Recording:
        """The recording."""
        return recordings.open_recording(self.name)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The contents of its files."""
        return recordings.unpack_recording(self.name)

    @cached_property
    def detection(self) -> Detection:
        """Its detection, which has read it to its end."""
        detection = begin_detection(self.recording)
        self.has_found = detection.update()
        return detection

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All findings."""
        return self.detection.findings_at(self.recording.end_ns)

    @cached_property
    def view(self) -> LiveView:
        """What screens show at the end."""
        return RecordingSource(self.recording).view_at(None)
