"""A session's findings for a screen: looked for often enough to be news, in pieces too short for a screen to notice."""

from __future__ import annotations

import time
from collections.abc import Callable

from zerotop.analysis.annotations import Annotation, Annotator
from zerotop.session.reader import Session

_MIN_PAUSE_S = 1.5  # between two searches: a finding is on screen within this, a search and a frame
_PAUSE_FACTOR = 20  # so many times as long as a search takes nothing is searched for, so that it stays below 5 % of a core,
_MAX_PAUSE_S = 15.0  # or for this long, where there was very much to look at
_MOST_S = 0.005  # of searching in one go, where there is much that was not looked at yet, as when a long recording is opened


class Findings:
    """What was found in a session that may grow."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._session = session
        self._annotator: Annotator | None = None  # made when first searched with: no picture waits for all detectors' import
        self._clock = clock
        self._due_s = -1.0
        self._took_s = 0.0  # of the search that is going on
        self._last_read: tuple[int, ...] | None = None  # when the last search began,
        self._until_ns: int | None = None  # and up to where it is to look; None: it is over

    def update(self, *read: int) -> bool:
        """Searches on, if it is time and what was ``read`` (any figures that change with it) has changed.

        True when there is something new.
        """
        begin = self._clock()
        if self._annotator is None:
            self._annotator = Annotator(self._session)
        if self._until_ns is None:
            if begin < self._due_s or read == self._last_read:
                return False
            # What is written while it goes on is for the next one: where records come faster than they are looked at in one
            # go it would never end, and never rest.
            self._last_read, self._until_ns = read, self._session.last_written_ns
        new = self._annotator.update(self._until_ns, most_s=_MOST_S)
        end = self._clock()
        self._took_s += end - begin
        if not self._annotator.is_behind:
            self._due_s = end + min(max(_MIN_PAUSE_S, _PAUSE_FACTOR * self._took_s), _MAX_PAUSE_S)
            self._took_s, self._until_ns = 0.0, None
        return new

    def findings_at(self, cursor_ns: int) -> tuple[Annotation, ...]:
        """What was found that was known at the cursor (unix nanoseconds), in the order in which it became known."""
        return () if self._annotator is None else self._annotator.findings_at(cursor_ns)
