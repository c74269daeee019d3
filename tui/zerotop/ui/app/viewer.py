"""The screen's state without the screen: a source, a playhead, and what the keys do to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.failures.diagnosis import FailureFinder
from zerotop.analysis.live_view import LiveView
from zerotop.session.reader import run_to_end
from zerotop.ui.app.playhead import Playhead
from zerotop.ui.app.scrollback import Scrollback
from zerotop.ui.base.findings import choose_finding, find_time_marks
from zerotop.ui.base.footer import CursorState
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Controller, Source

_FPS_WINDOW_S = 2.0


class Viewer:
    """Makes frames and moves through time. Knows no terminal, so that tests need none."""

    def __init__(self, source: Source, controller: Controller | None, clock: Callable[[], float]) -> None:
        self.source = source
        self.controller = controller
        self.playhead = Playhead(clock)
        self.scrollback = Scrollback(source)
        self._clock = clock
        self._frame_times: deque[float] = deque()
        self._last_view: LiveView | None = None
        self._sampler_alive = True
        self.can_enter = False  # ranks can be asked to take the probe in
        self._chosen_finding: Annotation | None = None
        self._rank: int | None = None
        self._target_step: int | None = None  # the step gone to, until it is shown
        self._failures = FailureFinder(source.session)
        self._trace_request: int | None = None

    def poll(self) -> bool:
        """Reads what is new; True when the screen would look different."""
        return run_to_end(self.iter_poll())

    def iter_poll(self) -> Generator[None, None, bool]:
        """The same in pieces."""
        fresh = yield from self.source.iter_refresh()
        if self.playhead.playing and self._compute_cursor() >= self.source.end_ns:
            self.playhead.follow_end()
            return True
        return self.playhead.playing or (fresh and self.playhead.following)

    def check_job(self) -> None:
        """Asks whether the node's sampler still works and ranks lack the probe; system calls, so not for every frame."""
        running = self.controller if self.source.is_live else None
        self._sampler_alive = running is None or running.is_sampler_alive()
        self.can_enter = running is not None and running.can_enter()

    @property
    def sampler_missing(self) -> bool:
        """True when the job runs and nobody samples this node."""
        return not self._sampler_alive

    def make_frame(self) -> Frame:
        """What to draw now."""
        return run_to_end(self.iter_frame())

    def iter_frame(self) -> Generator[None, None, Frame]:
        """The same in pieces."""
        cursor = None if self.playhead.following else self._compute_cursor()
        self._last_view = yield from self.source.iter_view(cursor)
        if cursor == self._compute_cursor():
            self._target_step = None
        return self._build_frame(self._last_view)

    def make_interim_frame(self) -> Frame | None:
        """What the last frame was of, with what was changed since that needs no look at the recording."""
        return self._build_frame(self._last_view) if self._last_view is not None else None

    def _build_frame(self, view: LiveView) -> Frame:
        now = self._clock()
        self._frame_times.append(now)
        while now - self._frame_times[0] > _FPS_WINDOW_S:
            self._frame_times.popleft()
        known = self.source.findings_at(None)
        moment = self._build_moment(known)
        pane = self.scrollback.make_pane(view.output)
        cursor_ns = view.cursor_ns
        findings = tuple(finding for finding in known if finding.known_ns <= cursor_ns)
        told = self._find_chosen_finding(cursor_ns) or choose_finding(findings, cursor_ns)
        return Frame(
            view,
            moment,
            pane,
            self._measure_fps(),
            self._describe_problems(),
            findings,
            told,
            known,
            rank=self._find_shown_rank(),
            failure=self._failures.failure_at(cursor_ns),
            can_steer=self.can_steer,
            trace_request=self._trace_request,
        )

    @property
    def can_steer(self) -> bool:
        """Whether the job runs and can be asked for something."""
        return self.controller is not None and self.source.is_live

    def request_trace(self) -> None:
        """Asks for a look through the microscope at the next step. Raises OSError."""
        if self.controller is not None:
            self._trace_request = self.controller.request_trace(1, False)

    def _find_shown_rank(self) -> int | None:
        ranks = [rank.rank for rank in self._last_view.ranks] if self._last_view is not None else []
        # Without samples of processes nobody knows which ranks there are, except who chose one.
        return self._rank if self._rank in ranks or not ranks else min(ranks)

    def choose_rank(self, number: int) -> None:
        """The rank so many places further on among those there are; it stays within them."""
        ranks = sorted(rank.rank for rank in self._last_view.ranks) if self._last_view is not None else []
        shown = self._find_shown_rank()
        if shown in ranks:  # before the first sample there are none, and what was chosen stays
            self._rank = ranks[max(0, min(len(ranks) - 1, ranks.index(shown) + number))]

    def set_rank(self, rank: int) -> None:
        """This rank, which every screen then is about."""
        self._rank = rank

    def _measure_fps(self) -> float:
        passed = self._frame_times[-1] - self._frame_times[0]
        return (len(self._frame_times) - 1) / passed if passed > 0 else 0.0

    def _describe_problems(self) -> tuple[str, ...]:
        if not self.sampler_missing:
            return ()
        return ("The sampler has stopped, so CPU, host and GPU figures stand still: r starts another one.",)

    def _build_moment(self, known: tuple[Annotation, ...]) -> CursorState:
        begin, end, head = self.source.begin_ns, self.source.end_ns, self.playhead
        return CursorState(
            cursor_s=(head.compute_cursor(begin, end) - begin) / 1e9,
            end_s=max(0, end - begin) / 1e9,
            is_live=self.source.is_live,
            is_following=head.following,
            is_playing=head.playing,
            speed=head.speed,
            marks=find_time_marks(known, begin),
        )

    def _compute_cursor(self) -> int:
        return self.playhead.compute_cursor(self.source.begin_ns, self.source.end_ns)

    def scroll_output(self, lines: int, room: int) -> None:
        """Towards older output (positive) or newer; ``room`` is how many lines are seen."""
        self.scrollback.scroll_lines(lines, room, self._compute_cursor())

    def _leave_position(self) -> None:
        """Somebody goes elsewhere."""
        self.scrollback.return_to_end()
        self._target_step = None

    def follow_end(self) -> None:
        """Goes to the end, of the output too, and along with it."""
        self._leave_position()
        self.playhead.follow_end()

    def toggle_play(self) -> None:
        """Play or pause; at the end of a recording that no longer grows, play again from its begin."""
        head = self.playhead
        if head.playing:
            head.pause(self._compute_cursor())
        elif head.following and not self.source.is_live:
            head.play(self.source.begin_ns)
        elif head.following:
            head.pause(self._compute_cursor())
        else:
            head.play(self._compute_cursor())

    def seek_steps(self, number: int) -> None:
        """Stands where the step ``number`` after (or before) the one shown has just finished."""
        shown = self._last_view.progress.step if self._last_view is not None else None
        here = -1 if shown is None else shown
        self.go_to_step((here if self._target_step is None else self._target_step) + number)

    def go_to_step(self, step: int) -> None:
        """Stands where ``step`` has just finished, or at the begin or end where there is no such step."""
        self._leave_position()
        if step < 0:
            self.playhead.pause(self.source.begin_ns)
            self._target_step = -1
            return
        moment = self.source.find_step_end(step)
        if moment is None:
            self.playhead.follow_end()
        else:
            self.playhead.pause(moment)
            self._target_step = step

    def seek_seconds(self, seconds: float) -> None:
        """Moves by seconds; playing goes on."""
        self.go_to_ns(self._compute_cursor() + int(seconds * 1e9))

    def go_to_seconds(self, seconds: float) -> None:
        """Goes to a time since the recording's begin."""
        self.go_to_ns(self.source.begin_ns + int(seconds * 1e9))

    def go_to_share(self, share: float) -> None:
        """Goes to a share of the recording's length."""
        begin, end = self.source.begin_ns, self.source.end_ns
        self.go_to_ns(begin + int((end - begin) * share))

    def go_to_ns(self, cursor_ns: int) -> None:
        """Goes to a moment; at the end or beyond it, goes along with the end."""
        self._leave_position()
        if cursor_ns >= self.source.end_ns:
            self.playhead.follow_end()
        else:
            self.playhead.seek(max(self.source.begin_ns, cursor_ns))

    def go_to_finding(self, finding: Annotation) -> None:
        """Stands where a finding had just become known; it is the one told while the cursor stays there."""
        self._leave_position()
        self._chosen_finding = finding
        self.playhead.pause(min(finding.known_ns, self.source.end_ns))

    def seek_finding(self, direction: int) -> bool:
        """To the next finding (1) or the one before (-1). False where there is none."""
        known, cursor_ns = self.source.findings_at(None), self._compute_cursor()
        here = self._find_chosen_finding(cursor_ns)
        if here is not None and here in known:
            place = known.index(here) + direction
        elif direction > 0:
            place = sum(finding.known_ns <= cursor_ns for finding in known)
        else:
            place = sum(finding.known_ns < cursor_ns for finding in known) - 1
        if not 0 <= place < len(known):
            return False
        self.go_to_finding(known[place])
        return True

    def _find_chosen_finding(self, cursor_ns: int) -> Annotation | None:
        """The finding that was gone to, while the cursor is still there."""
        chosen = self._chosen_finding
        return chosen if chosen is not None and chosen.known_ns == cursor_ns and not self.playhead.following else None

    def change_speed(self, direction: int) -> None:
        """Faster (1) or slower (-1)."""
        self.playhead.change_speed(direction, self._compute_cursor())
