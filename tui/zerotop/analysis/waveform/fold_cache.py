"""The waveform of a recording at any cursor: folded when an iteration is finished, kept while none is."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from zerotop.analysis.steps.step_table import RankSteps, StepTable
from zerotop.analysis.waveform.alignment import MOST, Chosen, choose
from zerotop.analysis.waveform.fold import WaveformFold, folding, leader, members
from zerotop.analysis.waveform.signals import Late
from zerotop.session.reader import Session, whole

# Numbers of iterations to choose from; all of the level lie between those around their number.
SIZES = (3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

_KEPT = 32
# Of so many and more iterations the last one or two may be missing, of twice as many twice as many.
_GRAINS = 32
# Folding anew while a job runs: after a second at the earliest, and so that it takes at most this share of the time.
_REST_S, _SHARE = 1.0, 0.03


class Waveforms:
    """Folds of one session. What was folded is kept for a while, as long as a cursor moves to and fro between few steps."""

    def __init__(
        self,
        session: Session,
        processes: Callable[[], Sequence[RankSteps]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``processes``: gives the session's rank processes with their steps up to date, where the caller has them."""
        self.session = session
        self._processes = processes or _own(session)
        self._clock = clock
        self._late = Late()
        self._kept: OrderedDict[tuple[object, ...], WaveformFold | None] = OrderedDict()
        self._last: tuple[tuple[object, ...], WaveformFold | None] | None = None
        self._due_s = -1.0

    def at(
        self, cursor_ns: int, rank: int | None = None, number: int | None = None, *, hurry: bool = True
    ) -> WaveformFold | None:
        """The fold of the last ``number`` finished iterations before the cursor, or with None of all of their level.

        Args:
            rank: whose; None folds all ranks together.
            hurry: False lets a fold of an iteration or two earlier do for a while, as when a job is followed.

        Returns:
            None where no rank has finished an iteration.
        """
        return whole(self.folding(cursor_ns, rank, number, hurry=hurry))

    def folding(
        self, cursor_ns: int, rank: int | None, number: int | None, *, hurry: bool
    ) -> Generator[None, None, WaveformFold | None]:
        """The same in pieces; in one where nothing has to be folded. Only one fold may be made at a time."""
        ranks = members(self._processes(), cursor_ns)
        if not ranks:
            return None
        lead = leader(ranks, rank)
        count = bisect_right(lead.rows["end_unix_ns"], cursor_ns)
        what = (lead.source, len(ranks), rank, number)
        if not hurry and self._last is not None and self._last[0] == what and self._clock() < self._due_s:
            return self._last[1]
        chosen = self._chosen(lead, count, number)
        key = (*what, len(chosen.places), *chosen.places[-1:].tolist())
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            # What does not depend on what was looked at before takes longer.
            pieces = folding(self.session, ranks, rank, chosen, cursor_ns, Late() if hurry else self._late)
            self._kept[key], took_s = yield from _timed(pieces, self._clock)
            self._due_s = self._clock() + max(_REST_S, took_s / _SHARE)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._last = (what, self._kept[key])
        return self._kept[key]

    def _chosen(self, lead: RankSteps, count: int, number: int | None) -> Chosen:
        """The iterations to fold when so many are finished: of many not quite the last, so that few steps change any."""
        found = choose(lead.rows[:count], number)
        grain = 1 << max(0, (len(found.places) // _GRAINS).bit_length() - 1)
        return found if grain == 1 or not count % grain else choose(lead.rows[: count - count % grain], number)

    def known(self, cursor_ns: int) -> bool:
        """Whether any rank tells of its steps: without, nothing can be folded, however long one waits."""
        return bool(members(self._processes(), cursor_ns))


def _timed(
    pieces: Generator[None, None, WaveformFold | None], clock: Callable[[], float]
) -> Generator[None, None, tuple[WaveformFold | None, float]]:
    """What comes of pieces of work, and the seconds that they take, without what is done in between."""
    took_s = 0.0
    while True:
        begun_s = clock()
        try:
            next(pieces)
        except StopIteration as end:
            return end.value, took_s + clock() - begun_s
        took_s += clock() - begun_s
        yield


def _own(session: Session) -> Callable[[], Sequence[RankSteps]]:
    """The session's steps, taken in when it has read more."""
    steps, read = StepTable(session, memory=False), -1

    def processes() -> Sequence[RankSteps]:
        nonlocal read
        now = sum(len(source.array) for source in session.sources["spans"])
        if now != read:
            read = now
            steps.update()
        return steps.processes

    return processes


def last_fold(path: Path) -> WaveformFold | None:
    """The fold at the end of a recording, of all its ranks; None where none has finished an iteration.

    Raises SessionError where it cannot be read.
    """
    session = Session.open(path)
    return Waveforms(session).at(session.last_written_ns)


def wider(number: int | None, shown: WaveformFold | None, direction: int) -> int | None:
    """The next larger (1) or smaller (-1) number of iterations; None where that is all of the level.

    ``shown``: what ``number`` now gives.
    """
    now = number if number is not None else shown.iterations if shown is not None else MOST
    if direction > 0:
        return next((size for size in SIZES if size > now), SIZES[-1])
    return next((size for size in reversed(SIZES) if size < now), SIZES[0])
