"""The part of the job's output that the live screen shows: its end, or lines further back that stay."""

from __future__ import annotations

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.frame import Pane

_MIN_LINES, _MAX_LINES = 200, 102_400  # that are read


class Scrollback:
    """While scrolled back, the output shows the moment when scrolling began, so that its lines do not run away.

    Belongs to the thread that reads the source.
    """

    def __init__(self, source: RecordingSource) -> None:
        self._source = source
        self._lines_back = 0
        self._anchor_ns = 0
        self._anchor_lines: tuple[str, ...] = ()
        self._seek_count = 0

    def scroll_lines(self, lines: int, room: int, cursor_ns: int) -> None:
        """Scroll towards older lines (positive) or newer ones, as far as there are any. A pane shows ``room`` lines."""
        if not self._lines_back:
            self._anchor_ns = cursor_ns
        back = max(0, self._lines_back + lines)
        if back:
            most = _MIN_LINES
            while most < min(_MAX_LINES, back + room):
                most *= 2
            self._anchor_lines = self._source.output_lines(self._anchor_ns, most)
            back = min(back, max(0, len(self._anchor_lines) - room))
        self._lines_back = back

    def follow_seeks(self, seek_count: int) -> None:
        """Return to the end if the cursor has been moved to another moment, which ``seek_count`` counts."""
        if seek_count != self._seek_count:
            self._lines_back, self._seek_count = 0, seek_count

    def make_pane(self, newest: tuple[str, ...]) -> Pane:
        """Return the lines to show; ``newest`` are the last ones at the cursor."""
        if not self._lines_back:
            return Pane(newest, seek_count=self._seek_count)
        return Pane(
            self._anchor_lines,
            self._lines_back,
            has_newer=newest[-1:] != self._anchor_lines[-1:],
            seek_count=self._seek_count,
        )
