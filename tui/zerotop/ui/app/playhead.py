"""The cursor in time: following the end, paused, or playing."""

from __future__ import annotations

from collections.abc import Callable

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Playhead:
    """A cursor that does not drift: it is computed from where and when playing began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # seconds, monotonic
        self._anchor_ns = 0
        self._anchor_s = 0.0
        self.following = True
        self.playing = False
        self.speed = 1.0

    def compute_cursor(self, begin_ns: int, end_ns: int) -> int:
        """Return the cursor in unix nanoseconds, within the recording."""
        if self.following:
            return end_ns
        elapsed = self._clock() - self._anchor_s if self.playing else 0.0
        return max(begin_ns, min(end_ns, self._anchor_ns + int(elapsed * self.speed * 1e9)))

    def seek(self, cursor_ns: int) -> None:
        """Move to a cursor; playing continues from there."""
        self.following = False
        self._anchor_ns = cursor_ns
        self._anchor_s = self._clock()

    def pause(self, cursor_ns: int) -> None:
        self.playing = False
        self.seek(cursor_ns)

    def play(self, cursor_ns: int) -> None:
        self.seek(cursor_ns)
        self.playing = True

    def follow_end(self) -> None:
        self.following = True
        self.playing = False

    def change_speed(self, direction: int, cursor_ns: int) -> None:
        """Play one step faster (1) or slower (-1) among SPEEDS, from the cursor on."""
        if not self.following:
            self.seek(cursor_ns)
        others = [speed for speed in SPEEDS if (speed - self.speed) * direction > 0]
        self.speed = others[0 if direction > 0 else -1] if others else self.speed
