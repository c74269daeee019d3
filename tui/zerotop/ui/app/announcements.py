"""Announcements of a running job's end and failures, through the terminal, for users who look elsewhere.

The bell, and a notification by OSC 9, which iTerm2, WezTerm, kitty and Ghostty show and other terminals ignore.
"""

from __future__ import annotations

import re

from zerotop.analysis.findings import Severity
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.frame import Frame

_MOST_CHARACTERS = 200
# Frames after the end that may not show why it ended.
_MOST_LATE_FRAMES = 8
# They would end the sequence, or begin another one: the text quotes a recording.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]+")


class Announcer:
    """Finds news in the frames of one recording.

    Args:
        source: the recording.
        is_own_job: the job was started or attached to here, so that its end is news even before the first frame.
    """

    def __init__(self, source: RecordingSource, *, is_own_job: bool) -> None:
        self.source = source
        self._was_live = is_own_job
        self._late_frames = 0  # that do not show the end yet
        self._known: set[tuple[str, int]] | None = None  # errors that were there before; None before the first frame

    def find_news(self, frame: Frame) -> str:
        """Return a sentence about news since the last frame; "" if there are none, and for a job that is over."""
        is_live = self.source.is_live
        errors = {(one.name, one.detected_ns): one.headline for one in frame.all_findings if one.severity is Severity.ERROR}
        fresh = [headline for key, headline in errors.items() if self._known is not None and key not in self._known]
        news = fresh[0] if fresh and self._was_live else ""
        if self._was_live and not is_live:
            news = frame.view.job.exit_text or news
            if not news and self._late_frames < _MOST_LATE_FRAMES:  # this frame was begun before the end
                self._late_frames, is_live = self._late_frames + 1, True
            else:
                news = news or "The job has ended."
        self._known, self._was_live = (self._known or set()) | set(errors), is_live
        return f"{frame.view.job.name}: {news}" if news else ""


def write_announcement(text: str) -> str:
    """Return the escape sequences that announce a sentence: a notification, then the bell."""
    return f"\x1b]9;{_CONTROLS.sub(' ', text)[:_MOST_CHARACTERS]}\x07\x07"
