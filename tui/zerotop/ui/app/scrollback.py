"""Where in the job's output the screen looks: at its end, or standing still further back."""

from __future__ import annotations

from zerotop.ui.base.interfaces import Source
from zerotop.ui.live.output import Pane

_MIN_LINES, _MAX_LINES = 200, 102_400  # lines that are asked for


class Scrollback:
    """Scrolled back, the output stands at the moment when that began, so that its lines do not run away."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lines_back = 0
        self._anchor_ns = 0
        self._anchor_lines: tuple[str, ...] = ()
        self._seek_count = 0

    def scroll_lines(self, lines: int, room: int, cursor_ns: int) -> None:
        """Towards older lines (positive) or newer ones, as far as there are any. ``room`` is how many a pane shows."""
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

    def return_to_end(self) -> None:
        """Back to the end."""
        self._lines_back = 0
        self._seek_count += 1

    def make_pane(self, newest: tuple[str, ...]) -> Pane:
        """What to show, where ``newest`` are the last lines at the cursor."""
        if not self._lines_back:
            return Pane(newest, seek_count=self._seek_count)
        return Pane(
            self._anchor_lines,
            self._lines_back,
            has_newer=newest[-1:] != self._anchor_lines[-1:],
            seek_count=self._seek_count,
        )
