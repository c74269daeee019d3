"""What the output screen looks at: lines at the cursor or elsewhere, and what is looked for in them. Knows no terminal."""

from __future__ import annotations

from dataclasses import replace

from zerotop.analysis.output.line_steps import StepClock
from zerotop.analysis.output.lines import Place, Reel
from zerotop.analysis.output.search import Search
from zerotop.session.reader import Session
from zerotop.ui.output.drawing import BEFORE_CURSOR, Found, Page


class Reading:
    """Goes along with the cursor until somebody scrolls, and again once somebody goes to another moment."""

    def __init__(self, session: Session) -> None:
        self.reel = Reel(session)
        self.wrapped = False
        self.typed: str | None = None  # what is being typed to be looked for; None while nobody types
        self.here: Place | None = None  # the match gone to
        self.search: Search | None = None
        self._session = session
        self._steps = StepClock(session)
        self._top: Place | None = None  # the first line seen; None goes along with the cursor
        self._seeks = 0
        self._room = 1
        self._wanted: tuple[Place, int] | None = None  # from where and which way a match is still being looked for
        self._failed = False
        self._going = False

    def look(self, cursor_ns: int, seeks: int) -> None:
        """At this cursor; ``seeks`` is how often somebody has gone to another moment."""
        if seeks != self._seeks:
            self._seeks, self._top = seeks, None
            if not self._going:
                self.here = None
            self._going = False
        self.reel.look(cursor_ns)

    # What is seen

    def page(self, room: int) -> Page:
        """``room`` lines, or as many as there are."""
        self._room = max(1, room)
        reel = self.reel
        top = self._place()
        lines = tuple(reel.lines(top, self._room))
        last = next((line.place for line in reversed(lines) if line.place is not None), None)
        below = reel.moved(last, 1) if last is not None else top
        newer = reel.moved(below, 1) != below
        begin_ns = self._session.begin_ns
        return Page(
            lines=lines,
            steps=tuple(self._steps.at(line.time_ns) for line in lines),
            begin_ns=begin_ns,
            longest_s=max(0, max(reel.cursor_ns, *(line.time_ns for line in lines), begin_ns) - begin_ns) / 1e9,
            follows=self._top is None,
            marked=None if reel.unfinished else reel.moved(reel.cursor, -1),
            here=self.here,
            share=1.0 if not newer and self._top is None else reel.share(top),
            whole=reel.moved(top, -1) == top and not newer,
            newer=newer,
            wrapped=self.wrapped,
        )

    def _place(self) -> Place:
        """The first line seen: at the end of the output the last lines are, in the past some that came later too."""
        if self._top is not None:
            return self._top
        reel = self.reel
        most = self._room - max(1, int(self._room * BEFORE_CURSOR))
        later = sum(1 for _, _ in zip(range(most), reel.later(reel.cursor), strict=False))
        return reel.moved(reel.cursor, -(self._room - later - reel.unfinished))

    def scroll(self, lines: int) -> None:
        """Towards older lines (positive) or newer ones, as far as there are any."""
        before = self._place()
        top = min(self.reel.moved(before, -lines), self._end())
        if top == before:
            return
        self._top = None
        if top != self._place():
            self._top = top

    def _end(self) -> Place:
        """The first line seen when the last one is."""
        reel = self.reel
        last = Place(reel.blocks.sealed, len(reel.blocks.finished(reel.blocks.sealed).texts))
        return reel.moved(last, -(self._room - reel.unfinished))

    def scroll_to(self, share: float) -> None:
        """To a share of the whole output."""
        self._top = min(self.reel.at_share(share), self._end())

    # What is looked for

    def start_typing(self) -> None:
        """Somebody wants to look for something."""
        self.typed = self.search.text if self.search is not None else ""

    def type(self, text: str) -> None:
        """What was typed so far: the lines that have it are shown from here on."""
        self.typed = text
        self._set_search(text)
        if self.search is not None:
            self._wanted = (self._place(), 1)

    def _set_search(self, text: str) -> None:
        self.search = Search(self.reel, text) if text else None
        self.here, self._wanted, self._failed = None, None, False

    def stop_typing(self) -> None:
        """What was typed stays what is looked for."""
        self.typed = None

    def forget_search(self) -> None:
        """Nothing is looked for any more."""
        self.typed = None
        self._set_search("")

    def want(self, direction: int) -> None:
        """The next match (1) or the one before (-1) is to be gone to, as soon as it is found."""
        if self.search is None:
            return
        begin = self.here if self.here is not None else self.reel.cursor if self._top is None else self._top
        self._failed = False
        self._wanted = (self.reel.moved(begin, 1) if direction > 0 and self.here is not None else begin, direction)

    def going(self) -> int | None:
        """When the match found last was printed, for somebody who goes there now."""
        self._going = self.here is not None
        return None if self.here is None else self.reel.time_ns(self.here)

    @property
    def busy(self) -> bool:
        """Whether there is still something to search."""
        return self.search is not None and (self._wanted is not None or not self.search.done)

    def work(self, budget_s: float) -> Place | None:
        """Searches for about so long; returns the match that was wanted once it is found."""
        if self.search is None:
            return None
        if self._wanted is None:
            self.search.work(budget_s)
            return None
        place, direction = self._wanted
        match, rest = self.search.near(place, direction, budget_s)
        self._wanted = None if rest is None else (rest, direction)
        if match is not None:
            self.here = match
            self._show(match)
        else:
            self._failed = rest is None
        return match

    def _show(self, place: Place) -> None:
        """Brings a line into what is seen, if it is not."""
        top = self._place()
        if not top <= place < self.reel.moved(top, self._room - self.reel.unfinished):
            self._top = self.reel.moved(place, -int(self._room * BEFORE_CURSOR))

    def found(self) -> Found:
        """What became of it."""
        search = self.search
        if search is None:
            return Found(self.typed or "", None, self.typed is not None)
        found = Found(
            text=self.typed if self.typed is not None else search.text,
            pattern=search.pattern,
            typing=self.typed is not None,
            count=search.count,
            searched=search.searched,
            looking=self._wanted is not None,
            failed=self._failed,
            marks=search.shares(),
        )
        return found if self.here is None else replace(found, number=search.number(self.here))
