"""The rank that the others wait for, as screens about one rank show it before another one is chosen."""

from __future__ import annotations

from typing import NamedTuple

from zerotop.analysis.findings.support.thresholds import RECENT_STEPS
from zerotop.analysis.ranks.delays import list_delays
from zerotop.analysis.ranks.matrix import RankMatrices
from zerotop.analysis.ranks.outliers import find_skew
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.frame import Frame
from zerotop.ui.ranks.labels import describe_skew


class AwaitedRank(NamedTuple):
    """A rank that the others wait for; None without one."""

    rank: int | None = None
    sentence: str = ""  # with its phase


class AwaitedRankFinder:
    """Finds the rank that the others wait for at a frame, again only after a step or a finding."""

    def __init__(self, source: RecordingSource) -> None:
        self._source = source
        self._matrices = RankMatrices()
        self._found: tuple[object, AwaitedRank] = None, AwaitedRank()  # with what it is of

    def find(self, frame: Frame) -> AwaitedRank:
        world = len({process.source.rank for process in self._source.rank_steps})
        delays = list_delays(frame.findings, world) if world > 1 else ()
        key = frame.view.progress.step, world, delays
        if self._found[0] != key:
            matrix = self._matrices.matrix_at(
                self._source.rank_steps,
                frame.view.cursor_ns,
                RECENT_STEPS,
                meets_in_forward=frame.view.job.engine.gathers_parameters,
                delays=delays,
            )
            skew = find_skew(matrix) if world > 1 else None
            rank = None if skew is None else int(matrix.rank_numbers[skew.row])
            _, sentence, is_delay = describe_skew(skew, rank, world, names_iteration=True)
            self._found = key, AwaitedRank(rank, sentence) if is_delay else AwaitedRank()
        return self._found[1]
