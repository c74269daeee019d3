"""Infers the iteration time of a job without a probe from the rhythm of processors, PCIe, GPU utilization and power.

An iteration repeats, and so do its loads: the lag with the highest peak of the autocorrelation, averaged over signals, is
its time. Doubtful results are dropped:

* An oscillation faster than the sampler seems slow (aliasing). A sample is a mean over the time since the sample before,
  which leaves the share sinc(f dt) of an oscillation of frequency f. A period T is accepted only if it is stronger than
  any alias at T can be: pulses, the strongest oscillations, have amplitudes of twice their mean.
* Both halves of the window must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from zerotop.analysis.live_view import Floats, Inferred
from zerotop.recording.moments.at import At
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Ints, Samples, iter_samples, split_samples

# Windows to try, shortest first: the result should describe the present.
_WINDOWS_S = (12.0, 24.0, 48.0, 96.0)
_FEWEST_PERIODS = 6
# Samples per period: fewer show no shape.
_FEWEST_SAMPLES = 3
# Least autocorrelation of the signals one period later.
_MIN_LIKENESS = 0.5
# A lag with this share of the best lag's autocorrelation is the period; the best lag is then a multiple of it.
_NEAR_BEST = 0.85
_MAX_DISAGREEMENT = 0.03
_REFRESH_S = 2.0
_LAGS_PER_PIECE = 4
_PCIE_COUNTERS = ("pcie_tx_bytes", "pcie_rx_bytes")


@dataclass(frozen=True)
class _Signal:
    """Means over equal pieces of time."""

    name: str
    values: Floats
    resolution_s: float  # window that the sensor itself averages over


class RhythmInference:
    """The inferred iteration time at a cursor, computed once per _REFRESH_S."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._inferred: dict[int, Inferred | None] = {}

    def infer_at(self, cursor_ns: int) -> Inferred | None:
        """Return the iteration time at the last multiple of _REFRESH_S before the cursor."""
        piece = cursor_ns // int(_REFRESH_S * 1e9)
        if piece not in self._inferred:
            self._inferred = {piece: infer_iteration(self._recording.at(piece * int(_REFRESH_S * 1e9)))}
        return self._inferred[piece]


def infer_iteration(at: At) -> Inferred | None:
    """Infer the iteration time from the last windows before the cursor; None where no window shows it."""
    for window_s in _WINDOWS_S:
        begin_ns = at.cursor_ns - int(window_s * 1e9)
        signals, piece_s = _read_signals(at.recording, begin_ns, at.cursor_ns)
        whole = _find_rhythm(signals, piece_s)
        if whole is None or whole[0] * _FEWEST_PERIODS > window_s:
            continue
        halves = [_find_rhythm(half, piece_s) for half in _halve_signals(signals)]
        if all(half is not None and abs(half[0] / whole[0] - 1) <= _MAX_DISAGREEMENT for half in halves):
            return Inferred(whole[0], whole[1], whole[2], window_s)
    return None


def _read_signals(recording: Recording, begin_ns: int, end_ns: int) -> tuple[list[_Signal], float]:
    """Read the signals in pieces of the sampler's interval; return them and that interval in seconds."""
    processes, gpus = recording.sources["processes"], recording.sources["gpus"]
    piece_s = _measure_interval([*processes, *gpus], begin_ns, end_ns)
    edges = np.arange(begin_ns, end_ns + 1, max(1, int(piece_s * 1e9))) if piece_s else np.empty(0, np.int64)
    if len(edges) < 4 * _FEWEST_SAMPLES:
        return [], piece_s
    pcie_s = max(piece_s, _measure_growth_interval(gpus, "gpu", _PCIE_COUNTERS, edges))
    signals = [
        _Signal("cpu", _sum_rates(processes, "pid", ("cpu_ns",), edges), piece_s),
        _Signal("pcie", _sum_rates(gpus, "gpu", _PCIE_COUNTERS, edges), pcie_s),
        _Signal("utilization", _sum_levels(gpus, "gpu", "utilization_percent", edges), 0.2),
        _Signal("power", _sum_levels(gpus, "gpu", "power_w", edges), piece_s),
    ]
    return [signal for signal in signals if signal.values.size and signal.values.std() and signal.values.mean() > 0], piece_s


def _measure_interval(sources: Iterable[Source], begin_ns: int, end_ns: int) -> float:
    """Return the median seconds between samples; 0 unless some source covers the window."""
    for samples in iter_samples(sources, begin_ns - 1, end_ns):
        times = np.unique(samples.times)
        if len(times) > 4 * _FEWEST_SAMPLES and times[0] <= begin_ns + (end_ns - begin_ns) // 20:
            return float(np.median(np.diff(times))) / 1e9
    return 0.0


def _iter_series(sources: Iterable[Source], key: str, edges: Ints) -> Iterator[Samples]:
    """Yield the samples of each process or GPU that has them for most of the window."""
    for samples in iter_samples(sources, int(edges[0]) - 1, int(edges[-1])):
        for _, own in split_samples(samples, key):
            if len(own.times) > len(edges) // 2 and (key != "pid" or own.rows["rank"][-1] >= 0):
                yield own


