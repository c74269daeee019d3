"""A real recording whose job is still going on, as far as a clock has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recordings import open_recording
from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording


class PlayedSource(RecordingSource):
    """A recording that grows: ``now_s`` gives the seconds since its begin. A name is one of ``tests/recordings``."""

    def __init__(
        self, recording: Recording | str, now_s: Callable[[], float], findings: Sequence[Finding] | None = None
    ) -> None:
        """``findings``: instead of its own."""
        self._told = findings
        self._now_s = now_s
        self._seen_s = -1.0
        self.views = 0  # that were asked for
        super().__init__(open_recording(recording) if isinstance(recording, str) else recording)

    @property
    def is_live(self) -> bool:
        return self.end_ns < self._extent.end_ns

    @property
    def end_ns(self) -> int:
        return min(self.begin_ns + int(min(self._now_s(), 1e6) * 1e9), self._extent.end_ns)

    @property
    def last_step(self) -> int | None:
        count = self._iterations.count_until(self.end_ns)
        return int(self._extent.steps[count - 1]) if count else None

    def find_step_end(self, step: int) -> int | None:
        end_ns = super().find_step_end(step)
        return end_ns if end_ns is not None and end_ns <= self.end_ns else None

    def findings_at(self, cursor_ns: int | None) -> tuple[Finding, ...]:
        cursor_ns = self.end_ns if cursor_ns is None else cursor_ns
        if self._told is None:
            return super().findings_at(cursor_ns)
        return tuple(finding for finding in self._told if finding.known_ns <= cursor_ns)

    def refresh(self) -> bool:
        seen_s, self._seen_s = self._seen_s, self._now_s()
        return self._seen_s > seen_s

    def view_at(self, cursor_ns: int | None) -> LiveView:
        self.views += 1
        return super().view_at(self.end_ns if cursor_ns is None else cursor_ns)

    def reopen(self) -> PlayedSource:
        return self
