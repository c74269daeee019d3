"""The state of the ranks screen: metric, order and rank. Knows no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.findings.support.thresholds import RECENT_STEPS
from zerotop.analysis.live_view import JobState
from zerotop.analysis.processes.missing_probe import describe_missing_probes
from zerotop.analysis.ranks.delays import Hang, find_hang, list_delays
from zerotop.analysis.ranks.matrix import METRIC_TABLES, Matrix, RankMatrices, RankMatrix, RankMetric
from zerotop.analysis.ranks.nodes import Network, NodeRows, group_nodes, view_network
from zerotop.analysis.ranks.outliers import (
    RankComparison,
    Skew,
    compare_rank,
    find_least_difference,
    find_skew,
    is_metric_alike,
    measure_deviations,
    order_outliers,
)
from zerotop.analysis.ranks.samples import RankSamples
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop.recording.steps.step_table import RankSteps
from zerotop.ui.base.frame import Frame
from zerotop_probe.recording.events import JobStarted

METRICS = tuple(RankMetric)
_MANY_RANKS = 128  # above this, pictures and lookups are made less often
_MOST_LINES = 64  # with more ranks than this on several nodes, each node has a line at first
_REFRESH_NS = 1_000_000_000
_TABLE_METRICS = sorted(METRICS, key=lambda metric: (metric is not RankMetric.WAIT, metric in METRIC_TABLES))


MatrixValues = tuple[RankMatrix, Matrix]
_NO_VALUES: Matrix = np.empty((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class RankPicture:
    """The data to draw. ``values`` has shape (ranks, steps), in SI units; ``order`` has its rows in display order."""

    matrix: RankMatrix
    metric: RankMetric
    values: Matrix
    deviation: Matrix  # of each row, 0 where it is like the others
    oddness: Matrix  # the sort keys: deviations; for iteration time also that of the time that others wait
    order: NDArray[np.intp]
    by_number: bool
    chosen: int | None  # a row; None where there is none
    skew: Skew | None
    hang: Hang | None  # while the job stands still, and as long as the header says so
    samples: RankSamples
    total_steps: int | None
    why_empty: str  # a sentence where there is nothing to draw
    nodes: tuple[NodeRows, ...]  # in display order, where each node has a line; else none
    opened: str  # the node whose ranks have lines of their own, too
    network: Network

    @cached_property
    def table_rows(self) -> tuple[RankComparison, ...]:
        """The chosen rank compared with the others, for each recorded metric."""
        if self.chosen is None or not self.matrix.times:
            return ()
        told = [metric for metric in _TABLE_METRICS if self._is_loaded(metric)]
        recent = [compare_rank(self.matrix, self.chosen, metric, self.find_values(metric)) for metric in told]
        hidden = {RankMetric.APART} if self.is_zero(RankMetric.APART) else set()
        return tuple(one for one in recent if not np.isnan(one.own) and one.metric not in hidden)

    def find_values(self, metric: RankMetric) -> Matrix:
        """Return the values of any metric."""
        if metric is self.metric:
            return self.values
        return self.samples.read_metric(metric, self.matrix) if metric in METRIC_TABLES else self.matrix.times[metric]

    def find_deviation(self, metric: RankMetric) -> Matrix:
        """Return how far each rank deviates in any metric."""
        if metric is self.metric:
            return self.deviation
        return measure_deviations(self.matrix, metric, self.find_values(metric))

    @cached_property
    def alike_metrics(self) -> list[RankMetric]:
        """Other metrics in which no rank differs from the others, while it does in some metric."""
        others = self._list_others()
        alike = [metric for metric in others if is_metric_alike(self.matrix, metric, self.find_values(metric))]
        differ = len(alike) < len(others) or bool(np.nanmax(self.deviation, initial=0.0) > 0)
        return alike if differ and len(self.matrix.processes) > 1 else []

    @property
    def alike_s(self) -> float:
        """By how much ranks may differ in a time and still be alike."""
        return find_least_difference(RankMetric.ITERATION, self.matrix, self.matrix.times[RankMetric.ITERATION])

    @cached_property
    def other_metrics(self) -> list[RankMetric]:
        """Other metrics to show, in order; first the one in which ranks differ most."""
        return [metric for metric in self._list_others() if metric not in self.alike_metrics]

    def _list_others(self) -> list[RankMetric]:
        at = METRICS.index(self.metric)
        others = METRICS[at + 1 :] + METRICS[:at]
        most = self.skew.metric if self.skew is not None and not self.skew.is_alike else None
        told = [metric for metric in others if self.samples.is_recorded(metric) and self._is_loaded(metric)]
        shown = [metric for metric in told if not (self.is_zero(metric) or np.isnan(self.find_values(metric)).all())]
        return sorted(shown, key=lambda metric: metric is not most)

    def is_zero(self, metric: RankMetric) -> bool:
        """Whether no rank spent time in a phase."""
        return metric in self.matrix.times and not np.nanmax(self.matrix.times[metric], initial=0.0) > 0

    def _is_loaded(self, metric: RankMetric) -> bool:
        """Whether to show a metric unasked: reading the samples of a thousand ranks takes a while."""
        return metric not in METRIC_TABLES or metric is self.metric or len(self.matrix.processes) <= _MANY_RANKS

    @cached_property
    def lines(self) -> tuple[NDArray[np.intp], ...]:
        """The rows of each line that can be chosen, in the displayed order: of a rank, or of a node that is not open."""
        if not self.nodes:
            return tuple(self.order[:, None])
        parts = [np.sort(node.rows)[:, None] if node.host == self.opened else node.rows[None, :] for node in self.nodes]
        return tuple(line for part in parts for line in part)

    def find_neighbor(self, number: int, rank: int | None) -> int | None:
        """Return the rank ``number`` lines after that of ``rank``, or after the chosen one, in the displayed order."""
        if not self.lines:
            return None
        ranks = self.matrix.rank_numbers
        rank = self.chosen_rank if rank is None else rank
        place = next((place for place, line in enumerate(self.lines) if rank in ranks[line]), None)
        if place is not None and not number:
            return rank
        place = 0 if place is None else max(0, min(len(self.lines) - 1, place + number))
        return int(ranks[self.lines[place][0]])

    @property
    def has_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return len(set(self.matrix.host_names)) > 1

    @property
    def chosen_rank(self) -> int | None:
        return None if self.chosen is None else int(self.matrix.rank_numbers[self.chosen])

    def find_host(self, rank: int | None) -> str:
        """Return the node of a rank, "" for an unknown one."""
        rows = np.flatnonzero(self.matrix.rank_numbers == rank)
        return self.matrix.host_names[rows[0]] if len(rows) else ""

    def find_node(self, rank: int | None) -> str:
        """Return the node of a rank that has one line with others; "" for any other rank."""
        host = self.find_host(rank) if self.nodes else ""
        return "" if host == self.opened else host

    def find_first_rank(self, ranks: Sequence[int]) -> int:
        """Return the one of these ranks that differs most."""
        rows = np.flatnonzero(np.isin(self.matrix.rank_numbers, ranks))
        return int(self.matrix.rank_numbers[rows[np.argmax(self.oddness[rows])]])


class Ranking:
    """The screen's state. Returns the same picture while nothing has changed."""

    def __init__(self, source: RecordingSource) -> None:
        self.metric = RankMetric.ITERATION
        self._is_metric_chosen = False  # by the user, or because a rank delays the others
        self.by_number = False
        self.by_node: bool | None = None  # as the user chose
        self.opened = ""  # a node
        self._source = source
        self._matrices = RankMatrices()
        self._samples = RankSamples(source.recording)
        self._columns = RECENT_STEPS
        self._skew: tuple[RankMatrix, RankMatrix, Skew | None] | None = None  # the last matrix, and what was found in it
        self._picture_key: tuple[object, ...] = ()
        self._last_picture: RankPicture | None = None
        self._lookup: tuple[RankMetric, RankMatrix] | None = None  # the values to look up
        self._values_by_metric: dict[RankMetric, MatrixValues] = {}  # the values of the last lookups

    @property
    def recorded_metrics(self) -> list[RankMetric]:
        """The metrics with data in the recording."""
        picture = self._last_picture
        unused = () if picture is None or not picture.is_zero(RankMetric.APART) else (RankMetric.APART,)
        return [metric for metric in METRICS if self._samples.is_recorded(metric) and metric not in unused]

    def switch_metric(self, number: int = 1) -> None:
        """Switch to the next metric with data."""
        there = self.recorded_metrics
        place = there.index(self.metric) + number if self.metric in there else 0
        self.choose_metric(there[place % len(there)])

    def choose_metric(self, metric: RankMetric) -> None:
        """Show this metric from now on."""
        self.metric, self._is_metric_chosen = metric, True

    def switch_order(self) -> None:
        """Order ranks by their numbers, or outliers first again."""
        self.by_number = not self.by_number

    def switch_nodes(self) -> None:
        """Give each node a line, or each rank again."""
        picture = self._last_picture
        self.by_node, self.opened = picture is not None and not picture.nodes, ""

    def open_node(self, host: str) -> None:
        """Show the ranks of a node below it, and those of no other; of none for ""."""
        self.opened = host

    def make_picture(self, frame: Frame, columns: int | None = None) -> RankPicture:
        """Return the picture at the frame's cursor and rank, of ``columns`` steps; None: as many as before."""
        self._columns = columns or self._columns
        whole = self._matrices.matrix_at(
            self._source.rank_steps,
            self._choose_cursor(frame),
            max(self._columns, RECENT_STEPS),
            meets_in_forward=frame.view.job.engine.gathers_parameters,
            delays=list_delays(frame.findings, len(frame.view.ranks)),
        )
        matrix, skew = self._find_skew(whole)
        if not self._is_metric_chosen and skew is not None and skew.delays_others:
            self.choose_metric(RankMetric.WAIT)
        matrix, values = self._find_values(matrix)
        view, rank = frame.view, (frame.rank, frame.is_rank_chosen)
        hang = _find_hang(frame, matrix)
        network = view_network(self._source.recording.at(view.cursor_ns))
        asked = (matrix, id(values), self.metric, self.by_number, rank, view.progress.total_steps, view.job.state, hang)
        key = *asked, self.by_node, self.opened, network
        if self._last_picture is None or key != self._picture_key:
            self._picture_key, self._last_picture = key, self._build_picture(matrix, values, skew, frame, hang, network)
        return self._last_picture

    def _find_skew(self, whole: RankMatrix) -> tuple[RankMatrix, Skew | None]:
        """Return where ranks differ most, and the matrix whose figures are of the same steps."""
        if self._skew is None or self._skew[0] is not whole:
            skew = find_skew(whole)
            self._skew = whole, whole if skew is None else whole.cut_to(skew.steps), skew
        return self._skew[1:]

    def _find_values(self, matrix: RankMatrix) -> MatrixValues:
        """Return the matrix and the metric's values; before a slow lookup is done, the previous ones."""
        metric = self.metric
        if self._lookup is not None and self._lookup[0] is not metric:
            self._lookup = None
        if not matrix.times:
            return matrix, _NO_VALUES
        if metric not in METRIC_TABLES:
            return matrix, matrix.times[metric]
        before = self._values_by_metric.get(metric)
        if before is not None and before[0] is matrix:
            return before
        self._lookup = metric, matrix
        if len(matrix.processes) <= _MANY_RANKS:
            self.finish_work()
        # The picture names this metric at once.
        return self._values_by_metric.setdefault(metric, (matrix, np.full(matrix.ends.shape, np.nan, np.float32)))

    @property
    def last_picture(self) -> RankPicture | None:
        """The picture made last. Any thread may ask."""
        return self._last_picture

    @property
    def is_busy(self) -> bool:
        """Whether values are still to be looked up."""
        return self._lookup is not None

    def finish_work(self) -> None:
        """Look them up: with many ranks that takes longer than a picture may wait."""
        if self._lookup is not None:
            metric, matrix = self._lookup
            self._values_by_metric[metric], self._lookup = (matrix, self._samples.read_metric(metric, matrix)), None

    def _choose_cursor(self, frame: Frame) -> int:
        """Return the frame's cursor; with many live ranks, which finish steps all the time, only once a second."""
        cursor_ns, moment = frame.view.cursor_ns, frame.moment
        if moment.is_live and moment.is_following and len(self._source.rank_steps) > _MANY_RANKS:
            return cursor_ns - cursor_ns % _REFRESH_NS
        return cursor_ns

    def _build_picture(
        self, matrix: RankMatrix, values: Matrix, skew: Skew | None, frame: Frame, hang: Hang | None, network: Network
    ) -> RankPicture:
        metric = self.metric
        deviation = measure_deviations(matrix, metric, values)
        odd = deviation
        if metric is RankMetric.ITERATION and matrix.times:
            # Ranks that wait for one another take the same time: it is the one that is waited for that is different.
            odd = np.maximum(deviation, measure_deviations(matrix, RankMetric.WAIT, matrix.times[RankMetric.WAIT]))
        order = np.arange(len(values)) if self.by_number else order_outliers(odd)
        is_by_node = len(values) > _MOST_LINES if self.by_node is None else self.by_node
        by_node = is_by_node and len(set(matrix.host_names[: len(values)])) > 1
        return RankPicture(
            matrix=matrix,
            metric=metric,
            values=values,
            deviation=deviation,
            oddness=odd,
            order=order,
            by_number=self.by_number,
            chosen=_choose_row(matrix, frame, skew, hang, order),
            skew=skew,
            hang=hang,
            samples=self._samples,
            total_steps=frame.view.progress.total_steps,
            why_empty="" if len(values) else describe_empty(self._source.recording, matrix.processes, frame.view.job.state),
            nodes=group_nodes(matrix, odd, by_number=self.by_number) if by_node else (),
            opened=self.opened,
            network=network,
        )


