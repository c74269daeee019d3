"""Runs the detectors on a recording that may still grow, a piece at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from zerotop.analysis.annotations.support.annotation import Annotation
from zerotop.analysis.annotations.support.evidence import Evidence
from zerotop.session.reader import Session

Detector = Callable[[Evidence], Iterable[Annotation | None]]

# Phases of all ranks that are examined together: a few milliseconds of work.
_PIECE = 16384

_FindingKey = tuple[str, int, int, int | None, tuple[int, ...]]


class Annotator:
    """Collects the findings of some detectors in a session."""

    def __init__(self, session: Session, detectors: Iterable[Detector]) -> None:
        self._session = session
        self._evidence = Evidence(session)
        self._detectors = list(detectors)
        self._findings: dict[_FindingKey, Annotation] = {}
        self._ordered_findings: tuple[Annotation, ...] = ()
        self._until_ns = -1
        self._pending: Iterator[None] | None = None
        self.is_behind = True
        """Whether the last update stopped before its end."""

    def update(self, until_ns: int | None = None, *, most_s: float = math.inf) -> bool:
        """Examine the recording up to a cursor or the last record, for about ``most_s`` seconds.

        Returns whether there is a new finding.
        """
        end_ns = self._session.last_written_ns if until_ns is None else until_ns
        due, before = time.monotonic() + most_s, len(self._findings)
        while self._pending is not None or self._until_ns < end_ns:
            if self._pending is None:
                self._pending = self._run_detectors(end_ns)
            elif next(self._pending, True):
                self._pending = None
            if time.monotonic() >= due:
                break
        self.is_behind = self._pending is not None or self._until_ns < end_ns
        if len(self._findings) == before:
            return False
        self._ordered_findings = tuple(
            sorted(self._findings.values(), key=lambda finding: (finding.known_ns, finding.begin_ns, finding.name))
        )
        return True

    def _run_detectors(self, end_ns: int) -> Iterator[None]:
        """Advance by a piece, at most to ``end_ns``, and call all detectors."""
        self._until_ns = yield from self._evidence.find_next_cursor(_PIECE, end_ns)
        yield from self._evidence.iter_advance(self._until_ns)
        for detect in self._detectors:
            for finding in detect(self._evidence):
                if finding is not None:
                    key = (finding.name, finding.known_ns, finding.begin_ns, finding.step, finding.ranks)
                    self._findings.setdefault(key, finding)
                yield
            yield

    def findings_at(self, cursor_ns: int) -> tuple[Annotation, ...]:
        """Return the findings known at the cursor, in the order in which they became known."""
        if self._ordered_findings and self._ordered_findings[-1].known_ns <= cursor_ns:
            return self._ordered_findings
        return tuple(finding for finding in self._ordered_findings if finding.known_ns <= cursor_ns)
