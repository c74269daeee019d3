"""How long an iteration takes, inferred from outside: from the rhythm of processors, PCIe, GPU utilization and power.

For jobs without a probe in them. An iteration repeats, and so do the loads it makes: the lag at which the signals are most
like themselves (the highest peak of their autocorrelation, its mean over signals) is its time. What cannot be told is not:

* What repeats faster than the sampler looks seems to repeat slowly (aliasing). A sample is a mean over the time since the
  one before, which leaves of an oscillation of frequency f the share sinc(f dt). One of period T is believed only if it is
  stronger than anything folded down to T can be: pulses, the strongest there are, have amplitudes of twice their mean.
* Both halves of the time that is looked at must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.live_view import Floats, Inferred
from zerotop.session.reader import Session, Source
from zerotop.session.samples import Ints, Samples, iter_samples, split_samples

# Times that are looked at, shortest first: what is told should be of now.
_WINDOWS_S = (12.0, 24.0, 48.0, 96.0)
_FEWEST_PERIODS = 6
# Samples to a period: fewer than three show no shape.
_FEWEST_SAMPLES = 3
# How like itself the sum of signals has to be one period later.
_MIN_LIKENESS = 0.5
# A shorter lag is the period where the signals are nearly as like themselves as at the best one, its multiple.
_NEAR_BEST = 0.85
_MAX_DISAGREEMENT = 0.03
_REFRESH_S = 2.0
_LAGS_PER_PIECE = 4  # lags to a piece


@dataclass(frozen=True)
class _Signal:
    """Means over equal pieces of time."""

    name: str
    values: Floats
    resolution_s: float  # how long the sensor itself takes a mean over


class RhythmInference:
    """What is inferred at a cursor, looked for anew every other second."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inferred: dict[int, Inferred | None] = {}

    def infer_at(self, cursor_ns: int) -> Inferred | None:
        """Of the last full ``_ANEW_S`` before the cursor."""
        piece = cursor_ns // int(_REFRESH_S * 1e9)
        if piece not in self._inferred:
            self._inferred = {piece: infer_iteration(self._session, piece * int(_REFRESH_S * 1e9))}
        return self._inferred[piece]


def infer_iteration(session: Session, cursor_ns: int) -> Inferred | None:
    """What the last while before the cursor says; None where it does not say it."""
    for window_s in _WINDOWS_S:
        begin_ns = cursor_ns - int(window_s * 1e9)
        signals, piece_s = _read_signals(session, begin_ns, cursor_ns)
        whole = _find_rhythm(signals, piece_s)
        if whole is None or whole[0] * _FEWEST_PERIODS > window_s:
            continue
        halves = [_find_rhythm(half, piece_s) for half in _halve_signals(signals)]
        if all(half is not None and abs(half[0] / whole[0] - 1) <= _MAX_DISAGREEMENT for half in halves):
            return Inferred(whole[0], whole[1], whole[2], window_s)
    return None


def _read_signals(session: Session, begin_ns: int, end_ns: int) -> tuple[list[_Signal], float]:
    """The signals in pieces as long as the sampler's own, and the length of those in seconds."""
    processes, gpus = session.sources["processes"], session.sources["gpus"]
    piece_s = _measure_interval([*processes, *gpus], begin_ns, end_ns)
    edges = np.arange(begin_ns, end_ns + 1, max(1, int(piece_s * 1e9))) if piece_s else np.empty(0, np.int64)
    if len(edges) < 4 * _FEWEST_SAMPLES:
        return [], piece_s
    found = [
        _Signal("cpu", _sum_rates(processes, "pid", ("cpu_ns",), edges), piece_s),
        _Signal("pcie", _sum_rates(gpus, "gpu", ("pcie_tx_bytes", "pcie_rx_bytes"), edges), piece_s),
        _Signal("utilization", _sum_levels(gpus, "gpu", "utilization_percent", edges), 0.2),
        _Signal("power", _sum_levels(gpus, "gpu", "power_w", edges), piece_s),
    ]
    return [signal for signal in found if signal.values.size and signal.values.std() and signal.values.mean() > 0], piece_s


def _measure_interval(sources: Iterable[Source], begin_ns: int, end_ns: int) -> float:
    """The usual time between two samples; 0 where there are none in all of the window."""
    for samples in iter_samples(sources, begin_ns - 1, end_ns):
        times = np.unique(samples.times)
        if len(times) > 4 * _FEWEST_SAMPLES and times[0] <= begin_ns + (end_ns - begin_ns) // 20:
            return float(np.median(np.diff(times))) / 1e9
    return 0.0


