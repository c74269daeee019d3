"""The findings of a recording that may still grow: each record is looked at once, a piece at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from zerotop.analysis.annotations.support.annotation import Annotation
from zerotop.analysis.annotations.support.evidence import Facts
from zerotop.session.reader import Session

Detector = Callable[[Facts], Iterable[Annotation | None]]

# Phases that are looked at together, of all ranks: a few milliseconds' work.
_PIECE = 16384

_Key = tuple[str, int, int, int | None, tuple[int, ...]]


class Annotator:
    """Looks for findings with detectors, in what a session has read."""

    def __init__(self, session: Session, detectors: Iterable[Detector]) -> None:
        self._session = session
        self._facts = Facts(session)
        self._detectors = list(detectors)
        self._found: dict[_Key, Annotation] = {}
        self._ordered: tuple[Annotation, ...] = ()
        self._upto_ns = -1
        self._looking: Iterator[None] | None = None
        self.behind = True
        """Whether the last update left off before it had looked at everything."""

    def update(self, until_ns: int | None = None, *, most_s: float = math.inf) -> bool:
        """Looks on, up to a cursor or the last record, for about so long at most. True when there is a new finding."""
        end_ns = self._session.last_written_ns if until_ns is None else until_ns
        due, before = time.monotonic() + most_s, len(self._found)
        while self._looking is not None or self._upto_ns < end_ns:
            if self._looking is None:
                self._looking = self._look(end_ns)
            elif next(self._looking, True):
                self._looking = None
            if time.monotonic() >= due:
                break
        self.behind = self._looking is not None or self._upto_ns < end_ns
        if len(self._found) == before:
            return False
        self._ordered = tuple(sorted(self._found.values(), key=lambda one: (one.known_ns, one.begin_ns, one.name)))
        return True

    def _look(self, end_ns: int) -> Iterator[None]:
        """In pieces with all detectors, some way on towards the end."""
        self._upto_ns = yield from self._facts.ahead(_PIECE, end_ns)
        yield from self._facts.advancing(self._upto_ns)
        for detect in self._detectors:
            for one in detect(self._facts):
                if one is not None:
                    self._found.setdefault((one.name, one.known_ns, one.begin_ns, one.step, one.ranks), one)
                yield
            yield

    def at(self, cursor_ns: int) -> tuple[Annotation, ...]:
        """What was found that was known at the cursor, in the order in which it became known."""
        if self._ordered and self._ordered[-1].known_ns <= cursor_ns:
            return self._ordered
        return tuple(finding for finding in self._ordered if finding.known_ns <= cursor_ns)
