"""A recording of ``tests/recordings`` with what tests ask of it, each made once."""

from __future__ import annotations

from functools import cached_property

import recordings
from zerotop.analysis.annotations import Annotation, Annotator
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.session.reader import Session


class Recorded:
    """One recording, analysed to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_found: bool | None = None  # by the annotator, once it is there

    @cached_property
    def session(self) -> Session:
        """The recording."""
        return recordings.open_recording(self.name)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The contents of its files."""
        return recordings.unpack_recording(self.name)

    @cached_property
    def annotator(self) -> Annotator:
        """Its annotator, which has read it to its end."""
        annotator = Annotator(self.session)
        self.has_found = annotator.update()
        return annotator

    @cached_property
    def findings(self) -> tuple[Annotation, ...]:
        """All findings."""
        return self.annotator.findings_at(self.session.end_ns)

    @cached_property
    def view(self) -> LiveView:
        """What screens show at the end."""
        return RecordingSource(self.session).view_at(None)