def _iter_series(sources: Iterable[Source], key: str, edges: Ints) -> Iterator[Samples]:
    """Yield the samples of each process or GPU that was there for most of the window."""
    for samples in iter_samples(sources, int(edges[0]) - 1, int(edges[-1])):
        for _, own in split_samples(samples, key):
            if len(own.times) > len(edges) // 2 and (key != "pid" or own.rows["rank"][-1] >= 0):
                yield own


def _sum_rates(sources: Iterable[Source], key: str, names: tuple[str, ...], edges: Ints) -> Floats:
    """What counters grew by in each piece, summed; empty where there are none."""
    total: Floats = np.empty(0)
    for times, rows in _iter_series(sources, key, edges):
        for name in names:
            if rows[name][0] >= 0:
                grown = np.diff(np.interp(edges - edges[0], times - edges[0], rows[name] - rows[name][0]))
                total = grown if not total.size else total + grown
    return total


def _sum_levels(sources: Iterable[Source], key: str, name: str, edges: Ints) -> Floats:
    """A level in the middle of each piece, summed."""
    middles = (edges[:-1] + edges[1:]) / 2
    total: Floats = np.empty(0)
    for times, rows in _iter_series(sources, key, edges):
        if np.isfinite(rows[name]).all():
            level = np.interp(middles - edges[0], times - edges[0], rows[name])
            total = level if not total.size else total + level
    return total


def _halve_signals(signals: list[_Signal]) -> tuple[list[_Signal], list[_Signal]]:
    def cut_signal(signal: _Signal, place: slice) -> _Signal:
        return _Signal(signal.name, signal.values[place], signal.resolution_s)

    half = len(signals[0].values) // 2
    return [cut_signal(signal, slice(half)) for signal in signals], [
        cut_signal(signal, slice(half, None)) for signal in signals
    ]


def _find_rhythm(signals: list[_Signal], piece_s: float) -> tuple[float, float, tuple[str, ...]] | None:
    """(period in seconds, likeness, the signals that show it) or None."""
    alike = {signal.name: _compute_autocorrelation(signal.values) for signal in signals}
    told = [signal for signal in signals if alike[signal.name].size]
    while told:
        together = np.mean([alike[signal.name] for signal in told], axis=0)
        lag = _find_period(together)
        if lag is None or together[round(lag)] < _MIN_LIKENESS:
            return None
        alone = [signal for signal in told if alike[signal.name][round(lag)] >= _MIN_LIKENESS]
        sure = [signal for signal in alone if _is_no_alias(signal, lag / _LAGS_PER_PIECE, piece_s)]
        if len(sure) == len(told):
            return lag / _LAGS_PER_PIECE * piece_s, float(together[round(lag)]), tuple(signal.name for signal in told)
        told = sure
    return None


def _compute_autocorrelation(values: Floats) -> Floats:
    """How like itself a signal is ``1 / _FINE`` pieces later, 1 for none; up to half of its length."""
    count = len(values)
    power = np.abs(np.fft.rfft(values - values.mean(), 2 * count)) ** 2
    # Few samples to a period have no lag near it; between lags the curve is what its spectrum says.
    found = np.fft.irfft(power, 2 * count * _LAGS_PER_PIECE)[: count * _LAGS_PER_PIECE // 2]
    found /= count - np.arange(len(found)) / _LAGS_PER_PIECE
    return np.asarray(np.minimum(1.0, found / found[0]) if found[0] > 0 else np.empty(0))


def _find_period(likeness: Floats) -> float | None:
    """The shortest lag that is nearly as good as the best, made precise by its multiples."""
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
    """Where a parabola through a peak and its neighbours is highest."""
    before, there, after = likeness[peak - 1 : peak + 2]
    bend = before - 2 * there + after
    return float(peak + 0.5 * (before - after) / bend) if bend < 0 else float(peak)


def _is_no_alias(signal: _Signal, period: float, piece_s: float) -> bool:
    """Whether it oscillates more strongly, at the period or a part of it, than anything that is too fast to be seen can."""
    values = signal.values - signal.values.mean()
    window = np.hanning(len(values))
    times = np.arange(len(values))
    for part in (1, 2, 3):
        length = period / part
        length_s = length * piece_s
        if length < _FEWEST_SAMPLES or length_s < 2 * signal.resolution_s:
            break
        wave = np.exp(-2j * np.pi * times / length)
        amplitude = 2 * abs((values * window * wave).sum()) / window.sum() / signal.values.mean()
        if amplitude >= 2 * np.sinc(1 - signal.resolution_s / length_s):
            return True
    return False
