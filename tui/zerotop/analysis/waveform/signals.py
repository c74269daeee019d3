"""The signals of folded iterations: each sensor of the ranks' GPUs and processes, laid over one iteration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.keys import GpuKey, ProcessKey
from zerotop.analysis.processes.ranks_and_hosts import locate_allocators
from zerotop.analysis.waveform import samples
from zerotop.analysis.waveform.alignment import AlignedIterations
from zerotop.analysis.waveform.deconvolution import (
    Curve,
    Grid,
    fold_moments,
    iter_unfold,
    make_flat_curve,
    make_grid,
    measure_misfit,
)
from zerotop.analysis.waveform.samples import SampleWindows
from zerotop.session.reader import Session, Source

Floats = NDArray[np.float64]

# Samples of a signal, of all ranks together: more make the median no better.
_MOST_SAMPLES = 20_000
# Of a sensor whose samples look back for longer than this many iterations, only the mean is known.
_BLIND = 1.4
# Of one whose samples may be older than this share of an iteration, nobody knows where in it they were made.
_LOST = 0.75
# Windows that decide how much earlier NVML renewed its figures than was seen.
_ENOUGH = 400
_FULL_PERCENT = 100.0
_COARSE = 64  # places of an iteration that are told apart for that
_LATE_NS = 20_000_000
_BETTER = 0.85


@dataclass(frozen=True, eq=False)
class Signal:
    """One quantity over the folded iteration; all arrays have shape (n,).

    ``utilization`` in percent, ``power`` in watts, ``cores``, ``allocated`` and ``resident`` in bytes, ``to_host`` and
    ``to_gpu`` in bytes per second.
    """

    name: str
    position_s: Floats  # ascending from 0 to the iteration's length; twice the same where it jumps at a phase's end
    median: Floats
    low: Floats  # a tenth of what was seen there lies below,
    high: Floats  # nine tenths below this
    samples: int
    window_s: float  # how long a sample looks back
    resolved: bool  # False: samples look back for so long that nothing but the mean is known

    def compute_mean(self, begin_s: float, end_s: float) -> float:
        """The mean of the median between two places; NaN where they are one."""
        if end_s <= begin_s:
            return float("nan")
        return (self._compute_area(end_s) - self._compute_area(begin_s)) / (end_s - begin_s)

    def _compute_area(self, position_s: float) -> float:
        """The area under the median from 0 on."""
        at, median, areas = self._area_columns
        last = max(0, min(bisect_right(at, position_s) - 1, len(at) - 2))
        length = at[last + 1] - at[last]
        rest = min(max(position_s - at[last], 0.0), length)
        slope = (median[last + 1] - median[last]) / max(length, 1e-12)
        return areas[last] + rest * (median[last] + slope * rest / 2)

    @cached_property
    def _area_columns(self) -> tuple[list[float], list[float], list[float]]:
        """Positions, median and the area before each position: they are asked for hundreds of times a picture."""
        pieces = np.diff(self.position_s) * (self.median[1:] + self.median[:-1]) / 2
        return self.position_s.tolist(), self.median.tolist(), [0.0, *np.cumsum(pieces).tolist()]


@dataclass
class RenewalDelays:
    """How much earlier NVML renewed each GPU's figures than was seen, as was found from so many windows."""

    delay_by_sensor: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)


