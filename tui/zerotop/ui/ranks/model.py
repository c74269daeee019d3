"""What the ranks screen looks at: a metric, an order, a rank. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.live_view import State
from zerotop.analysis.ranks.matrix import RECENT, Matrix, Metric, RankMatrices, RankMatrix
from zerotop.analysis.ranks.outliers import Compared, Skew, compared, deviations, outliers_first, scale_of, skew
from zerotop.analysis.ranks.samples import TABLES, RankSamples
from zerotop.analysis.steps.step_table import RankSteps
from zerotop.session.reader import Session
from zerotop.ui.base.frame import Frame
from zerotop.ui.base.interfaces import Source

# In the order in which a key goes through them.
METRICS = (
    Metric.ITERATION,
    Metric.WAIT,
    Metric.PEAK,
    Metric.FREE,
    Metric.CORES,
    Metric.DATA,
    Metric.FORWARD,
    Metric.BACKWARD,
    Metric.STEP,
)
_MANY = 128  # ranks, from which on it is looked at them more seldom
_PACE_NS = 1_000_000_000
_AT_ONCE_S = 0.012  # of processor time for a picture before anything is drawn; of many ranks none is made in that
_TABLE = (
    Metric.ITERATION,
    Metric.DATA,
    Metric.FORWARD,
    Metric.BACKWARD,
    Metric.STEP,
    Metric.OTHER,
    Metric.WAIT,
    Metric.PEAK,
    Metric.FREE,
    Metric.CORES,
)


Told = tuple[RankMatrix, Matrix]
_NOTHING: Matrix = np.empty((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class Picture:
    """What is drawn. ``values`` are ranks x steps in SI units; ``order`` are rows of it, the first to be shown first."""

    matrix: RankMatrix
    metric: Metric
    values: Matrix
    deviation: Matrix  # of each row, 0 where it is like the others
    odd: Matrix  # what the order is by: the deviation, of an iteration's time that of how long others wait too
    order: NDArray[np.intp]
    by_number: bool
    chosen: int | None  # a row; None where there is none
    skew: Skew | None
    samples: RankSamples
    total_steps: int | None
    why_empty: str  # a sentence where there is nothing to draw

    @cached_property
    def table(self) -> tuple[Compared, ...]:
        """The chosen rank beside the others, without what was not recorded of it."""
        if self.chosen is None or not self.matrix.times:
            return ()
        told = [metric for metric in _TABLE if self._told(metric)]
        recent = [compared(self.matrix, self.chosen, metric, self.of(metric)) for metric in told]
        return tuple(one for one in recent if not np.isnan(one.own))

    def of(self, metric: Metric) -> Matrix:
        """The values of any metric."""
        if metric is self.metric:
            return self.values
        return self.samples.of(metric, self.matrix) if metric in TABLES else self.matrix.times[metric]

    def deviation_of(self, metric: Metric) -> Matrix:
        """How far ranks are off in any metric."""
        if metric is self.metric:
            return self.deviation
        return deviations(values := self.of(metric), scale_of(metric, self.matrix, values))

    @property
    def other_metrics(self) -> list[Metric]:
        """Those that may be shown beside the one asked for, in order, of which there is anything."""
        at = METRICS.index(self.metric)
        others = METRICS[at + 1 :] + METRICS[:at]
        return [metric for metric in others if self.samples.recorded(metric) and self._told(metric)]

    def _told(self, metric: Metric) -> bool:
        """Looking up what a thousand ranks have takes a while: then it is told when it is asked for."""
        return metric not in TABLES or metric is self.metric or len(self.matrix.processes) <= _MANY

    def beside(self, number: int) -> int | None:
        """The rank so many places further on in the order that is shown; it stays within it."""
        if not len(self.order):
            return None
        place = 0 if self.chosen is None else int(np.flatnonzero(self.order == self.chosen)[0]) + number
        return int(self.matrix.ranks[self.order[max(0, min(len(self.order) - 1, place))]])


class Ranking:
    """The screen's state. Gives the same object again while nothing of it is different."""

    def __init__(self, source: Source) -> None:
        self.metric = Metric.ITERATION
        self.by_number = False
        self._source = source
        self._matrices = RankMatrices()
        self._samples = RankSamples(source.session)
        self._columns = RECENT
        self._asked: tuple[object, ...] = ()
        self._last: Picture | None = None
        self._pieces: Generator[None, None, Told] | None = None  # of what is being looked up
        self._sought: Metric | None = None  # by them
        self._told: dict[Metric, Told] = {}  # what was looked up last

    @property
    def metrics(self) -> list[Metric]:
        """Those of which there is anything in the recording."""
        return [metric for metric in METRICS if self._samples.recorded(metric)]

    def turn(self, number: int = 1) -> None:
        """To the next metric there is."""
        there = self.metrics
        place = there.index(self.metric) + number if self.metric in there else 0
        self.metric = there[place % len(there)]

    def look(self, frame: Frame, columns: int | None = None) -> Picture:
        """At the frame's cursor and rank; ``columns``: steps there is room for, None: as many as before."""
        self._columns = columns or self._columns
        matrix = self._matrices.at(
            self._source.processes,
            self._cursor(frame),
            max(self._columns, RECENT),
            meets_in_forward=frame.view.job.zero_stage == 3,
        )
        matrix, values = self._known(matrix)
        view = frame.view
        asked = (matrix, id(values), self.metric, self.by_number, frame.rank, view.progress.total_steps, view.job.state)
        if self._last is None or asked != self._asked:
            self._asked, self._last = asked, self._picture(matrix, values, frame)
        return self._last

    def _known(self, matrix: RankMatrix) -> Told:
        """The matrix with the values of the metric; where looking them up takes long, meanwhile those told before."""
        metric = self.metric
        if not matrix.times:
            return matrix, _NOTHING
        if metric not in TABLES:
            return matrix, matrix.times[metric]
        if self._sought is not metric:
            self._pieces = None
        before = self._told.get(metric)
        if before is not None and before[0] is matrix:
            return before
        if self._pieces is None:
            self._sought, self._pieces = metric, self._looking_up(metric, matrix)
            self.go_on(_AT_ONCE_S if len(matrix.processes) <= _MANY else 0.0)
        # That it is this metric is said at once.
        return self._told.setdefault(metric, (matrix, np.full(matrix.ends.shape, np.nan, np.float32)))

    def _looking_up(self, metric: Metric, matrix: RankMatrix) -> Generator[None, None, Told]:
        return matrix, (yield from self._samples.telling(metric, matrix))

    @property
    def busy(self) -> bool:
        """Whether something is being looked up."""
        return self._pieces is not None

    def go_on(self, most_s: float) -> None:
        """Looks it up for about so long: with many ranks it takes longer than keys may wait."""
        begun_s = time.thread_time()
        try:
            while self._pieces is not None:
                next(self._pieces)
                if time.thread_time() - begun_s >= most_s:
                    return
        except StopIteration as end:
            assert self._sought is not None
            self._told[self._sought], self._pieces = end.value, None

    def _cursor(self, frame: Frame) -> int:
        """The frame's cursor. Many ranks that go on finish steps all the time: they are looked at once a second."""
        cursor_ns, moment = frame.view.cursor_ns, frame.moment
        if moment.live and moment.following and len(self._source.processes) > _MANY:
            return cursor_ns - cursor_ns % _PACE_NS
        return cursor_ns

    def _picture(self, matrix: RankMatrix, values: Matrix, frame: Frame) -> Picture:
        metric = self.metric
        deviation = deviations(values, scale_of(metric, matrix, values))
        odd = deviation
        if metric is Metric.ITERATION and matrix.times:
            # Ranks that wait for one another take the same time: it is the one that is waited for that is different.
            waits = matrix.times[Metric.WAIT]
            odd = np.maximum(deviation, deviations(waits, scale_of(Metric.WAIT, matrix, waits)))
        order = np.arange(len(values)) if self.by_number else outliers_first(odd)
        chosen = np.flatnonzero(matrix.ranks == frame.rank) if len(values) else np.empty(0, np.intp)
        return Picture(
            matrix=matrix,
            metric=metric,
            values=values,
            deviation=deviation,
            odd=odd,
            order=order,
            by_number=self.by_number,
            chosen=int(chosen[0]) if len(chosen) else int(order[0]) if len(order) else None,
            skew=skew(matrix),
            samples=self._samples,
            total_steps=frame.view.progress.total_steps,
            why_empty="" if len(values) else why_empty(self._source.session, matrix.processes, frame.view.job.state),
        )


def why_empty(session: Session, processes: Sequence[RankSteps], state: State) -> str:
    """Why no rank has a step here, and how to get some."""
    if processes and state.over:
        return "No rank finished a step: there is nothing to compare."
    if processes:
        return "No rank has finished a step yet: ranks are compared from the first one on."
    # While a job starts, its processes are there before their engines are.
    if state is not State.STARTING and any(len(source.array) for source in session.sources["processes"]):
        return (
            "No rank's steps are recorded here: the job's processes are only watched from outside. Started with zerotop run,"
            " or entered by zerotop attach, each rank says what it does."
        )
    if state.over:
        return "No rank made its DeepSpeed engine: there is nothing to compare."
    return "No rank has made its DeepSpeed engine yet: ranks are compared from their first finished step on."
