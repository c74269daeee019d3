"""Where in the job's output the screen looks: at its end, or standing still further back."""

from __future__ import annotations

from zerotop.ui.base.interfaces import Source
from zerotop.ui.live.output import Pane

_FIRST, _MOST = 200, 102_400  # lines that are asked for


class Scrollback:
    """Scrolled back, the output stands at the moment when that began, so that its lines do not run away."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._back = 0
        self._at_ns = 0
        self._lines: tuple[str, ...] = ()
        self._seeks = 0

    def scroll(self, lines: int, room: int, cursor_ns: int) -> None:
        """Towards older lines (positive) or newer ones, as far as there are any. ``room`` is how many a pane shows."""
        if not self._back:
            self._at_ns = cursor_ns
        back = max(0, self._back + lines)
        if back:
            most = _FIRST
            while most < min(_MOST, back + room):
                most *= 2
            self._lines = self._source.output(self._at_ns, most)
            back = min(back, max(0, len(self._lines) - room))
        self._back = back

    def forget(self) -> None:
        """Back to the end."""
        self._back = 0
        self._seeks += 1

    def pane(self, newest: tuple[str, ...]) -> Pane:
        """What to show, where ``newest`` are the last lines at the cursor."""
        if not self._back:
            return Pane(newest, seeks=self._seeks)
        return Pane(self._lines, self._back, growing=newest[-1:] != self._lines[-1:], seeks=self._seeks)
