"""The signals of folded iterations: each sensor of the ranks' GPUs and processes over one iteration."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from zerotop.analysis.waveform import deconvolution, samples
from zerotop.analysis.waveform.alignment import AlignedIterations
from zerotop.analysis.waveform.samples import SampleWindows
from zerotop.recording.keys import GpuKey, ProcessKey
from zerotop.recording.moments.at import find_cores
from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats

# Most samples of a signal, of all ranks together: more do not improve the median.
_MOST_SAMPLES = 20_000
# A sensor whose windows are longer than this many iterations shows only the mean,
_BLIND = 1.4
# as does one whose windows may be earlier by more than this share of an iteration.
_LOST = 0.75
# The delay of NVML's updates is found from this many windows,
_ENOUGH = 400
# A phase is long enough for samples to count its threads at this many times the time from which they do.
_COUNTED = 1.2
_FULL_PERCENT = 100.0
_COARSE = 64  # with this many bins,
_LATE_NS = 20_000_000  # in steps of this,
_BETTER = 0.85  # and used if it reduces the misfit at least to this share.


@dataclass(frozen=True, eq=False)
class Signal:
    """One quantity over the folded iteration; all arrays have shape (n,).

    ``utilization`` in percent, ``power`` in watts, ``cores``, ``allocated`` and ``resident`` in bytes, ``to_host`` and
    ``to_gpu`` in bytes per second.
    """

    name: str
    position_s: Floats  # ascending from 0 to the iteration's length; repeated where the signal jumps at a phase's end
    median: Floats
    low: Floats  # first decile of the samples
    high: Floats  # ninth decile
    samples: int
    window_s: float  # window of a sample
    resolved: bool  # False: windows are so long that only the mean is known

    def compute_mean(self, begin_s: float, end_s: float) -> float:
        """Return the mean of the median between two positions; NaN where they are equal."""
        if end_s <= begin_s:
            return float("nan")
        return (self._compute_area(end_s) - self._compute_area(begin_s)) / (end_s - begin_s)

    def _compute_area(self, position_s: float) -> float:
        """Return the area under the median from 0 to a position."""
        at, median, areas = self._area_columns
        last = max(0, min(bisect_right(at, position_s) - 1, len(at) - 2))
        length = at[last + 1] - at[last]
        rest = min(max(position_s - at[last], 0.0), length)
        slope = (median[last + 1] - median[last]) / max(length, 1e-12)
        return areas[last] + rest * (median[last] + slope * rest / 2)

    @cached_property
    def _area_columns(self) -> tuple[list[float], list[float], list[float]]:
        """Positions, median and the area before each position, as lists: read hundreds of times per frame."""
        pieces = np.diff(self.position_s) * (self.median[1:] + self.median[:-1]) / 2
        return self.position_s.tolist(), self.median.tolist(), [0.0, *np.cumsum(pieces).tolist()]


@dataclass
class RenewalDelays:
    """Delays between NVML's updates of each sensor and their readings: (number of windows, delay in nanoseconds)."""

    delay_by_sensor: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)


