"""What the iteration screen folds, and how it is looked at: without a terminal."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.fold_cache import SIZES, Waveforms, wider
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source
from zerotop.ui.charts import Watched
from zerotop.ui.iteration.drawing import Shown
from zerotop.ui.iteration.lanes import LANES, lanes

_AT_ONCE_S = 0.012  # of folding before anything is drawn


@dataclass(frozen=True, eq=False)
class Pinned:
    """A fold that stays, behind later ones."""

    fold: WaveformFold
    name: str  # whose, where it is another session's


class Folding:
    """The fold at a frame, of the ranks and iterations that were chosen."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.waveforms = Waveforms(source.session, lambda: source.processes)
        self.number: int | None = None  # iterations to fold; None: all of the level
        self.every_rank = True
        self.first_lane = LANES[0].id
        self.pinned: Pinned | None = None
        self.scales = Watched()
        self._last: WaveformFold | None = None
        self._pieces: Generator[None, None, WaveformFold | None] | None = None  # of the fold that is being made
        self._shown: Shown | None = None
        self._frame: Frame | None = None
        self._how: tuple[object, ...] = ()

    def at(self, frame: Frame) -> WaveformFold | None:
        """The fold to show; the same object while nothing changed. While another is being made it is the one before."""
        if not self.busy:
            following = frame.moment.live and frame.moment.following
            rank = None if self.every_rank else frame.rank
            self._pieces = self.waveforms.folding(frame.view.cursor_ns, rank, self.number, hurry=not following)
            self.go_on(_AT_ONCE_S)
        return self._last

    @property
    def busy(self) -> bool:
        """Whether a fold is being made."""
        return self._pieces is not None

    def go_on(self, most_s: float) -> None:
        """Makes the fold for about so long: it takes longer than keys may wait."""
        due_s = time.monotonic() + most_s
        try:
            while self._pieces is not None:
                next(self._pieces)
                if time.monotonic() >= due_s:
                    return
        except StopIteration as end:
            self._last, self._pieces, self._frame = end.value, None, None

    def shown(self, frame: Frame) -> Shown | None:
        """All that is drawn; the same object while it is the same. None where nothing can be folded."""
        how = (self.number, self.every_rank, self.first_lane, self.pinned)
        if frame is self._frame and how == self._how:
            return self._shown
        fold = self.at(frame)
        self._frame, self._how = frame, how
        if fold is None:
            self._shown = None
            return None
        pinned = self.pinned if self.pinned is not None and self.pinned.fold is not fold else None
        shown = Shown(fold, pinned.fold if pinned else None, pinned.name if pinned else "", self.first_lane)
        if self._shown is None or not _same(self._shown, shown):
            self._shown = shown
        return self._shown

    def widen(self, direction: int) -> str:
        """More iterations, or fewer; a sentence where there are none to add or to leave out."""
        folded = self._last.iterations if self._last is not None else SIZES[0]
        if direction > 0 and self.number is not None and folded < self.number:
            return "There are no more iterations to fold with these."
        if direction < 0 and folded <= SIZES[0]:
            return f"Fewer than {SIZES[0]} iterations are not folded."
        self.number = wider(self.number, self._last, direction)
        return ""

    def all_of_level(self) -> str:
        """All iterations since the last change of level; a sentence where they are folded already."""
        said = "" if self.number is not None else "All since iterations last took another time are folded already."
        self.number = None
        return said

    def pin(self, fold: WaveformFold | None, name: str = "") -> None:
        """Lays a fold behind those that follow; None takes it away."""
        self.pinned = Pinned(fold, name) if fold is not None else None
        self.scales.forget()

    def toggle_pin(self) -> bool:
        """Pins what is shown, or where something is pinned takes it away. Whether there was anything to do it with."""
        if self.pinned is not None:
            self.pin(None)
            return True
        self.pin(self._last)
        return self._last is not None

    def next_lane(self) -> None:
        """Another lane comes first."""
        if self._last is None:
            return
        ids = [lane.id for lane in lanes(self._last)]
        if ids:
            place = ids.index(self.first_lane) if self.first_lane in ids else 0
            self.first_lane = ids[(place + 1) % len(ids)]

    def choose(self, *, every_rank: bool) -> None:
        """All ranks together, or the chosen one."""
        if every_rank != self.every_rank:
            self.every_rank = every_rank
            self.scales.forget()


def _same(one: Shown, other: Shown) -> bool:
    return one.fold is other.fold and one.pinned is other.pinned and one.first_lane == other.first_lane
