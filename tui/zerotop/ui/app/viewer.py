"""The screen's state without the screen: a source, a playhead, and what the keys do to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

from zerotop.analysis.annotations import Annotation
from zerotop.analysis.failures.diagnosis import Failures
from zerotop.analysis.live_view import LiveView
from zerotop.session.reader import whole
from zerotop.ui.app.playhead import Playhead
from zerotop.ui.app.scrollback import Scrollback
from zerotop.ui.base.findings import time_marks, weightiest
from zerotop.ui.base.footer import Moment
from zerotop.ui.base.footer_keys import entries
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
        self._drawn: deque[float] = deque()
        self._view: LiveView | None = None
        self._sampler_alive = True
        self.enterable = False  # ranks can be asked to take the probe in
        self._chosen: Annotation | None = None
        self._rank: int | None = None
        self._aim: int | None = None  # the step gone to, until it is shown
        self._failures = Failures(source.session)
        self._asked: int | None = None

    def poll(self) -> bool:
        """Reads what is new; True when the screen would look different."""
        return whole(self.polling())

    def polling(self) -> Generator[None, None, bool]:
        """The same in pieces."""
        fresh = yield from self.source.reading()
        if self.playhead.playing and self._cursor() >= self.source.end_ns:
            self.playhead.follow()
            return True
        return self.playhead.playing or (fresh and self.playhead.following)

    def check_job(self) -> None:
        """Asks whether the node's sampler still works and ranks lack the probe; system calls, so not for every frame."""
        running = self.controller if self.source.live else None
        self._sampler_alive = running is None or running.sampler_alive()
        self.enterable = running is not None and running.can_enter()

    @property
    def sampler_missing(self) -> bool:
        """True when the job runs and nobody samples this node."""
        return not self._sampler_alive

    def frame(self) -> Frame:
        """What to draw now."""
        return whole(self.framing())

    def framing(self) -> Generator[None, None, Frame]:
        """The same in pieces."""
        cursor = None if self.playhead.following else self._cursor()
        self._view = yield from self.source.viewing(cursor)
        if cursor == self._cursor():
            self._aim = None
        return self._frame(self._view)

    def present(self) -> Frame | None:
        """What the last frame was of, with what was changed since that needs no look at the recording."""
        return self._frame(self._view) if self._view is not None else None

    def _frame(self, view: LiveView) -> Frame:
        now = self._clock()
        self._drawn.append(now)
        while now - self._drawn[0] > _FPS_WINDOW_S:
            self._drawn.popleft()
        known = self.source.findings(None)
        moment = self._moment(known)
        keys = entries(moment, self.controller, self.sampler_missing, len(known), enterable=self.enterable)
        pane = self.scrollback.pane(view.output)
        cursor_ns = view.cursor_ns
        findings = tuple(finding for finding in known if finding.known_ns <= cursor_ns)
        told = self._chosen_here(cursor_ns) or weightiest(findings, cursor_ns)
        return Frame(
            view,
            moment,
            pane,
            self._fps(),
            self._problems(),
            keys,
            findings,
            told,
            known,
            rank=self._rank_shown(),
            failure=self._failures.at(cursor_ns),
            steered=self.steered,
            asked=self._asked,
        )

    @property
    def steered(self) -> bool:
        """Whether the job runs and can be asked for something."""
        return self.controller is not None and self.source.live

    def ask_to_look(self) -> None:
        """Asks for a look through the microscope at the next step. Raises OSError."""
        if self.controller is not None:
            self._asked = self.controller.look(1, False)

    def _rank_shown(self) -> int | None:
        ranks = [rank.rank for rank in self._view.ranks] if self._view is not None else []
        # Without samples of processes nobody knows which ranks there are, except who chose one.
        return self._rank if self._rank in ranks or not ranks else min(ranks)

    def choose_rank(self, number: int) -> None:
        """The rank so many places further on among those there are; it stays within them."""
        ranks = sorted(rank.rank for rank in self._view.ranks) if self._view is not None else []
        shown = self._rank_shown()
        if shown in ranks:  # before the first sample there are none, and what was chosen stays
            self._rank = ranks[max(0, min(len(ranks) - 1, ranks.index(shown) + number))]

    def set_rank(self, rank: int) -> None:
        """This rank, which every screen then is about."""
        self._rank = rank

    def _fps(self) -> float:
        passed = self._drawn[-1] - self._drawn[0]
        return (len(self._drawn) - 1) / passed if passed > 0 else 0.0

    def _problems(self) -> tuple[str, ...]:
        if not self.sampler_missing:
            return ()
        return ("The sampler has stopped, so CPU, host and GPU figures stand still: r starts another one.",)

    def _moment(self, known: tuple[Annotation, ...]) -> Moment:
        begin, end, head = self.source.begin_ns, self.source.end_ns, self.playhead
        return Moment(
            at_s=(head.cursor(begin, end) - begin) / 1e9,
            end_s=max(0, end - begin) / 1e9,
            live=self.source.live,
            following=head.following,
            playing=head.playing,
            speed=head.speed,
            marks=time_marks(known, begin),
        )

    def _cursor(self) -> int:
        return self.playhead.cursor(self.source.begin_ns, self.source.end_ns)

    def scroll_output(self, lines: int, room: int) -> None:
        """Towards older output (positive) or newer; ``room`` is how many lines are seen."""
        self.scrollback.scroll(lines, room, self._cursor())

    def _set_out(self) -> None:
        """Somebody goes elsewhere."""
        self.scrollback.forget()
        self._aim = None

    def follow(self) -> None:
        """Goes to the end, of the output too, and along with it."""
        self._set_out()
        self.playhead.follow()

    def toggle_play(self) -> None:
        """Play or pause; at the end of a recording that no longer grows, play again from its begin."""
        head = self.playhead
        if head.playing:
            head.pause(self._cursor())
        elif head.following and not self.source.live:
            head.play(self.source.begin_ns)
        elif head.following:
            head.pause(self._cursor())
        else:
            head.play(self._cursor())

    def seek_steps(self, number: int) -> None:
        """Stands where the step ``number`` after (or before) the one shown has just finished."""
        shown = self._view.progress.step if self._view is not None else None
        here = -1 if shown is None else shown
        self.go_to_step((here if self._aim is None else self._aim) + number)

    def go_to_step(self, step: int) -> None:
        """Stands where ``step`` has just finished, or at the begin or end where there is no such step."""
        self._set_out()
        if step < 0:
            self.playhead.pause(self.source.begin_ns)
            self._aim = -1
            return
        moment = self.source.step_time(step)
        if moment is None:
            self.playhead.follow()
        else:
            self.playhead.pause(moment)
            self._aim = step

    def seek_seconds(self, seconds: float) -> None:
        """Moves by seconds; playing goes on."""
        self.go_to_ns(self._cursor() + int(seconds * 1e9))

    def go_to_seconds(self, seconds: float) -> None:
        """Goes to a time since the recording's begin."""
        self.go_to_ns(self.source.begin_ns + int(seconds * 1e9))

    def go_to_share(self, share: float) -> None:
        """Goes to a share of the recording's length."""
        begin, end = self.source.begin_ns, self.source.end_ns
        self.go_to_ns(begin + int((end - begin) * share))

    def go_to_ns(self, cursor_ns: int) -> None:
        """Goes to a moment; at the end or beyond it, goes along with the end."""
        self._set_out()
        if cursor_ns >= self.source.end_ns:
            self.playhead.follow()
        else:
            self.playhead.seek(max(self.source.begin_ns, cursor_ns))

    def go_to_finding(self, finding: Annotation) -> None:
        """Stands where a finding had just become known; it is the one told while the cursor stays there."""
        self._set_out()
        self._chosen = finding
        self.playhead.pause(min(finding.known_ns, self.source.end_ns))

    def seek_finding(self, direction: int) -> bool:
        """To the next finding (1) or the one before (-1). False where there is none."""
        known, cursor_ns = self.source.findings(None), self._cursor()
        here = self._chosen_here(cursor_ns)
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

    def _chosen_here(self, cursor_ns: int) -> Annotation | None:
        """The finding that was gone to, while the cursor is still there."""
        chosen = self._chosen
        return chosen if chosen is not None and chosen.known_ns == cursor_ns and not self.playhead.following else None

    def change_speed(self, direction: int) -> None:
        """Faster (1) or slower (-1)."""
        self.playhead.change_speed(direction, self._cursor())
