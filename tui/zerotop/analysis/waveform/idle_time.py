"""The idle time of GPUs in a folded iteration, and the phase with most of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.findings.support.thresholds import SPIKE_GAP_S, SPIKE_SHARE
from zerotop.analysis.waveform.fold import WaveformFold
from zerotop.analysis.waveform.phase_bounds import OTHER, PhaseRow

Intervals = Sequence[tuple[float, float]]

# GPUs wait for the optimizer if they idle for at least this share of its phase,
_WAITS = 0.5
# and it uses at least this many times the cores of forward and backward.
_MORE_CORES = 2.0
_WORK = ("forward", "backward")
_LAUNCHING = (*_WORK, "step")


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Seconds of an iteration in which GPUs idle, and the phase with most of them."""

    total_s: float  # NaN where GPUs were not sampled
    longest: PhaseRow | None  # the optimizer's step, or the outermost phase with the most idle time; None where unknown
    longest_s: float  # idle seconds in that phase
    is_optimizer: bool  # that phase is the optimizer's, it runs on the CPU, and GPUs wait for it
    cores: float  # in use during that phase; NaN where unknown


def compute_signal_mean(fold: WaveformFold, signal: str, intervals: Intervals) -> float:
    """Return the mean of a signal over intervals of the folded iteration; NaN where it was not recorded."""
    lengths = [end - begin for begin, end in intervals]
    if signal not in fold.signals or not sum(lengths) > 0:
        return math.nan
    curve = fold.signals[signal]
    return sum(curve.compute_mean(begin, end) * (end - begin) for begin, end in intervals if end > begin) / sum(lengths)


def compute_idle_s(fold: WaveformFold, row: PhaseRow) -> float:
    """Return the seconds of a phase in which no kernel ran; NaN if GPUs were not sampled or not resolved."""
    if "utilization" not in fold.signals or not fold.signals["utilization"].resolved:
        return math.nan
    used = compute_signal_mean(fold, "utilization", row.intervals)
    return math.nan if math.isnan(used) else row.mean_s * max(0.0, 1 - used / 100)


def find_idle_time(fold: WaveformFold) -> IdleTime:
    used = compute_signal_mean(fold, "utilization", [(0.0, fold.iteration_s)])
    total_s = fold.iteration_s * (1 - used / 100)
    outer = [(compute_idle_s(fold, row), row) for row in fold.phases if row.depth == 0]
    known = [(seconds, row) for seconds, row in outer if not math.isnan(seconds)]
    if not known:
        return IdleTime(total_s, None, math.nan, False, math.nan)
    cores = compute_signal_mean(
        fold, "cores", [interval for row in fold.phases if row.phase == "cpu_optimizer" for interval in row.intervals]
    )
    for seconds, row in known:
        if _waits_for_optimizer(fold, row, seconds, cores):
            return IdleTime(total_s, row, seconds, True, cores)
    longest_s, longest = max(known, key=lambda item: item[0])
    return IdleTime(total_s, longest, longest_s, False, compute_signal_mean(fold, "cores", longest.intervals))


def _waits_for_optimizer(fold: WaveformFold, row: PhaseRow, seconds: float, cores: float) -> bool:
    """Whether GPUs wait long for an optimizer on the CPU that uses more cores than other phases.

    ``cores``: in use while it runs; NaN where it does not run on the CPU.
    """
    if row.phase != "step" or math.isnan(cores) or not fold.signals["cores"].resolved:
        return False
    long = seconds >= SPIKE_GAP_S and seconds >= SPIKE_SHARE * fold.iteration_s and seconds >= _WAITS * row.mean_s
    usual = compute_signal_mean(
        fold, "cores", [interval for other in fold.phases if other.phase in _WORK for interval in other.intervals]
    )
    return long and cores >= _MORE_CORES * usual


def waits_for_data(idle_time: IdleTime) -> bool:
    """Whether GPUs idle most while batches are loaded, or outside the engine's phases."""
    return idle_time.longest is not None and idle_time.longest.phase in ("data", OTHER)


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """An iteration whose pace the CPU sets, in seconds."""

    launch_s: float  # in the phases that launch the GPU's work
    device_s: float  # in which a kernel ran


def measure_launch_time(fold: WaveformFold) -> LaunchTime | None:
    """Return how long the CPU launches what the GPUs compute in less time; None where they do not, or it is unknown.

    That the GPUs wait for launches is not known from this: they wait for other ranks in these phases, too.
    """
    used = compute_signal_mean(fold, "utilization", [(0.0, fold.iteration_s)])
    launch_s = sum(row.mean_s for row in fold.phases if row.depth == 0 and row.phase in _LAUNCHING)
    device_s = fold.iteration_s * used / 100
    return LaunchTime(launch_s, device_s) if device_s < launch_s else None  # no NaN
