"""When the worker reads the recording, searches for findings, and makes the picture of the screen that is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zerotop.analysis.views.finding_search import SearchResult
from zerotop.recording.headers import RecordingError
from zerotop.ui.app.frame_builder import FrameRequest
from zerotop.ui.app.frame_worker import FrameWorker
from zerotop.ui.base.base_screen import MonitorScreen, ScreenPicture, ScreenState

if TYPE_CHECKING:
    from zerotop.ui.app.monitor import Monitor

REST_FACTOR = 4.0  # a poll is followed by a rest of this multiple of its time: with many ranks frames are rarer
SEARCH_REST_FACTOR = 6.0  # and a piece of a search before the next
ANSWER_S = 0.015  # if a frame takes longer, the header and transport show its time first


class _PollResult(NamedTuple):
    picture: ScreenPicture | None  # None where nothing has changed
    cpu_s: float  # processor time it took


class FrameScheduler:
    """Submits jobs to the worker and shows their results. All methods run in the UI thread unless they say otherwise."""

    def __init__(self, host: Monitor) -> None:
        self._host = host
        self._worker = FrameWorker(host.call_later, self._handle_job_error)
        self._wanted: tuple[FrameRequest, MonitorScreen, ScreenState] | None = None  # for the next picture
        self._interim_timer: asyncio.TimerHandle | None = None
        self._rest_until_s = 0.0
        self._search_due_s = 0.0

    def close(self) -> None:
        """Wait for the job in progress, and do no more."""
        self._worker.close(wait=True)

    @property
    def is_busy(self) -> bool:
        """Whether the worker still has something to deliver."""
        return self._worker.is_busy

    def submit(self, job: Callable[[], Any], deliver: Callable[[Any], object] | None = None) -> None:
        """Have the worker do a job as soon as it can, and ``deliver`` get its result in the UI thread."""
        self._worker.submit(job, deliver)

    def _handle_job_error(self, error: BaseException) -> bool:
        """Give up a recording that can no longer be read; return whether that is the reason of the error."""
        if self._host.is_watching and not isinstance(error, RecordingError):
            # Where a file was cut short meanwhile, a job has read zeros.
            try:
                self._host.viewer.source.refresh()
            except RecordingError as cut:
                error = cut
        if isinstance(error, RecordingError):
            self._host.give_up_recording(str(error))
        return isinstance(error, RecordingError)

    # --- new records and findings ---------------------------------------------------------------------------

    def poll_rested(self, *, force: bool = False) -> None:
        """Have new records read unless that is being done, or was done a moment ago; ``force``: and a picture made."""
        if self._host.is_watching and not self._worker.is_pending("poll") and time.monotonic() >= self._rest_until_s:
            self._request_poll(force=force)

    def _request_poll(self, *, force: bool) -> None:
        """Have new records read, and a picture made if they change anything or ``force``."""
        self._note_wanted()
        source = self._host.viewer.source

        def poll() -> _PollResult:
            begin_s = time.thread_time()
            fresh = source.refresh()
            request = self._get_wanted()[0]
            changed = request.playhead.playing or (fresh and request.playhead.following) or force
            picture = self._make_picture() if changed and not self._worker.is_waiting("frame") else None
            return _PollResult(picture, time.thread_time() - begin_s)

        self._worker.submit(poll, self._finish_poll, slot="poll", routine=True)

    def _finish_poll(self, result: _PollResult) -> None:
        begin_s = time.thread_time()
        if self._host.viewer.stop_at_end():
            self.draw_frame()
        if result.picture is not None:
            self._show_picture(result.picture)
        self._rest_until_s = time.monotonic() + REST_FACTOR * (result.cpu_s + time.thread_time() - begin_s)
        if time.monotonic() >= self._search_due_s:
            self.search_findings()

    def search_findings(self) -> None:
        """Search for findings, one piece of the recording at a time."""
        if not self._host.is_watching or self._worker.is_pending("search"):
            return
        source = self._host.viewer.source

        def search_timed() -> tuple[SearchResult, float]:
            begin_s = time.thread_time()
            return source.search_findings(), time.thread_time() - begin_s

        self._worker.submit(search_timed, self._finish_search, slot="search", routine=True)

    def _finish_search(self, searched: tuple[SearchResult, float]) -> None:
        result, cpu_s = searched
        self._search_due_s = time.monotonic() + result.pause_s
        if result.has_new:
            self.draw_frame()
        if not self._host.viewer.source.is_live:
            if result.is_behind:
                self.search_findings()
        elif result.is_behind:  # the job needs the machine, too
            self._host.set_timer(max(0.001, SEARCH_REST_FACTOR * cpu_s), self.search_findings)

    # --- pictures -------------------------------------------------------------------------------------------

    def draw_frame(self) -> None:
        """Have the current frame made and shown. If that takes long, header and transport show the new time first."""
        self._note_wanted()
        self._worker.submit(self._make_picture, self._show_picture, slot="frame")
        if self._interim_timer is None:
            self._interim_timer = asyncio.get_running_loop().call_later(ANSWER_S, self._host.call_later, self._show_interim)

    def _note_wanted(self) -> None:
        screen = self._host.shown_screen
        self._wanted = self._host.viewer.make_request(), screen, screen.state

    def _get_wanted(self) -> tuple[FrameRequest, MonitorScreen, ScreenState]:
        assert self._wanted is not None
        return self._wanted

    def _make_picture(self) -> ScreenPicture:
        """Make the latest picture requested, in the worker's thread."""
        request, screen, state = self._get_wanted()
        return screen.build_picture(self._host.viewer.builder.build_frame(request), state)

    def _show_interim(self) -> None:
        self._interim_timer = None
        host = self._host
        if host.is_watching and self._worker.is_pending("frame") and (frame := host.viewer.make_interim_frame()) is not None:
            host.shown_screen.show_time(frame)

    def _show_picture(self, picture: ScreenPicture) -> None:
        host = self._host
        if not host.is_running:
            return
        host.viewer.accept_frame(picture.frame)
        if self._worker.is_pending("frame"):  # the user has moved on
            picture = replace(picture, frame=host.viewer.move_to_present(picture.frame))
        if picture.screen_name == host.shown_name:
            host.shown_screen.show_picture(picture)
        if picture.next_work is not None:
            self._worker.submit(picture.next_work, lambda _: self.draw_frame(), slot="work", routine=True)
        host.handle_shown_frame(picture.frame)