class SignalFolder:
    """Folds sensors of the ranks' GPUs and processes."""

    def __init__(
        self, session: Session, parts: Sequence[AlignedIterations], reference: Floats, cursor_ns: int, delays: RenewalDelays
    ) -> None:
        self._session = session
        self._parts = parts
        self._reference = reference
        self._grid, self._coarse_grid = make_grid(reference), make_grid(reference, _COARSE)
        self._delays = delays
        self.host_cores = find_host_cores(session, parts[0].source.host)
        self._cursor_ns = cursor_ns
        self._allocators: dict[ProcessKey, tuple[Source, GpuKey]] = {}

    def iter_signals(self, pids: list[int]) -> Generator[None, None, dict[str, Signal]]:
        """All there are, in the order in which they are shown; in pieces, of milliseconds each."""
        names = ("utilization", "power", "cores", "allocated", "to_host", "to_gpu", "resident")
        parts: dict[str, list[tuple[SampleWindows, Floats, Floats]]] = {name: [] for name in names}
        nodes, engines = (self._session.events_named(name, self._cursor_ns) for name in ("node", "engine"))
        lies_on = yield from locate_allocators(self._session, nodes, engines)
        tables = {place: self._session.sources["allocator"][place] for place in lies_on}
        self._allocators = {(table.host, table.pid): (table, lies_on[place]) for place, table in tables.items()}
        for part in self._parts:
            yield
            told = yield from self._iter_rank_windows(part)
            for name, windows in told.items():
                yield
                parts[name].append(self._fold_windows(part, windows))
        yield
        lead = self._parts[0]
        span = self._find_time_span(lead)
        for name, windows in samples.read_process_windows(self._session, lead.source.host, pids, *span).items():
            parts[name].append(self._fold_windows(lead, windows))
        found = {}
        for name, folded in parts.items():
            yield
            signal = yield from self._iter_signal(name, folded)
            if signal is not None:
                found[name] = signal
        return found

    def _iter_rank_windows(self, part: AlignedIterations) -> Generator[None, None, dict[str, SampleWindows]]:
        table, key = self._allocators.get((part.source.host, part.source.pid), (None, None))
        if table is None or key is None:
            return {}
        found = samples.read_gpu_windows(self._session, *key, *self._find_time_span(part))
        found = {name: _thin_windows(windows, _MOST_SAMPLES // len(self._parts)) for name, windows in found.items()}
        for name, windows in found.items():
            yield
            found[name] = yield from self._iter_undelayed(part, (*key, name), windows)
        yield
        held = samples.read_allocator_windows(table, *self._find_time_span(part))
        return {**found, "allocated": _thin_windows(held, _MOST_SAMPLES // len(self._parts))}

    @staticmethod
    def _find_time_span(part: AlignedIterations) -> tuple[int, int]:
        return part.base_ns, part.base_ns + int(part.bounds[-1, -1] * 1e9) + 1

    def _fold_windows(self, part: AlignedIterations, windows: SampleWindows) -> tuple[SampleWindows, Floats, Floats]:
        """Those within folded iterations, where they begin there, and how long they are there."""
        whole, begins, lengths = part.fold_windows(windows.begins_ns, windows.ends_ns, self._reference)
        kept = SampleWindows(
            windows.begins_ns[whole], windows.ends_ns[whole], windows.values[whole], windows.slack_ns, windows.moments
        )
        return kept, begins, np.maximum(lengths, 1e-9)

    def _iter_undelayed(
        self, part: AlignedIterations, key: tuple[str, int, str], windows: SampleWindows
    ) -> Generator[None, None, SampleWindows]:
        """Windows that may all lie earlier, moved to where what they say changes most at phases' ends."""
        if not windows.slack_ns or not len(windows.values):
            return windows
        # Other phases may tell more: where a GPU is always busy, nothing says when it was looked at.
        known = (*key, part.phases.tobytes())
        seen, late_ns = self._delays.delay_by_sensor.get(known, (0, 0))
        if len(windows.values) >= 2 * seen:
            few = slice(max(0, len(windows.values) - _ENOUGH), None)
            tried = SampleWindows(windows.begins_ns[few], windows.ends_ns[few], windows.values[few], windows.slack_ns)
            late_ns = yield from self._iter_best_delay(part, tried)
            self._delays.delay_by_sensor[known] = (len(windows.values), late_ns)
        return _move_windows(windows, late_ns)

    def _iter_best_delay(self, part: AlignedIterations, windows: SampleWindows) -> Generator[None, None, int]:
        """The move after which a curve fits best; that to the middle, where none does much better."""
        most = windows.slack_ns

        def measure_error(move: int, bins: Grid) -> float:
            kept, begins, lengths = self._fold_windows(part, _move_windows(windows, move))
            return measure_misfit(bins, begins, lengths, kept.values)

        moves = (most // 2, *range(0, most + 1, _LATE_NS))
        errors: dict[int, float] = {}
        for move in moves:
            errors[move] = measure_error(move, self._coarse_grid)
            yield
        best = min(errors, key=lambda move: errors[move])
        if errors[best] > _BETTER * errors[most // 2]:
            return most // 2
        near = [move for move in (best - _LATE_NS // 2, best, best + _LATE_NS // 2) if 0 <= move <= most]
        fine: dict[int, float] = {}
        for move in near:
            fine[move] = measure_error(move, self._grid)
            yield
        return min(fine, key=lambda move: fine[move])

    def _iter_signal(
        self, name: str, parts: list[tuple[SampleWindows, Floats, Floats]]
    ) -> Generator[None, None, Signal | None]:
        if not parts:
            return None
        windows = samples.merge_windows([kept for kept, _, _ in parts])
        if len(windows.values) < 2:
            return None
        begins, lengths = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[1:])
        length = self._grid.length_s
        resolved = windows.length_s <= _BLIND * length and windows.slack_ns / 1e9 <= _LOST * length
        if windows.moments:
            places, curve = fold_moments(self._grid, begins + lengths, windows.values)
            window_s = 0.0
        else:
            window_s = windows.length_s
            if resolved:
                curve = yield from iter_unfold(self._grid, begins, lengths, windows.values, most=self._find_maximum(name))
                places, curve = _interpolate_bins(self._grid, curve)
            else:
                places, curve = np.array([0.0, self._grid.length_s]), make_flat_curve(windows.values)
        return Signal(name, places, curve.median, curve.low, curve.high, len(windows.values), window_s, resolved)

    def _find_maximum(self, name: str) -> float:
        """What cannot be exceeded."""
        return _FULL_PERCENT if name == "utilization" else float(self.host_cores or np.inf) if name == "cores" else np.inf


def _thin_windows(windows: SampleWindows, most: int) -> SampleWindows:
    """At most so many of them, from all over."""
    if len(windows.values) <= most:
        return windows
    chosen = np.linspace(0, len(windows.values) - 1, most).astype(int)
    begins, ends, values = (column[chosen] for column in windows[:3])
    return windows._replace(begins_ns=begins, ends_ns=ends, values=values)


def _move_windows(windows: SampleWindows, earlier_ns: int) -> SampleWindows:
    return windows._replace(begins_ns=windows.begins_ns - earlier_ns, ends_ns=windows.ends_ns - earlier_ns)


def _interpolate_bins(grid: Grid, curve: Curve) -> tuple[Floats, Curve]:
    """The curve through the middles of bins, and level to where a phase ends: bins become points."""
    middles = (grid.edges[1:] + grid.edges[:-1]) / 2
    first = np.concatenate(([True], grid.breaks[:-1]))
    places = np.concatenate((grid.edges[:-1][first], middles, grid.edges[1:][grid.breaks]))
    of = np.concatenate((np.flatnonzero(first), np.arange(len(middles)), np.flatnonzero(grid.breaks)))
    order = np.lexsort((of, places))
    of = of[order]
    return places[order], Curve(curve.median[of], curve.low[of], curve.high[of], curve.error)


def find_host_cores(session: Session, host: str) -> int | None:
    """Cores that the job may use on a host."""
    found = (event.facts.get("cores") for event in session.events_named("node") if event.host == host)
    return next((cores for cores in found if isinstance(cores, int) and cores > 0), None)
