"""The time of a recorded training's step at another setting: measured at the old one, changed as a model of the parts says.

:mod:`zerotop.analysis.sweeps.step_parts` has the model. An interval is the sum of the influences of its rates, each as far
off as its spread, and at least as wide as errors of other runs were. Where neither a measurement nor a rate tells the time
there is no figure, but a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import exp, hypot

from zerotop.analysis.formatting import format_seconds
from zerotop.analysis.hardware.gpu_speeds import GpuSpeeds
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.phase_times import PhaseTimes
from zerotop.analysis.sweeps.seen_errors import count_tokens, find_seen_error
from zerotop.analysis.sweeps.step_parts import (
    BETWEEN,
    BUSY,
    COMMUNICATION,
    COMPUTE,
    LAUNCHES,
    OPTIMIZER,
    TRANSFERS,
    Rates,
    StepParts,
    find_gpu,
)

_FORMULAS = {
    COMPUTE: "2 P t FLOPs forward, 4 P t backward, 2 P t again with checkpointing; at least the time of kernels by NVML",
    LAUNCHES: "the GPU waits for the host, also for DeepSpeed's work on each tensor",
    COMMUNICATION: "bytes of gradients and gathered parameters that nothing overlaps, over NVLink; measured if over gloo",
    OPTIMIZER: "elements of a rank on the GPU, or of the node on its CPUs",
    TRANSFERS: "bytes of offloaded gradients and parameters over PCIe and host memory",
    BETWEEN: "measured",
}
_UNKNOWN = {
    COMPUTE: "the arithmetic of the GPU, which waits for the host in the recording",
    BETWEEN: "the time between the phases, of which the recording does not tell whether it grows with the batch",
}


_SPREADS = {"link": 1.4, "efficiency": 1.4, "busy": 1.4, "split": 2.0}
_SPREAD = 1.5  # of other rates: as many times more or less
# Between runs of one setting, and between steps of one: the host's work varies most.
_RUN_SPREADS = {COMPUTE: 0.05, LAUNCHES: 0.25, COMMUNICATION: 0.25, OPTIMIZER: 0.3, TRANSFERS: 0.3, BETWEEN: 0.3}
_RANKS = 1.5  # as many times these, with another number of ranks on a node's cores
_MOST_ON_NODE = 16  # GPUs that NVLink connects in NVIDIA's HGX and DGX machines
_ALL_BUSY = 0.98  # share of the time in which kernels run: then more of them take longer
_MOST_WIDE = 4.0  # times the least, which an interval's most is not beyond: else it tells nothing


@dataclass(frozen=True, slots=True)
class TimeRow:
    """One part of an iteration, in seconds."""

    name: str
    before: float
    low: float
    likely: float
    high: float
    formula: str


@dataclass(frozen=True, slots=True)
class TimePrediction:
    """The parts of an iteration, and its least, likely and most time; no parts with the reason why there is no figure."""

    rows: tuple[TimeRow, ...]
    seconds: tuple[float, float, float]
    reason: str = ""


def predict_time(base: Baseline, setup: EngineSetup, work: Workload, nodes: int) -> TimePrediction:
    """Return the time of one step at another setting."""
    reason = find_time_obstacle(base, setup, work, nodes)
    if reason:
        return TimePrediction((), (0.0, 0.0, 0.0), reason)
    usual, *changed = _list_parts(base)
    before, likely = (usual.compose(*setting) for setting in ((base.setup, base.work), (setup, work)))
    others = [one.compose(setup, work) for one in changed]
    noise_share = 0.0 if (setup, work) == (base.setup, base.work) else 1.0 if setup.ranks == base.setup.ranks else _RANKS
    noise = {name: noise_share * spread * likely[name] for name, spread in _RUN_SPREADS.items()}
    rows = []
    for name, formula in _FORMULAS.items():
        ends = _find_ends(likely[name], [other[name] for other in others], noise[name])
        rows.append(TimeRow(name, before[name], ends[0], likely[name], ends[1], formula))
    total = sum(likely.values())
    low, high = _find_ends(total, [sum(other.values()) for other in others], hypot(*noise.values()))
    seen = find_seen_error((base.setup, base.work), (setup, work))
    low, high = min(low, total * exp(-seen)), max(high, total * exp(seen))
    if high > _MOST_WIDE * low:
        widest = max(rows, key=lambda row: row.high - row.low).name
        cause = _UNKNOWN.get(widest, widest)
        reason = f"It may be {format_seconds(low)} to {format_seconds(high)}, mostly because of {cause}."
        return TimePrediction((), (0.0, 0.0, 0.0), reason)
    return TimePrediction(tuple(row for row in rows if row.before or row.likely), (low, total, high))


@lru_cache(2)  # of a base that is asked about many settings
def _list_parts(base: Baseline) -> tuple[StepParts, ...]:
    """Return the parts of the recorded step at the usual rates, then with each rate as far off as its spread."""
    rates = _find_rates(base)
    changed = [
        {one.name: getattr(rates, one.name) * factor}
        for one in fields(Rates)
        for spread in (_SPREADS.get(one.name, _SPREAD),)
        for factor in (spread, 1 / spread)
        if getattr(rates, one.name)
    ]
    return tuple(StepParts(base, replace(rates, **rate)) for rate in ({}, *changed, {"grows": 1.0}))


def _find_ends(likely: float, others: Sequence[float], noise: float) -> tuple[float, float]:
    """Return the ends of an interval: what independent rates and noise make of a figure."""
    less, more = (hypot(noise, *(max(0.0, sign * (one - likely)) for one in others)) for sign in (-1, 1))
    return max(0.0, likely - less), likely + more


def find_time_obstacle(base: Baseline, setup: EngineSetup, work: Workload, nodes: int) -> str:
    """Return why the time is not known, as a sentence; "" if it is."""
    times = base.times
    phases = () if times is None else (times.forward, times.backward, times.update)
    if times is None or not (times.iteration > 0 and all(part >= 0 for part in phases)):
        if base.batches_differ:
            return "The batches of the steps with the times of their phases differ, so that none stands for the others."
        return "The recording has too few steps with the times of their phases: record ten or more."
    is_scaled = (count_tokens(work), work.checkpointing) != (count_tokens(base.work), base.work.checkpointing)
    if is_scaled and min(times.forward, times.backward) <= 0:
        return "The recording has no times of forward and backward, so another batch's is not known."
    if is_scaled and not work.sequence and not _is_gpu_slower(times):
        return (
            "In the recording the GPU waits for the host, so the time that it takes for a row is not known: record a few"
            " steps with the larger micro-batch."
        )
    if is_scaled and times.busy >= _ALL_BUSY and not _is_gpu_slower(times):
        return (
            "In the recording the GPU is always busy, but its arithmetic does not tell with what, so the time of another"
            " batch is not known: record a few steps with it."
        )
    if nodes > base.nodes:
        return "The connection of more nodes than recorded was not measured: record a few steps on them."
    gpu = find_gpu(base)
    if work.checkpointing != base.work.checkpointing and gpu is None:
        return f"The arithmetic of {base.gpu or 'this GPU'} has no known peak, from which recomputation could be told."
    kinds = [(one.bytes_each, one.state_each, one.master_each, one.computes_wide) for one in (setup, base.setup)]
    if kinds[0] != kinds[1]:
        return "Arithmetic in another dtype, or with another optimizer, was not measured: record a few steps with it."
    devices = [(one.offload_optimizer, one.offload_parameters) for one in (setup, base.setup)]
    zero = [
        (*pair, one.offloaded_share, one.stage, one.ranks) for pair, one in zip(devices, (setup, base.setup), strict=True)
    ]
    if devices[0] != devices[1] and any("nvme" in pair for pair in devices):
        return "The speed of the NVMe drive was not measured: record a few steps with it."
    return _find_zero_obstacle(base, setup, gpu) if zero[0] != zero[1] else ""


def _is_gpu_slower(times: PhaseTimes) -> bool:
    """Return whether the forward's length is that of the GPU's arithmetic, not that of the host's launches."""
    return times.launches is not None and times.forward >= BUSY * times.launches[0]


def _find_zero_obstacle(base: Baseline, setup: EngineSetup, gpu: GpuSpeeds | None) -> str:
    """Return why the time at another stage, offload or number of GPUs is not known."""
    if base.nodes > 1:
        return "The connection of the nodes was not measured apart, which another setting of ZeRO needs: record a few steps."
    if setup.is_loop:
        return "Stage, offload and number of GPUs of a loop without DeepSpeed have no model of time: record a few steps."
    if gpu is None:
        return (
            f"The speeds of {base.gpu or 'this GPU'} are not known, which another setting of ZeRO needs: record a few steps."
        )
    if setup.ranks > _MOST_ON_NODE:
        return f"No node has {setup.ranks} of these GPUs, and the connection of several was not measured: give --nodes."
    if setup.ranks > 1 and gpu.link is None:
        return f"The speed of the connection of {base.gpu}s was not measured: `zerotop doctor --measure` does that there."
    return ""


def _find_rates(base: Baseline) -> Rates:
    """Return the usual rates, with those that ``doctor --measure`` found."""
    names = {"to_host": "from_gpu", "cpu_adam": "adam", "cpu_adam_core": "adam_per_core"}
    return replace(Rates(), **{name: base.machine[key] for name, key in names.items() if key in base.machine})
