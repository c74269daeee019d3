"""A sweep's results as series: one measurement over one setting, a series for each combination of the other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.stats.knee import KneeFit, fit_knee
from zerotop.analysis.sweeps.settings import MICRO_BATCH, SEQ_LENGTH
from zerotop.recording.samples import Floats
from zerotop.recording.sweeps import OK, OUT_OF_MEMORY, Plan, Point, Result, Sweep, Value

ALLOCATED, RESERVED, HOST = "allocated_peak_bytes", "reserved_peak_bytes", "host_peak_bytes"
ITERATIONS, TOKENS = "iterations_per_s", "tokens_per_s"

CHARTS = (ALLOCATED, RESERVED, ITERATIONS, TOKENS)
"""The measurements that are drawn; without GPUs HOST is in place of the first two."""


@dataclass(frozen=True, slots=True)
class SweepSeries:
    """Points with the same settings except one, in ascending order of that one."""

    settings: Mapping[str, Value]  # of what varies, without the horizontal axis
    points: tuple[Point, ...]  # with a measurement
    out_of_memory: tuple[Point, ...]  # without one, for lack of memory

    @property
    def label(self) -> str:
        """The settings that distinguish it: ``stage 3, allocator default``; "" for the only series."""
        return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in self.settings.items())


@dataclass(frozen=True, slots=True)
class SeriesMemory:
    """Peak memory of one series over the tokens of a micro-batch: flat up to the knee, a line beyond it."""

    series: SweepSeries
    measurement: str  # ALLOCATED, or HOST without GPUs
    fit: KneeFit  # over tokens of one rank's micro-batch; its slope is in bytes for each token


def choose_axis(plan: Plan) -> str:
    """Return the setting of the horizontal axis: one that varies, sequence length or batch first; "" without settings."""
    numeric = [name for name in plan.varied if all(isinstance(value, int) for value in plan.settings[name])]
    preferred = [name for name in (SEQ_LENGTH, MICRO_BATCH, *numeric, *plan.varied, *plan.settings) if name in plan.settings]
    return next((name for name in preferred if name in plan.varied), preferred[0] if preferred else "")


def list_charts(sweep: Sweep) -> tuple[str, ...]:
    """Return the measurements that the sweep has, in the order of CHARTS."""
    results = [point.result for point in sweep.points if point.result is not None]
    has_gpu = any(result.allocated_peak_bytes is not None for result in results)
    return CHARTS if has_gpu else (HOST, ITERATIONS, TOKENS)


def build_series(sweep: Sweep, axis: str) -> list[SweepSeries]:
    """Return the series of all finished points over ``axis``, in the order of the points."""
    others = [name for name in sweep.plan.varied if name != axis]
    groups: dict[tuple[Value, ...], list[Point]] = {}
    for point in sweep.finished:
        groups.setdefault(tuple(point.settings[name] for name in others), []).append(point)
    series = []
    for key, points in groups.items():
        points.sort(key=lambda point: _sort_key(point.settings[axis], sweep.plan.settings[axis]))
        measured = tuple(point for point in points if _get_outcome(point) == OK)
        failed = tuple(point for point in points if _get_outcome(point) == OUT_OF_MEMORY)
        if measured or failed:
            series.append(SweepSeries(dict(zip(others, key, strict=True)), measured, failed))
    return series


def _sort_key(value: Value, values: Sequence[Value]) -> float:
    return float(value) if isinstance(value, int | float) else float(values.index(value))


def _get_outcome(point: Point) -> str:
    return point.result.outcome if point.result is not None else ""


def read_measurement(series: SweepSeries, measurement: str) -> Floats:
    """Return one measurement of a series' points, NaN where it is missing; shape (points,)."""
    values = [getattr(point.result, measurement) for point in series.points]
    return np.array([np.nan if value is None else value for value in values], np.float64)


def read_spread(series: SweepSeries, measurement: str) -> tuple[Floats, Floats]:
    """Return one measurement in each point's slowest and fastest iteration, NaN where it has no spread; shape (points,)."""
    if measurement not in (ITERATIONS, TOKENS):
        nothing = np.full(len(series.points), np.nan)
        return nothing, nothing
    scale = read_measurement(series, measurement) / read_measurement(series, ITERATIONS)
    return scale * read_measurement(series, "slowest_per_s"), scale * read_measurement(series, "fastest_per_s")


def fit_lines(sweep: Sweep) -> list[SeriesMemory]:
    """Fit the memory of each series over sequence length or micro-batch; series of fewer than two sizes have no line."""
    axis = choose_axis(sweep.plan)
    if axis not in (SEQ_LENGTH, MICRO_BATCH):
        return []
    measurement = ALLOCATED if ALLOCATED in list_charts(sweep) else HOST
    lines = []
    for series in build_series(sweep, axis):
        pairs = [_read_pair(point.result, measurement) for point in series.points if point.result is not None]
        known = np.array([pair for pair in pairs if pair is not None], np.float64).reshape(-1, 2)
        fit = fit_knee(known[:, 0], known[:, 1])
        if fit is not None:
            lines.append(SeriesMemory(series, measurement, fit))
    return lines


def _read_pair(result: Result, measurement: str) -> tuple[float, float] | None:
    tokens, size = result.micro_batch_tokens, getattr(result, measurement)
    return (float(tokens), float(size)) if tokens and size else None
