"""The state of the screen without the screen: a source, a playhead, and the effects of keys on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from zerotop.analysis.findings import Finding
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.app.frame_builder import FrameBuilder, FrameRequest, build_cursor_state, find_shown_rank
from zerotop.ui.app.playhead import Playhead
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Controller


class Viewer:
    """Moves through time and holds the last frame. It needs no terminal, so tests need none either.

    Belongs to the thread that answers keys. It only uses those parts of the source that any thread may use; ``builder``
    reads the recording, in the thread that makes frames.
    """

    def __init__(self, source: RecordingSource, controller: Controller | None, clock: Callable[[], float]) -> None:
        self.source = source
        self.controller = controller
        self.builder = FrameBuilder(source, controller)
        self.playhead = Playhead(clock)
        self.can_enter = False  # the probe can be injected into ranks
        self._sampler_alive = True
        self._last_frame: Frame | None = None
        self._chosen_finding: Finding | None = None
        self._rank: int | None = None
        self._target_step: int | None = None  # the step gone to, until it is shown
        self._seek_count = 0
        self._trace_request: int | None = None

    # Frames

    def make_request(self) -> FrameRequest:
        """Return the request for a frame of this moment."""
        return FrameRequest(
            playhead=copy.copy(self.playhead),
            rank=self._rank,
            finding=self._find_chosen_finding(self.compute_cursor()),
            seek_count=self._seek_count,
            sampler_missing=self.sampler_missing,
            trace_request=self._trace_request,
        )

    def accept_frame(self, frame: Frame) -> None:
        """Note the frame that is shown: steps and ranks are counted from those in it."""
        self._last_frame = frame
        if frame.view.cursor_ns == self.compute_cursor():
            self._target_step = None

    def make_interim_frame(self) -> Frame | None:
        """Return the last frame with the present cursor, to be shown until the frame for that cursor is made."""
        return None if self._last_frame is None else self.move_to_present(self._last_frame)

    def move_to_present(self, frame: Frame) -> Frame:
        """Return a frame with the cursor of this moment."""
        return replace(frame, moment=build_cursor_state(self.source, self.playhead, frame.all_findings))

    def poll(self) -> bool:
        """Read new records at once; True if the screen would look different."""
        fresh = self.source.refresh()
        return self.stop_at_end() or self.playhead.playing or (fresh and self.playhead.following)

    def make_frame(self) -> Frame:
        """Make the frame of this moment at once."""
        frame = self.builder.build_frame(self.make_request())
        self.accept_frame(frame)
        return frame

    def stop_at_end(self) -> bool:
        """Follow the end if playing has come to it; True then."""
        if self.playhead.playing and self.compute_cursor() >= self.source.end_ns:
            self.playhead.follow_end()
            return True
        return False

    # The job

    def check_job(self) -> None:
        """Check whether the node's sampler works and ranks lack the probe; system calls, so not for every frame."""
        running = self.controller if self.source.is_live else None
        self._sampler_alive = running is None or running.is_sampler_alive()
        self.can_enter = running is not None and running.can_enter()

    @property
    def sampler_missing(self) -> bool:
        """True when the job runs and nobody samples this node."""
        return not self._sampler_alive

    @property
    def can_control(self) -> bool:
        """Whether the job runs and can be asked for something."""
        return self.controller is not None and self.source.is_live

    def request_trace(self) -> None:
        """Ask for a look through the microscope at the next step. Raises OSError."""
        if self.controller is not None:
            self._trace_request = self.controller.request_trace(1, False)

    # Ranks

    def choose_rank(self, number: int, shown: int | None = None) -> None:
        """Choose the rank ``number`` places further on; the choice stays within the ranks there are.

        ``shown``: the rank to count from before one is chosen; None: the first one.
        """
        if self._last_frame is None:
            return
        view = self._last_frame.view
        ranks = sorted(rank.rank for rank in view.ranks)
        shown = find_shown_rank(view, shown if self._rank is None else self._rank)
        if shown in ranks:  # before the first sample there are none, and the choice stands
            self._rank = ranks[max(0, min(len(ranks) - 1, ranks.index(shown) + number))]

    def resume_from(self, other: Viewer) -> None:
        """Take over the place in time and the rank of another viewer of the same recording."""
        self.playhead, self._rank = other.playhead, other._rank

    def set_rank(self, rank: int) -> None:
        """Choose this rank, for every screen."""
        self._rank = rank

    # Time

    def compute_cursor(self) -> int:
        """The cursor in unix nanoseconds."""
        return self.playhead.compute_cursor(self.source.begin_ns, self.source.end_ns)

    def scroll_output(self, lines: int, room: int) -> Callable[[], None]:
        """Return the job, for the thread that makes frames, that scrolls the output, see :class:`Scrollback`."""
        cursor_ns, seek_count = self.compute_cursor(), self._seek_count
        return lambda: self.builder.scroll_output(lines, room, cursor_ns, seek_count)

    def _begin_seek(self) -> None:
        self._seek_count += 1
        self._target_step = None

    def follow_end(self) -> None:
        """Follow the end, of the output too."""
        self._begin_seek()
        self.playhead.follow_end()

    def toggle_play(self) -> None:
        """Play or pause; at the end of a recording that no longer grows, play again from its first step."""
        head = self.playhead
        if head.playing:
            head.pause(self.compute_cursor())
        elif head.following and not self.source.is_live:
            head.play(self.source.first_step_ns)
        elif head.following:
            head.pause(self.compute_cursor())
        else:
            head.play(self.compute_cursor())

    def seek_steps(self, number: int) -> None:
        """Go to the end of the step ``number`` steps after (or before) the shown one."""
        shown = self._last_frame.view.progress.step if self._last_frame is not None else None
        current = -1 if shown is None else shown
        self.go_to_step((current if self._target_step is None else self._target_step) + number)

    def go_to_step(self, step: int) -> None:
        """Go to where ``step`` has just finished, or to the begin or end where there is no such step."""
        self._begin_seek()
        if step < 0:
            self.playhead.pause(self.source.begin_ns)
            self._target_step = -1
            return
        end_ns = self.source.find_step_end(step)
        if end_ns is None:
            self.playhead.follow_end()
        else:
            self.playhead.pause(end_ns)
            self._target_step = step

    def seek_seconds(self, seconds: float) -> None:
        """Move the cursor by seconds. Playback continues."""
        self.go_to_ns(self.compute_cursor() + int(seconds * 1e9))

    def go_to_seconds(self, seconds: float) -> None:
        """Go to a time since the recording's begin."""
        self.go_to_ns(self.source.begin_ns + int(seconds * 1e9))

    def go_to_share(self, share: float) -> None:
        """Go to a share of the recording's length."""
        begin, end = self.source.begin_ns, self.source.end_ns
        self.go_to_ns(begin + int((end - begin) * share))

    def go_to_ns(self, cursor_ns: int) -> None:
        """Go to a moment; at the end or beyond it, follow the end."""
        self._begin_seek()
        if cursor_ns >= self.source.end_ns:
            self.playhead.follow_end()
        else:
            self.playhead.seek(max(self.source.begin_ns, cursor_ns))

    def change_speed(self, direction: int) -> None:
        """Play faster (1) or slower (-1)."""
        self.playhead.change_speed(direction, self.compute_cursor())

    # Findings

    def go_to_finding(self, finding: Finding) -> None:
        """Go to where it was first told, with what was known then; it is the headline while the cursor stays there."""
        self._begin_seek()
        told_ns = finding.detected_ns
        then = (one for one in self.source.findings_at(told_ns) if one.event == finding.event)
        self._chosen_finding = next(then, finding)
        self.playhead.pause(min(told_ns, self.source.end_ns))

    def seek_finding(self, direction: int) -> bool:
        """Go to the next finding (1) or the previous one (-1). False if there is none."""
        known, cursor_ns = sorted(self.source.findings_at(None), key=lambda one: one.detected_ns), self.compute_cursor()
        current = self._find_chosen_finding(cursor_ns)
        place = next((index for index, one in enumerate(known) if current and one.event == current.event), None)
        if place is not None:
            index = place + direction
        elif direction > 0:
            index = sum(finding.detected_ns <= cursor_ns for finding in known)
        else:
            index = sum(finding.detected_ns < cursor_ns for finding in known) - 1
        if not 0 <= index < len(known):
            return False
        self.go_to_finding(known[index])
        return True

    def _find_chosen_finding(self, cursor_ns: int) -> Finding | None:
        """Return the finding gone to, while the cursor is still there."""
        chosen, stays = self._chosen_finding, not self.playhead.following
        return chosen if chosen is not None and stays and min(chosen.detected_ns, self.source.end_ns) == cursor_ns else None