class SignalFolder:
    """Folds sensors of the ranks' GPUs and processes."""

    def __init__(
        self,
        recording: Recording,
        parts: Sequence[AlignedIterations],
        reference: Floats,
        cursor_ns: int,
        delays: RenewalDelays,
    ) -> None:
        self._recording = recording
        self._parts = parts
        self._reference = reference
        self._grid, self._coarse_grid = deconvolution.make_grid(reference), deconvolution.make_grid(reference, _COARSE)
        self._delays = delays
        self.host_cores = find_cores(recording.at(), parts[0].source.host)
        self._cursor_ns = cursor_ns
        self._pids: list[int] = []
        self._allocators: dict[ProcessKey, tuple[Source, GpuKey]] = {}

    def fold_signals(self, pids: list[int]) -> dict[str, Signal]:
        """Return all recorded signals, in display order."""
        names = ("utilization", "power", "cores", "allocated", "to_host", "to_gpu", "resident")
        parts: dict[str, list[tuple[SampleWindows, Floats, Floats]]] = {name: [] for name in names}
        every: dict[str, list[SampleWindows]] = {name: [] for name in names}  # also of steps in between, only counted
        for source, gpu_key in locate_allocators(self._recording.at(self._cursor_ns)).items():
            self._allocators[source.host, source.pid] = source, gpu_key
        for part in self._parts:
            for name, windows in self._read_rank_windows(part).items():
                parts[name].append(self._fold_windows(part, windows))
                every[name].append(windows)
        lead, self._pids = self._parts[0], pids
        span = self._find_time_span(lead)
        for name, windows in samples.read_process_windows(self._recording, lead.source.host, pids, *span).items():
            parts[name].append(self._fold_windows(lead, windows))
            every[name].append(windows)
        signals = {
            name: self._fold_signal(name, folded) or self._average(name, every[name]) for name, folded in parts.items()
        }
        return {name: signal for name, signal in signals.items() if signal is not None}

    def _read_rank_windows(self, part: AlignedIterations) -> dict[str, SampleWindows]:
        table, key = self._allocators.get((part.source.host, part.source.pid), (None, None))
        if table is None or key is None:
            return {}
        most = _MOST_SAMPLES // len(self._parts)
        windows = {
            name: self._remove_delay(part, (*key, name), _thin_windows(gpu_windows, most))
            for name, gpu_windows in samples.read_gpu_windows(self._recording, *key, *self._find_time_span(part)).items()
        }
        allocated = samples.read_allocator_windows(table, *self._find_time_span(part))
        return {**windows, "allocated": _thin_windows(allocated, most)}

    @staticmethod
    def _find_time_span(part: AlignedIterations) -> tuple[int, int]:
        return part.base_ns, part.base_ns + int(part.bounds[-1, -1] * 1e9) + 1

    def _fold_windows(self, part: AlignedIterations, windows: SampleWindows) -> tuple[SampleWindows, Floats, Floats]:
        """Return the windows within folded iterations, and their begins and lengths in the folded iteration."""
        whole, begins, lengths = part.fold_windows(windows.begins_ns, windows.ends_ns, self._reference)
        return windows.select(whole), begins, np.maximum(lengths, 1e-9)

    def _remove_delay(self, part: AlignedIterations, key: tuple[str, int, str], windows: SampleWindows) -> SampleWindows:
        """Move windows with slack earlier by the delay at which values change most at phases' ends."""
        if not windows.slack_ns or not len(windows.values):
            return windows
        # By phases: a GPU that is always busy shows no delay, in other phases it may.
        sensor = (*key, part.phases.tobytes())
        count, delay_ns = self._delays.delay_by_sensor.get(sensor, (0, 0))
        if len(windows.values) >= 2 * count:
            last = windows.select(slice(max(0, len(windows.values) - _ENOUGH), None))
            delay_ns = self._find_best_delay(part, last)
            self._delays.delay_by_sensor[sensor] = (len(windows.values), delay_ns)
        return _move_windows(windows, delay_ns)

    def _find_best_delay(self, part: AlignedIterations, windows: SampleWindows) -> int:
        """Return the delay with the best fit; half the slack, where none fits much better."""
        most = windows.slack_ns

        def measure_errors(delays: Iterable[int], grid: deconvolution.Grid) -> dict[int, float]:
            folds = {delay: self._fold_windows(part, _move_windows(windows, delay)) for delay in delays}
            return {
                delay: deconvolution.measure_misfit(grid, begins, lengths, kept.values)
                for delay, (kept, begins, lengths) in folds.items()
            }

        errors = measure_errors((most // 2, *range(0, most + 1, _LATE_NS)), self._coarse_grid)
        best = min(errors, key=errors.__getitem__)
        if errors[best] > _BETTER * errors[most // 2]:
            return most // 2
        near = (delay for delay in (best - _LATE_NS // 2, best, best + _LATE_NS // 2) if 0 <= delay <= most)
        errors = measure_errors(near, self._grid)
        return min(errors, key=errors.__getitem__)

    def _fold_signal(self, name: str, parts: list[tuple[SampleWindows, Floats, Floats]]) -> Signal | None:
        if not parts:
            return None
        windows = samples.merge_windows([kept for kept, _, _ in parts])
        if len(windows.values) < 2:
            return None
        begins, lengths = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[1:])
        length = self._grid.length_s
        resolved = windows.length_s <= _BLIND * length and windows.slack_ns / 1e9 <= _LOST * length
        if windows.moments:
            positions, curve = deconvolution.fold_moments(self._grid, begins + lengths, windows.values)
            window_s = 0.0
        else:
            window_s = windows.length_s
            if resolved:
                curve = self._unfold(name, begins, lengths, windows.values)
                positions, curve = _interpolate_bins(self._grid, curve)
            else:
                positions, curve = np.array([0.0, self._grid.length_s]), deconvolution.make_flat_curve(windows.values)
        return Signal(name, positions, curve.median, curve.low, curve.high, len(windows.values), window_s, resolved)

    def _average(self, name: str, every: Sequence[SampleWindows]) -> Signal | None:
        """Return the mean of a sensor that is slower than an iteration, where too few folded iterations are neighbours."""
        windows = samples.merge_windows(every) if every else samples.NO_WINDOWS
        if windows.moments or len(windows.values) < 2 or windows.length_s <= _BLIND * self._grid.length_s:
            return None
        curve, ends = deconvolution.make_flat_curve(windows.values), np.array([0.0, self._grid.length_s])
        return Signal(name, ends, curve.median, curve.low, curve.high, len(windows.values), windows.length_s, False)

    def _unfold(self, name: str, begins: Floats, lengths: Floats, values: Floats) -> deconvolution.Curve:
        if name != "cores":
            most = _FULL_PERCENT if name == "utilization" else np.inf
            return deconvolution.unfold(self._grid, begins, lengths, values, most=most)
        lead, host_cores = self._parts[0], float(self.host_cores or np.inf)
        span = self._find_time_span(lead)
        threads, least_s = samples.count_runnable_threads(self._recording, lead.source.host, self._pids, *span)
        threads, phase_s = min(host_cores, threads), self._grid.spread_phase_sums(self._grid.bin_widths)
        is_counted = phase_s > _COUNTED * least_s
        curve = deconvolution.unfold(self._grid, begins, lengths, values, most=np.where(is_counted, threads, host_cores))
        all_s = self._grid.spread_phase_sums(np.where(curve.median >= threads, self._grid.bin_widths, 0.0))
        if (is_counted & (all_s > phase_s / 2)).any():  # a phase with all threads: shorter ones have no more
            curve = deconvolution.unfold(self._grid, begins, lengths, values, most=threads)
        return curve


def _thin_windows(windows: SampleWindows, most: int) -> SampleWindows:
    """Return at most ``most`` windows, evenly spread."""
    if len(windows.values) <= most:
        return windows
    return windows.select(np.linspace(0, len(windows.values) - 1, most).astype(int))


def _move_windows(windows: SampleWindows, earlier_ns: int) -> SampleWindows:
    return windows._replace(begins_ns=windows.begins_ns - earlier_ns, ends_ns=windows.ends_ns - earlier_ns)


def _interpolate_bins(grid: deconvolution.Grid, curve: deconvolution.Curve) -> tuple[Floats, deconvolution.Curve]:
    """Return the curve through the middles of bins, and level from there to a phase's begin and end."""
    middles = (grid.edges[1:] + grid.edges[:-1]) / 2
    first = np.concatenate(([True], grid.breaks[:-1]))
    positions = np.concatenate((grid.edges[:-1][first], middles, grid.edges[1:][grid.breaks]))
    bins = np.concatenate((np.flatnonzero(first), np.arange(len(middles)), np.flatnonzero(grid.breaks)))
    order = np.lexsort((bins, positions))
    bins = bins[order]
    return positions[order], deconvolution.Curve(curve.median[bins], curve.low[bins], curve.high[bins], curve.error)
