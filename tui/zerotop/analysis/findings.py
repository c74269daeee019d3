"""A session's findings for a screen: looked for anew seldom enough that looking costs a screen nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from zerotop.analysis.annotations import Annotation, Annotator
from zerotop.session.reader import Session

_LEAST_S = 2.0  # between two searches: a finding is on screen within this and an iteration
_RESTS = 20  # so many times as long as a search takes nothing is searched for, so that it stays below 5 % of a core


class Findings:
    """What was found in a session that may grow."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._annotator = Annotator(session)
        self._clock = clock
        self._due_s = -1.0
        self._seen: tuple[int, ...] = ()

    def update(self, *read: int) -> bool:
        """Searches, if it is time and what was ``read`` (any counts, of steps and events) has changed.

        True when there is something new.
        """
        begin = self._clock()
        if read == self._seen or begin < self._due_s:
            return False
        self._seen = read
        new = self._annotator.update()
        took = self._clock() - begin
        self._due_s = begin + took + max(_LEAST_S, _RESTS * took)
        return new

    def at(self, cursor_ns: int) -> tuple[Annotation, ...]:
        """What was known at the cursor (unix nanoseconds), in the order in which it became known."""
        return self._annotator.at(cursor_ns)