def _find_hang(frame: Frame, matrix: RankMatrix) -> Hang | None:
    hang = find_hang(frame.findings, len(frame.view.ranks), int(matrix.ends.max(initial=0)))
    is_shown = frame.headline is not None and frame.headline.name == "hung_ranks"
    return hang if hang is not None and (is_shown or not hang.is_over) else None


def _choose_row(
    matrix: RankMatrix, frame: Frame, skew: Skew | None, hang: Hang | None, order: NDArray[np.intp]
) -> int | None:
    """Return the row to compare: that of the rank chosen by the user, else of the rank in the sentence."""
    if not len(order):
        return None
    awaited = hang.ranks[0] if hang is not None and hang.ranks and not frame.is_rank_chosen else None
    if awaited is None and not frame.is_rank_chosen and skew is not None and not skew.is_alike:
        return skew.row
    rows = np.flatnonzero(matrix.rank_numbers == (frame.rank if awaited is None else awaited))
    return int(rows[0]) if len(rows) else int(order[0])


def describe_empty(recording: Recording, processes: Sequence[RankSteps], state: JobState) -> str:
    """Say why no rank has a step, and how to record some."""
    if processes and state.is_over:
        return "No rank finished a step: there is nothing to compare."
    if processes:
        return "No rank has finished a step yet: ranks are compared from the first one on."
    # While a job starts, its processes are there before their engines are.
    if missing := describe_missing_probes(recording.at(recording.last_written_ns)):
        return " ".join(missing)
    is_outside = not recording.events_of(JobStarted) and state is not JobState.STARTING
    if is_outside and any(len(source.array) for source in recording.sources["processes"]):
        return (
            "No steps are recorded: the job is only watched from outside. To compare its ranks, start it with zerotop run,"
            " or inject the probe with zerotop attach --enter."
        )
    if state.is_over:
        return "No rank finished a step: there is nothing to compare."
    return "No rank trains yet: ranks are compared from their first finished step on."
