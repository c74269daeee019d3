"""Runs the detectors on a recording that may still grow, a piece at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from zerotop.analysis.findings.support.evidence import Evidence
from zerotop.analysis.findings.support.finding import Finding
from zerotop.analysis.findings.support.links import drop_repeats, drop_superseded, settle_attempts
from zerotop.analysis.findings.support.window import needs_events_alone
from zerotop.recording.reader import Recording

Detector = Callable[[Evidence], Iterable[Finding | None]]

# Number of phases, of all ranks, that are examined at once: a few milliseconds of work, or with many ranks as much again as
# it takes to ask for each of them.
_PIECE, _PIECE_OF_RANK = 16384, 128

_FindingKey = tuple[str, int, int, int | None, tuple[int, ...]]


class Detection:
    """Collects the findings of some detectors in a recording."""

    def __init__(self, recording: Recording, detectors: Iterable[Detector]) -> None:
        self._recording = recording
        self._evidence = Evidence(recording)
        detectors = list(detectors)
        self._news_detectors = [detect for detect in detectors if needs_events_alone(detect)]
        self._detectors = [detect for detect in detectors if not needs_events_alone(detect)]
        self._findings: dict[_FindingKey, Finding] = {}
        self._waiting: list[Detector] = []  # those that have not looked at the piece in progress,
        self._found: list[Finding] = []  # and what the others have found in it
        self.ordered_findings: tuple[Finding, ...] = ()
        self._shown: tuple[Finding, ...] = ()  # the same; those told again with the time of the first
        self._settled: tuple[tuple[Finding, ...], tuple[Finding, ...]] = (), ()  # those known at a cursor, and shown
        self._attempt_begins: tuple[int, ...] = ()
        self._until_ns = -1
        self.is_behind = True
        """Whether there is more to search than the last search did."""

    def update(self, until_ns: int | None = None) -> bool:
        """Search up to a cursor or the last record. Returns whether there is a new finding."""
        end_ns = self._recording.last_written_ns if until_ns is None else until_ns
        has_new = False
        while self._waiting or self._until_ns < end_ns:
            has_new |= self.search_piece(end_ns)
        return has_new

    def search_piece(self, end_ns: int, seconds: float = math.inf) -> bool:
        """Search a piece further towards ``end_ns``, or more of the last piece. Returns whether there is a new finding.

        ``seconds``: no detector begins after this time. Findings count when all detectors have looked at a piece, since some
        take the place of others.
        """
        begin_s = time.monotonic()
        if not self._waiting and self._until_ns < end_ns:
            size = max(_PIECE, _PIECE_OF_RANK * len(self._recording.sources["spans"]))
            self._until_ns = self._evidence.find_next_cursor(size, end_ns)
            self._evidence.advance_cursor(self._until_ns)
            self._waiting = self._detectors[::-1]
            self._found = self._look_at_news(self._until_ns)
        while self._waiting and time.monotonic() - begin_s < seconds:
            detect = self._waiting.pop()
            self._found += [finding for finding in detect(self._evidence) if finding is not None]
        self.is_behind = bool(self._waiting) or self._until_ns < end_ns
        if self._waiting:
            return False
        found, self._found = self._found, []
        return self._count_found(found)

    def search_news(self, end_ns: int) -> bool:
        """Have detectors that need events alone look at those up to ``end_ns``; return whether there is a new finding.

        They do not wait for the others, whose search of many ranks takes long.
        """
        return self._count_found(self._look_at_news(end_ns))

    def _look_at_news(self, end_ns: int) -> list[Finding]:
        self._evidence.news.advance_cursor(end_ns)
        return [one for detect in self._news_detectors for one in detect(self._evidence) if one is not None]

    def _count_found(self, found: Iterable[Finding]) -> bool:
        """Add what was found; return whether any of it is new."""
        before = len(self._findings)
        for finding in found:
            key = (finding.name, finding.known_ns, finding.begin_ns, finding.step, finding.ranks)
            self._findings[key] = finding
        if len(self._findings) == before:
            return False
        self._attempt_begins = tuple(group.lead.source.created_ns for group in self._evidence.groups)
        self.ordered_findings = drop_repeats(
            sorted(self._findings.values(), key=lambda finding: (finding.known_ns, finding.begin_ns, finding.name))
        )
        since: dict[tuple[object, ...], int] = {}
        for finding in self.ordered_findings:
            since.setdefault(finding.event, finding.known_ns)
        self._shown = tuple(
            one if since[one.event] == one.known_ns else replace(one, first_known_ns=since[one.event])
            for one in self.ordered_findings
        )
        return True

    def findings_at(self, cursor_ns: int) -> tuple[Finding, ...]:
        """Return the findings known at the cursor, in the order in which they became known. Any thread may ask.

        Of findings about the same event only the one that covers most counts, and the latest of these. One about less may
        become known later, as it waited for samples of its line.
        """
        latest: dict[tuple[object, ...], Finding] = {}
        for finding in self._shown:
            if finding.known_ns > cursor_ns:
                break
            if finding.end_ns >= latest.get(finding.event, finding).end_ns:
                latest[finding.event] = finding
        findings, (known, settled) = tuple(latest.values()), self._settled
        if findings != known:
            settled = drop_superseded(settle_attempts(findings, self._attempt_begins))
            self._settled = findings, settled
        return settled