def _sum_rates(sources: Iterable[Source], key: str, names: tuple[str, ...], edges: Ints) -> Floats:
    """Sum the growth of counters in each piece; empty without counters."""
    total: Floats = np.empty(0)
    for times, rows in _iter_series(sources, key, edges):
        for name in names:
            if rows[name][0] >= 0:
                grown = np.diff(np.interp(edges - edges[0], times - edges[0], rows[name] - rows[name][0]))
                total = grown if not total.size else total + grown
    return total


def _measure_growth_interval(sources: Iterable[Source], key: str, names: tuple[str, ...], edges: Ints) -> float:
    """Return the median seconds between changes of a counter, which may be read less often than samples are written."""
    intervals: list[Floats] = []
    for times, rows in _iter_series(sources, key, edges):
        intervals += [np.diff(times[1:][np.diff(rows[name]) > 0]) / 1e9 for name in names]
    found = np.concatenate(intervals) if intervals else np.empty(0)
    return float(np.median(found)) if found.size else 0.0


def _sum_levels(sources: Iterable[Source], key: str, name: str, edges: Ints) -> Floats:
    """Sum a level at the middle of each piece."""
    middles = (edges[:-1] + edges[1:]) / 2
    total: Floats = np.empty(0)
    for times, rows in _iter_series(sources, key, edges):
        if np.isfinite(rows[name]).all():
            level = np.interp(middles - edges[0], times - edges[0], rows[name])
            total = level if not total.size else total + level
    return total


def _halve_signals(signals: list[_Signal]) -> tuple[list[_Signal], list[_Signal]]:
    half = len(signals[0].values) // 2
    first = [replace(signal, values=signal.values[:half]) for signal in signals]
    return first, [replace(signal, values=signal.values[half:]) for signal in signals]


def _find_rhythm(signals: list[_Signal], piece_s: float) -> tuple[float, float, tuple[str, ...]] | None:
    """Return (period in seconds, autocorrelation, names of the signals that show it) or None."""
    curves = {signal.name: _compute_autocorrelation(signal.values) for signal in signals}
    rest = [signal for signal in signals if curves[signal.name].size]
    while rest:
        mean = np.mean([curves[signal.name] for signal in rest], axis=0)
        lag = _find_period(mean)
        if lag is None or mean[round(lag)] < _MIN_LIKENESS:
            return None
        periodic = [signal for signal in rest if curves[signal.name][round(lag)] >= _MIN_LIKENESS]
        sure = [signal for signal in periodic if _is_no_alias(signal, lag / _LAGS_PER_PIECE, piece_s)]
        if len(sure) == len(rest):
            return lag / _LAGS_PER_PIECE * piece_s, float(mean[round(lag)]), tuple(signal.name for signal in rest)
        rest = sure
    return None


def _compute_autocorrelation(values: Floats) -> Floats:
    """Return the autocorrelation at lags of 1 / _LAGS_PER_PIECE pieces, 1 at lag 0, up to half the signal's length."""
    count = len(values)
    power = np.abs(np.fft.rfft(values - values.mean(), 2 * count)) ** 2
    # Interpolates between whole lags: with few samples per period, none of those is near it.
    curve = np.fft.irfft(power, 2 * count * _LAGS_PER_PIECE)[: count * _LAGS_PER_PIECE // 2]
    curve /= count - np.arange(len(curve)) / _LAGS_PER_PIECE
    return np.asarray(np.minimum(1.0, curve / curve[0]) if curve[0] > 0 else np.empty(0))


def _find_period(likeness: Floats) -> float | None:
    """Return the shortest lag that is nearly as good as the best, refined by its multiples."""
    peaks = 1 + np.flatnonzero((likeness[1:-1] >= likeness[:-2]) & (likeness[1:-1] > likeness[2:]))
    peaks = peaks[peaks >= _FEWEST_SAMPLES * _LAGS_PER_PIECE]
    if not len(peaks) or likeness[peaks].max() <= 0:
        return None
    first = int(peaks[likeness[peaks] >= _NEAR_BEST * likeness[peaks].max()][0])
    period = _interpolate_peak(likeness, first)
    number = 1
    while (number + 1) * period + period / 4 < len(likeness) - 1:
        number += 1
        near = slice(round(number * period - period / 4), round(number * period + period / 4) + 1)
        peak = near.start + int(np.argmax(likeness[near]))
        if likeness[peak] < 0.5 * likeness[first] or peak in (near.start, near.stop - 1):
            break
        period = _interpolate_peak(likeness, peak) / number
    return period


def _interpolate_peak(likeness: Floats, peak: int) -> float:
    """Return the vertex of the parabola through a peak and its neighbours."""
    before, at_peak, after = likeness[peak - 1 : peak + 2]
    curvature = before - 2 * at_peak + after
    return float(peak + 0.5 * (before - after) / curvature) if curvature < 0 else float(peak)


def _is_no_alias(signal: _Signal, period: float, piece_s: float) -> bool:
    """Whether a signal oscillates at the period or its harmonics more strongly than any alias can."""
    values = signal.values - signal.values.mean()
    window = np.hanning(len(values))
    times = np.arange(len(values))
    for harmonic in (1, 2, 3):
        length = period / harmonic
        length_s = length * piece_s
        if length < _FEWEST_SAMPLES or length_s < 2 * signal.resolution_s:
            break
        wave = np.exp(-2j * np.pi * times / length)
        amplitude = 2 * abs((values * window * wave).sum()) / window.sum() / signal.values.mean()
        if amplitude >= 2 * np.sinc(1 - signal.resolution_s / length_s):
            return True
    return False
