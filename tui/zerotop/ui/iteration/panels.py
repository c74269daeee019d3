"""The panels of the iteration screen."""

from __future__ import annotations

from abc import abstractmethod

from zerotop.analysis.live_view import State
from zerotop.ui.base.frame import Frame
from zerotop.ui.drawing.glyphs import Glyphs
from zerotop.ui.drawing.rows import Row, filled
from zerotop.ui.drawing.units import chosen
from zerotop.ui.iteration.clipboard import phases_text, waveform_text
from zerotop.ui.iteration.drawing import Shown, draw_nothing, draw_waveform
from zerotop.ui.iteration.model import Folding
from zerotop.ui.iteration.samples import draw_samples
from zerotop.ui.iteration.table import draw_phases
from zerotop.ui.widgets.frame_widget import Drawn


class _Kept(Drawn, can_focus=True):
    """A panel that draws only what is another picture than the last one."""

    def __init__(self, glyphs: Glyphs, folding: Folding, *, id: str) -> None:
        super().__init__(glyphs, id=id)
        self.folding = folding
        self._of: tuple[object, ...] = ()

    def _drawn_of(self, *what: object) -> bool:
        """Whether the rows are already of this, which must be compared by identity."""
        same = len(what) == len(self._of) and all(one is two or one == two for one, two in zip(what, self._of, strict=True))
        self._of = what
        return same and bool(self._rows)

    def draw(self, frame: Frame, width: int, height: int) -> list[Row]:
        shown = self.folding.shown(frame)
        if shown is None:
            self._of = ()
            return self.nothing(frame, width, height)
        kept = self._drawn_of(shown, width, height, self.has_focus, chosen())
        return self._rows if kept else self.picture(shown, width, height)

    def nothing(self, frame: Frame, width: int, height: int) -> list[Row]:
        """Where there is nothing to fold."""
        return [filled((), width, self.glyphs)] * height

    @abstractmethod
    def picture(self, shown: Shown, width: int, height: int) -> list[Row]:
        """What it is of."""


class Waves(_Kept):
    """The folded iteration."""

    def nothing(self, frame: Frame, width: int, height: int) -> list[Row]:
        return draw_nothing(_missing(self.folding, frame), width, height, self.glyphs, focused=self.has_focus)

    def picture(self, shown: Shown, width: int, height: int) -> list[Row]:
        return draw_waveform(shown, width, height, self.glyphs, self.folding.scales, focused=self.has_focus)

    def copyable(self) -> str:
        """The curves."""
        shown = self.folding.shown(self.frame) if self.frame is not None else None
        return waveform_text(shown.fold) if shown is not None else ""


class Phases(_Kept):
    """Its phases as a table."""

    def picture(self, shown: Shown, width: int, height: int) -> list[Row]:
        return draw_phases(shown.fold, shown.pinned, width, height, self.glyphs, focused=self.has_focus)

    def copyable(self) -> str:
        """All rows, not only those that there is room for."""
        shown = self.folding.shown(self.frame) if self.frame is not None else None
        return phases_text(shown.fold, shown.pinned) if shown is not None else ""


class Samples(_Kept):
    """What it rests on."""

    def picture(self, shown: Shown, width: int, height: int) -> list[Row]:
        return draw_samples(shown.fold, width, height, self.glyphs, focused=self.has_focus)


def _missing(folding: Folding, frame: Frame) -> tuple[tuple[str, str], ...]:
    """Why there is nothing to fold, and how to get it."""
    if folding.busy:
        return (("Folding iterations.", "muted"),)
    if folding.waveforms.known(frame.view.cursor_ns):
        return (
            ("No iteration is finished yet.", "text"),
            ("The first ones are folded as soon as they are: GPUs, cores, power and memory over their phases.", "muted"),
        )
    pid = next((rank.pid for rank in frame.view.ranks if rank.alive), None)
    # While a job starts, its processes are there before their engines are.
    if not frame.view.ranks or frame.view.job.state is State.STARTING:
        return (
            ("No rank has made its engine yet.", "text"),
            ("Iterations are folded when the first ones are finished.", "muted"),
        )
    command = f"zerotop attach {pid} --enter" if pid is not None else "zerotop run -- COMMAND"
    return (
        ("Where an iteration begins and ends is known only inside the ranks, and nothing was recorded there.", "text"),
        (f"To see its phases: {command}", "value"),
        ("A job that zerotop launches (zerotop run) has this from the start.", "muted"),
    )
