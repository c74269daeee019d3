"""The timeline's window and range: zoom, pan and selection, without a terminal."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.timeline.timeline import Window

_SECOND_NS = 10**9
_DIGITS = (10, 12, 15, 20, 25, 30, 40, 50, 60, 80)
_PARTS_NS = tuple(digits * 10**power for power in range(2, 8) for digits in _DIGITS)
_SECONDS = (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
_MINUTES = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
_HOURS = (1, 1.5, 2, 3, 4, 6, 8, 12, 24)
_WHOLE = (*_SECONDS, *(60 * minutes for minutes in _MINUTES), *(3600 * hours for hours in _HOURS))
LEVELS_NS: tuple[int, ...] = (
    *(part for part in _PARTS_NS if part < _SECOND_NS),
    *(int(seconds * _SECOND_NS) for seconds in _WHOLE),
)
"""The possible lengths of a column in ns: whole seconds from 2 s, multiples of ten seconds from 1 min."""

KEY_ZOOM, WHEEL_ZOOM = 2.0, 1.3  # approximate factor of one zoom

INITIAL_ITERATIONS = 6  # in the first window
_DEFAULT_S = 60.0  # length of the first window while no iteration is known
_AHEAD_SHARE = 0.8  # position in the window of a cursor that moves on


@dataclass(frozen=True, slots=True)
class PlaybackState:
    """The playback state that a window depends on. Times are nanoseconds since the recording began."""

    cursor: int
    end: int
    following: bool
    playing: bool
    idle: int = 0  # time after the last step of a finished recording
    is_over: bool = False  # the recording is finished


class TimelineView:
    """A window that keeps the cursor visible until the user moves it elsewhere."""

    def __init__(self) -> None:
        self._chosen_level: int | None = None  # None: as many iterations as at first
        self._shows_all = False  # the whole recording, however long it becomes
        self._initial_level: tuple[float, int] | None = None  # (seconds of an iteration, its level)
        self._level = 0
        self._first = 0
        self._columns = 2
        self._is_detached = False  # moved away from the cursor by the user
        self._state: PlaybackState | None = None
        self._range_begin: int | None = None  # nanoseconds since the recording began
        self._range_end: int | None = None

    @property
    def column_ns(self) -> int:
        """Nanoseconds per column."""
        return LEVELS_NS[self._level]

    def choose_window(self, now: PlaybackState, columns: int, iteration_s: float) -> Window:
        """Return the window for a number of columns, which is even: two columns are a cell."""
        before, self._state = self._state, now
        was_at_end = before is not None and before.is_over and before.following
        if now.is_over and now.following and not was_at_end and self._chosen_level is None:
            self._shows_all = True  # a job that has ended is first seen whole
        level = self._choose_level(now, columns, iteration_s)
        if level != self._level or columns != self._columns:
            self._first = _keep_right_edge(self._first, self._columns, self.column_ns, columns, LEVELS_NS[level])
            self._level, self._columns = level, columns
        moved = before is not None and now.cursor != before.cursor and not now.playing and not now.following
        if moved or (before is not None and now.following and not before.following):
            self._is_detached = False
        self._place_window(now)
        return Window(self._first, self.column_ns, columns)

    def _choose_level(self, now: PlaybackState, columns: int, iteration_s: float) -> int:
        """Return the level to show, at most the one at which the whole recording just fits."""
        most = _fit_level(now.end + 1, columns)
        if self._shows_all:
            return most
        if self._chosen_level is None:
            pace_s = iteration_s if iteration_s > 0 else 0.0
            # Small changes of the pace do not change the level.
            if (
                self._initial_level is None
                or not 0.5 * pace_s <= self._initial_level[0] <= 2 * pace_s
                or columns != self._columns
            ):
                length = int((INITIAL_ITERATIONS * pace_s or _DEFAULT_S) * _SECOND_NS)
                self._initial_level = pace_s, _fit_level(length + 2 * now.idle, columns)
            return min(self._initial_level[1], most)
        return min(self._chosen_level, most)

    def _place_window(self, now: PlaybackState) -> None:
        last = now.end // self.column_ns
        if last < self._columns:
            self._first, self._is_detached = 0, False
        elif self._is_detached:
            self._first = max(0, min(self._first, last - self._columns // 2))
        elif now.following:
            self._first = last - self._columns + 2
        else:
            self._first = self._follow_cursor(now)
        self._first -= self._first % 2

    def _follow_cursor(self, now: PlaybackState) -> int:
        place = now.cursor // self.column_ns - self._first
        if now.playing and place > _AHEAD_SHARE * self._columns:
            return self._first + place - int(_AHEAD_SHARE * self._columns)
        if not 0 <= place < self._columns:
            share = 0.2 if place < 0 else _AHEAD_SHARE
            return max(0, self._first + place - int(share * self._columns))
        return max(0, self._first)

    def zoom_window(self, direction: int, anchor: int | None = None, factor: float = KEY_ZOOM) -> None:
        """Zoom out (-1) or in (1) around a moment; without one, around the cursor if it is visible."""
        if self._state is None:
            return
        most = _fit_level(self._state.end + 1, self._columns)
        level = min(_choose_zoom_level(self._level, direction, factor), most)
        self._shows_all = level == most and direction < 0
        if level == self._level:
            return
        around = self._state.cursor if anchor is None else anchor
        place = around / self.column_ns - self._first
        if not 0 <= place <= self._columns:
            place = self._columns / 2
            around = int((self._first + place) * self.column_ns)
        self._chosen_level = self._level = level
        self._first = round(around / self.column_ns - place)
        place = self._state.cursor // self.column_ns - self._first
        self._is_detached |= anchor is not None or not 0 <= place < self._columns

    def set_column_ns(self, column_ns: int) -> None:
        """Show columns of at most this length, around the cursor."""
        self._chosen_level = max((level for level, length in enumerate(LEVELS_NS) if length <= column_ns), default=0)
        self._is_detached = self._shows_all = False

    def toggle_whole(self) -> None:
        """Show the whole recording, or as few iterations as at first."""
        self._chosen_level, self._shows_all, self._is_detached = None, not self._shows_all, False

    def pan_share(self, share: float) -> None:
        """Pan by a share of the window."""
        self.pan_columns(int(share * self._columns))

    def pan_columns(self, columns: int) -> None:
        """Pan by columns, away from the cursor if need be."""
        self._first += columns
        self._is_detached = True

    def return_to_cursor(self) -> None:
        self._is_detached = False

    @property
    def is_detached(self) -> bool:
        """Whether the window was moved away from the cursor."""
        return self._is_detached

    # The range

    def set_range_begin(self, moment: int) -> None:
        """Begin the range here; an end before it is cleared."""
        self._range_begin = moment
        if self._range_end is not None and self._range_end <= moment:
            self._range_end = None

    def set_range_end(self, moment: int) -> None:
        """End the range here; a begin after it is cleared."""
        self._range_end = moment
        if self._range_begin is not None and self._range_begin >= moment:
            self._range_begin = None

    def select_range(self, one: int, other: int) -> None:
        """Select the range between two moments."""
        self._range_begin, self._range_end = min(one, other), max(one, other)

    def clear_range(self) -> None:
        self._range_begin = self._range_end = None

    @property
    def has_range(self) -> bool:
        return self._range_begin is not None or self._range_end is not None

    def get_range(self) -> tuple[int, int] | None:
        """Return the range in nanoseconds since the recording began. The cursor stands for an end that is not set."""
        if self._state is None or not self.has_range:
            return None
        begin, end = (self._state.cursor if moment is None else moment for moment in (self._range_begin, self._range_end))
        return None if begin == end else (min(begin, end), max(begin, end))


def _keep_right_edge(first: int, columns: int, column_ns: int, now_columns: int, now_ns: int) -> int:
    """Return the first column after a change of level or width; the right edge keeps its time."""
    return (first + columns) * column_ns // now_ns - now_columns


def _choose_zoom_level(level: int, direction: int, factor: float) -> int:
    """Return the level whose columns are about ``factor`` times as long (-1) or short (1), never the same level."""
    wanted = LEVELS_NS[level] / factor if direction > 0 else LEVELS_NS[level] * factor
    nearest: int = min(range(len(LEVELS_NS)), key=lambda place: abs(LEVELS_NS[place] / wanted - 1))
    return max(0, min(level - 1, nearest)) if direction > 0 else max(level + 1, nearest)


def _fit_level(length: int, columns: int) -> int:
    """Return the level with the shortest columns that hold a length of time."""
    levels = (level for level, column in enumerate(LEVELS_NS) if column * columns >= length)
    return next(levels, len(LEVELS_NS) - 1)
