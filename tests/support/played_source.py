"""A real recording whose job is still going on, as far as a clock has come."""

from __future__ import annotations

from collections.abc import Callable

from recordings import open_recording
from zerotop.analysis.findings import Finding
from zerotop.analysis.live_view import LiveView
from zerotop.analysis.views.recording_source import RecordingSource


class PlayedSource(RecordingSource):
    """A recording of ``tests/recordings`` that grows: ``now_s`` gives the seconds since its begin."""

    def __init__(self, name: str, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._seen_s = -1.0
        self.views = 0  # that were asked for
        super().__init__(open_recording(name))

    @property
    def is_live(self) -> bool:
        return self.end_ns < self._extent.end_ns

    @property
    def end_ns(self) -> int:
        return min(self.begin_ns + int(self._now_s() * 1e9), self._extent.end_ns)

    @property
    def last_step(self) -> int | None:
        count = self._iterations.count_until(self.end_ns)
        return int(self._extent.steps[count - 1]) if count else None

    def find_step_end(self, step: int) -> int | None:
        end_ns = super().find_step_end(step)
        return end_ns if end_ns is not None and end_ns <= self.end_ns else None

    def findings_at(self, cursor_ns: int | None) -> tuple[Finding, ...]:
        return super().findings_at(self.end_ns if cursor_ns is None else cursor_ns)

    def refresh(self) -> bool:
        seen_s, self._seen_s = self._seen_s, self._now_s()
        return self._seen_s > seen_s

    def view_at(self, cursor_ns: int | None) -> LiveView:
        self.views += 1
        return super().view_at(self.end_ns if cursor_ns is None else cursor_ns)

    def reopen(self) -> PlayedSource:
        return self
