"""The state of the iteration screen, without a terminal: the fold and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.fold_cache import SIZES, WaveformCache, choose_next_size
from zerotop.analysis.waveform.idle_time import measure_launch_time
from zerotop.ui.base.frame import Frame
from zerotop.ui.charts import GrowingScales
from zerotop.ui.iteration.drawing import ShownWaveform
from zerotop.ui.iteration.labels import describe_pace
from zerotop.ui.iteration.lanes import LANES, choose_curves
from zerotop.ui.ranks.awaited_rank import AwaitedRankFinder


@dataclass(frozen=True, eq=False)
class PinnedFold:
    """A fold drawn behind later ones."""

    fold: WaveformFold
    name: str  # of the recording, if it is another one


class FoldModel:
    """The fold at a frame, for the chosen ranks and iterations."""

    def __init__(self, source: RecordingSource) -> None:
        self.source = source
        self.waveforms = WaveformCache(source.recording, lambda: source.rank_steps)
        self.wanted_count: int | None = None  # iterations to fold; None: all since the pace last changed
        self.every_rank: bool | None = None  # None: the rank that the others wait for, else all
        self.first_lane = LANES[0].id
        self.pinned: PinnedFold | None = None
        self.scales = GrowingScales()
        self._awaited = AwaitedRankFinder(source)
        self._last_fold: WaveformFold | None = None
        self._last_shown: ShownWaveform | None = None
        self._shown_frame: Frame | None = None
        self._shown_choices: tuple[object, ...] = ()

    def fold_at(self, frame: Frame) -> WaveformFold | None:
        """Return the fold to show; the same object while nothing changed, the previous one while another is due."""
        following = frame.moment.is_live and frame.moment.is_following
        rank = self._awaited.find(frame).rank if self.every_rank is None else None if self.every_rank else frame.rank
        fold = self.waveforms.find_fold(frame.view.cursor_ns, rank, self.wanted_count, hurry=not following)
        return self._last_fold if self.is_busy else fold

    @property
    def is_busy(self) -> bool:
        """Whether a fold is due: computing it takes longer than a picture may wait."""
        return self.waveforms.is_missing

    def finish_work(self) -> None:
        """Compute the fold for the next picture."""
        self.waveforms.make_missing_fold()
        self._shown_frame = None

    def find_shown(self, frame: Frame) -> ShownWaveform | None:
        """Return all that is drawn, the same object while it is unchanged. None: nothing can be folded."""
        choices = (self.wanted_count, self.every_rank, self.first_lane, self.pinned)
        if frame is self._shown_frame and choices == self._shown_choices:
            return self._last_shown
        fold = self._last_fold = self.fold_at(frame)
        self._shown_frame, self._shown_choices = frame, choices
        if fold is None:
            self._last_shown = None
            return None
        pinned = self.pinned if self.pinned is not None and self.pinned.fold is not fold else None
        is_over, progress = frame.view.job.state.is_over, frame.view.progress
        shown = ShownWaveform(
            fold,
            pinned.fold if pinned else None,
            pinned.name if pinned else "",
            self.first_lane,
            delay=self._awaited.find(frame).sentence if self.every_rank is not False and fold.world > 1 else "",
            launches=measure_launch_time(fold) if _waits_for_launches(frame) else None,
            pace=describe_pace(fold, progress.iteration_s, progress.recent_iterations, is_over=is_over),
        )
        if self._last_shown is None or not _is_same(self._last_shown, shown):
            self._last_shown = shown
        return self._last_shown

    def change_count(self, direction: int) -> str:
        """Fold more iterations or fewer. Returns a sentence if that is not possible."""
        folded = self._last_fold.iterations if self._last_fold is not None else SIZES[0]
        if direction > 0 and self.wanted_count is not None and folded < self.wanted_count:
            return "No more iterations to fold."
        if direction < 0 and folded <= SIZES[0]:
            return f"At least {SIZES[0]} iterations are folded."
        self.wanted_count = choose_next_size(self.wanted_count, self._last_fold, direction)
        return ""

    def fold_level(self) -> str:
        """Fold all iterations since the pace last changed. Returns a sentence if they already are."""
        problem = "" if self.wanted_count is not None else "All iterations since the pace last changed are already folded."
        self.wanted_count = None
        return problem

    def pin_fold(self, fold: WaveformFold | None, name: str = "") -> None:
        """Draw a fold behind later ones; None removes it."""
        self.pinned = PinnedFold(fold, name) if fold is not None else None
        self.scales.clear()

    def toggle_pin(self) -> str:
        """Pin the current fold, or unpin. Returns a sentence if there is no fold yet."""
        if self.pinned is not None:
            self.pin_fold(None)
            return ""
        self.pin_fold(self._last_fold)
        return "" if self._last_fold is not None else "Nothing to pin yet."

    def choose_next_lane(self) -> None:
        """Put the next lane first."""
        if self._last_fold is None:
            return
        ids = [lane.id for lane in choose_curves(self._last_fold)]
        if ids:
            place = ids.index(self.first_lane) if self.first_lane in ids else 0
            self.first_lane = ids[(place + 1) % len(ids)]

    @property
    def folds_every_rank(self) -> bool:
        """Whether the shown fold is of all ranks together."""
        return self._last_fold is None or self._last_fold.rank is None

    def choose_ranks(self, *, every_rank: bool) -> None:
        """Fold all ranks together, or only the chosen one."""
        if every_rank != self.every_rank:
            self.every_rank = every_rank
            self.scales.clear()


def _waits_for_launches(frame: Frame) -> bool:
    """Whether a finding says that the GPUs wait for launches, as they still did in the last steps that it judged."""
    return any(one.name == "launch_bound" and "until_step" not in one.evidence for one in frame.findings)


def _is_same(one: ShownWaveform, other: ShownWaveform) -> bool:
    return (
        one.fold is other.fold
        and one.pinned is other.pinned
        and (one.first_lane, one.delay, one.pace, one.launches)
        == (other.first_lane, other.delay, other.pace, other.launches)
    )
