"""The waveform of a recording at any cursor, folded again when an iteration is finished."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zerotop.analysis.waveform.alignment import MOST_ITERATIONS, ChosenIterations, choose_iterations
from zerotop.analysis.waveform.fold import WaveformFold, choose_leader, find_rank_processes, fold_iterations
from zerotop.analysis.waveform.signals import RenewalDelays
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import RankSteps, StepTable

# Numbers of iterations to choose from, besides all since the last change of level.
SIZES = (3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

_MOST_FOLDS = 32
# A fold of more iterations may lack the last ones, about one in this many, so that not each step changes it.
_GRAINS = 32
# While a job runs, rest at least this many seconds between folds, and spend at most this share of the time on them.
_REST_S, _SHARE = 1.0, 0.03


class _MissingFold(NamedTuple):
    subject: tuple[object, ...]
    key: tuple[object, ...]
    fold: Callable[[], WaveformFold | None]


class WaveformCache:
    """Folds of one recording. The last ones are cached, for a cursor that moves back and forth."""

    def __init__(
        self,
        recording: Recording,
        read_processes: Callable[[], Sequence[RankSteps]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read_processes``: returns the recording's rank processes with their steps up to date, if the caller has them."""
        self.recording = recording
        self._read_processes = read_processes or _make_step_reader(recording)
        self._clock = clock
        self._delays = RenewalDelays()
        self._folds: OrderedDict[tuple[object, ...], WaveformFold | None] = OrderedDict()
        self._last: tuple[tuple[object, ...], WaveformFold | None] | None = None
        self._due_s = -1.0
        self._missing: _MissingFold | None = None

    def fold_at(
        self, cursor_ns: int, rank: int | None = None, number: int | None = None, *, hurry: bool = True
    ) -> WaveformFold | None:
        """Fold the last ``number`` finished iterations before the cursor, or with None all since the last change of level.

        Args:
            rank: None folds all ranks together.
            hurry: False allows an earlier fold for a while, for a job that is followed live.

        Returns:
            None where no rank has finished an iteration.
        """
        fold = self.find_fold(cursor_ns, rank, number, hurry=hurry)
        return self.make_missing_fold() if self.is_missing else fold

    def find_fold(
        self, cursor_ns: int, rank: int | None = None, number: int | None = None, *, hurry: bool = True
    ) -> WaveformFold | None:
        """Return the same if it was folded before; else None, and :attr:`is_missing` is True."""
        self._missing = None
        ranks = find_rank_processes(self._read_processes(), cursor_ns)
        if not ranks:
            return None
        lead = choose_leader(ranks, rank)
        count = bisect_right(lead.step_rows["end_unix_ns"], cursor_ns)
        subject = (lead.source, len(ranks), rank, number)
        if not hurry and self._last is not None and self._last[0] == subject and self._clock() < self._due_s:
            return self._last[1]
        chosen = self._choose_iterations(lead, count, number)
        key = (*subject, len(chosen.indices), *chosen.indices[-1:].tolist())
        if key not in self._folds:
            # A fold that does not build on the last one takes longer.
            delays = RenewalDelays() if hurry else self._delays
            fold = partial(fold_iterations, self.recording, ranks, rank, chosen, cursor_ns, delays)
            self._missing = _MissingFold(subject, key, fold)
            return None
        self._folds.move_to_end(key)
        self._last = (subject, self._folds[key])
        return self._folds[key]

    @property
    def is_missing(self) -> bool:
        """Whether the fold that was looked for last is still to be made."""
        return self._missing is not None

    def make_missing_fold(self) -> WaveformFold | None:
        """Make the fold that was looked for last."""
        if self._missing is None:
            return None
        subject, key, fold = self._missing
        begin_s = self._clock()
        self._folds[key] = fold()
        end_s = self._clock()
        self._due_s = end_s + max(_REST_S, (end_s - begin_s) / _SHARE)
        while len(self._folds) > _MOST_FOLDS:
            self._folds.popitem(last=False)
        self._last, self._missing = (subject, self._folds[key]), None
        return self._folds[key]

    def _choose_iterations(self, lead: RankSteps, count: int, number: int | None) -> ChosenIterations:
        """Choose among the first ``count`` steps, leaving out the last ones of many, so that few steps change a fold."""
        chosen = choose_iterations(lead.step_rows[:count], number)
        grain = 1 << max(0, (len(chosen.indices) // _GRAINS).bit_length() - 1)
        return choose_iterations(lead.step_rows[: count - count % grain], number) if count % grain else chosen

    def has_steps(self, cursor_ns: int) -> bool:
        """Whether any rank records steps; otherwise there will be no fold."""
        return bool(find_rank_processes(self._read_processes(), cursor_ns))


def _make_step_reader(recording: Recording) -> Callable[[], Sequence[RankSteps]]:
    """Return a function that updates and returns the recording's steps."""
    steps, last_count = StepTable(recording, memory=False), -1

    def read_processes() -> Sequence[RankSteps]:
        nonlocal last_count
        count = sum(len(source.array) for source in recording.sources["spans"])
        if count != last_count:
            last_count = count
            steps.update()
        return steps.rank_steps

    return read_processes


def read_last_fold(path: Path) -> WaveformFold | None:
    """Return the fold of all ranks at the end of a recording; None where no rank has finished an iteration.

    Raises RecordingError where the recording cannot be read.
    """
    recording = Recording.open(path)
    return WaveformCache(recording).fold_at(recording.last_written_ns)


def choose_next_size(number: int | None, shown: WaveformFold | None, direction: int) -> int | None:
    """Return the next larger (1) or smaller (-1) number of iterations. ``shown``: the fold of ``number`` iterations."""
    now = number if number is not None else shown.iterations if shown is not None else MOST_ITERATIONS
    if direction > 0:
        return next((size for size in SIZES if size > now), SIZES[-1])
    return next((size for size in reversed(SIZES) if size < now), SIZES[0])
