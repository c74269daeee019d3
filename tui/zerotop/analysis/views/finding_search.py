"""A recording's findings for a screen: searched for often enough to be news, seldom enough to cost little."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from zerotop.analysis.findings import Detection, Finding, begin_detection, detect_findings
from zerotop.analysis.views.job_exit import is_left_running
from zerotop.recording.reader import Recording

_MIN_PAUSE_S = 1.5  # between two searches: a finding is on screen within this, a search and a frame
_PAUSE_FACTOR = 20  # pauses last this many times as long as searches, which then use less than 5 % of a core,
_SLICE_S = 0.05  # of a search, between which a screen has new records read: with hundreds of ranks it takes a second
_MAX_PAUSE_S = 15.0  # but no longer than this after a very long search


def list_findings(recording: Recording) -> tuple[Finding, ...]:
    """Return all findings of a recording. If its job has ended, their advice is for the next run."""
    findings = detect_findings(recording, recording.end_ns)
    return tuple(finding.for_next_run for finding in findings) if has_ended(recording) else findings


def has_ended(recording: Recording) -> bool:
    """Whether the job runs no more, as far as known: recording ended, and not by detaching from it."""
    return not recording.is_live and not is_left_running(recording.at())


class SearchResult(NamedTuple):
    """The outcome of searching one piece of a recording."""

    has_new: bool  # there is another finding
    is_behind: bool  # there are more pieces to search
    pause_s: float = 0.0  # nothing is searched before this has passed


class Findings:
    """The findings of a recording that may grow."""

    def __init__(
        self, recording: Recording, clock: Callable[[], float] = time.monotonic, earlier: tuple[Finding, ...] = ()
    ) -> None:
        """``clock`` gives seconds; ``earlier``: findings of this recording that count until the first search is over."""
        self._recording = recording
        self._earlier = earlier
        self._detection: Detection | None = None  # made by the first search: no picture waits for the detectors' import
        self._clock = clock
        self._due_s = -1.0
        self._took_s = 0.0  # of the search that is going on
        self._searched_ns = -1  # where the last search began to look,
        self._until_ns: int | None = None  # and where it ends; None: it is over

    def search_piece(self) -> SearchResult:
        """Search one piece of the recording, if it has grown and the last search was long enough ago."""
        begin = self._clock()
        if self._detection is None:
            self._detection = begin_detection(self._recording)
        if self._until_ns is None:
            written_ns = self._recording.last_written_ns
            if begin < self._due_s or written_ns == self._searched_ns:
                return SearchResult(False, False)
            # Records that are written meanwhile are for the next search: this one has to end.
            self._searched_ns = self._until_ns = written_ns
        has_new = self._detection.search_piece(self._until_ns, _SLICE_S)
        end = self._clock()
        self._took_s += end - begin
        if self._detection.is_behind:
            return SearchResult(has_new, True)
        pause_s = min(max(_MIN_PAUSE_S, _PAUSE_FACTOR * self._took_s), _MAX_PAUSE_S)
        self._due_s, self._took_s, self._until_ns = end + pause_s, 0.0, None
        self._earlier = ()
        return SearchResult(has_new, False, pause_s)

    def search_news(self) -> None:
        """Look at events that were read since the last search, for findings that need nothing else."""
        if self._detection is not None:
            self._detection.search_news(self._recording.last_written_ns)

    def findings_at(self, cursor_ns: int) -> tuple[Finding, ...]:
        """Return the findings known at the cursor (unix nanoseconds), in the order in which they became known."""
        found = () if self._detection is None else self._detection.findings_at(cursor_ns)
        if not self._earlier:
            return found
        last_ns = self._earlier[-1].known_ns
        earlier = tuple(finding for finding in self._earlier if finding.known_ns <= cursor_ns)
        return earlier + tuple(finding for finding in found if finding.known_ns > last_ns)
