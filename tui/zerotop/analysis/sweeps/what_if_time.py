"""The time of a recorded training's step at another setting: measured at the old one, changed as a model of the parts says.

A phase takes the GPU its arithmetic, communication and transfers, or the host its launches, whichever is longer. ``_Rates``
are the speeds of the parts; what a recording measured replaces them, as its phases are decomposed with the same model. So at
the recorded setting each phase takes what was measured, and a rate has influence only where a setting changes what it
decides: an interval is the sum of these influences, each rate as far off as its spread. Where neither a measurement nor a
rate tells the time there is no figure, but a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import exp, hypot, inf, sqrt

from zerotop.analysis.hardware.gpu_speeds import GpuSpeeds, find_speeds
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.phase_times import PhaseTimes
from zerotop.analysis.sweeps.seen_errors import count_tokens, find_seen_error

COMPUTE, LAUNCHES, COMMUNICATION = "compute", "launches", "communication"
OPTIMIZER, TRANSFERS, BETWEEN = "optimizer", "transfers", "between phases"
_CPU = "CPU optimizer"
_FORMULAS = {
    COMPUTE: "2 P t FLOPs forward, 4 P t backward, 2 P t again with checkpointing; the speed is measured if it decides",
    LAUNCHES: "the GPU waits for the host, also for DeepSpeed's work on each tensor",
    COMMUNICATION: "bytes of gradients and gathered parameters that nothing overlaps, over NVLink",
    OPTIMIZER: "elements of a rank on the GPU, or of the node on its CPUs",
    TRANSFERS: "bytes of offloaded gradients and parameters over PCIe and host memory",
    BETWEEN: "measured",
}
_UNKNOWN = {
    COMPUTE: "the arithmetic of the GPU, which waits for the host in the recording",
    BETWEEN: "the time between the phases, of which the recording does not tell whether it grows with the batch",
}


@dataclass(frozen=True, slots=True)
class _Rates:
    """The speeds that a recording need not tell. Host times are in those of the launches of a plain forward."""

    efficiency: float = 0.45  # share of the peak that the arithmetic of large batches reaches
    link: float = 1.0  # times NCCL's speed on this type of GPU
    gathered_forward: float = 6.5  # host time in stage 3, which gathers the parameters of each module
    gathered_backward: float = 12.0
    plain_backward: float = 1.6  # in stage 0
    reduced_backward: float = 3.5  # in stages 1 and 2, which put each gradient into a bucket
    offloaded_backward: float = 5.0  # more in these, if each gradient is copied to the CPU
    update: float = 2.2  # of an update on the GPU: norms of tensors, in stages 1 and 2 half of it for a rank's own
    update_bytes: float = 60.0  # of GPU memory for each updated element
    to_host: float = 50e9  # B/s of a GPU's gradients in the backward
    # Elements/s of a node, whose memory limits them, and of a core: of the CPU update, and of what DeepSpeed does around
    # it, as it unscales gradients, and casts weights and copies them to the GPUs.
    cpu_adam: float = 6e9
    cpu_adam_core: float = 0.62e9
    moved: float = 9e9
    moved_core: float = 0.3e9
    split: float = 0.5  # share of the time between phases that each micro-batch takes, not each step
    grows: float = 0.0  # share of it that grows with a micro-batch's tokens: loading data does, logging does not


_SPREADS = {"link": 1.4, "efficiency": 1.4, "split": 2.0}
_SPREAD = 1.5  # of other rates: as many times more or less
# Between runs of one setting, and between steps of one: the host's work varies most.
_RUN_SPREADS = {COMPUTE: 0.05, LAUNCHES: 0.25, COMMUNICATION: 0.25, OPTIMIZER: 0.3, TRANSFERS: 0.3, BETWEEN: 0.3}
_RANKS = 1.5  # as many times these, with another number of ranks on a node's cores
_BUSY = 1.4  # times the host's launches: what the GPU takes longer is its arithmetic
_MOST_OFF = 2.0  # times the usual efficiency: not more than its peak, and rarely less
_SHARPNESS = 3.0
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
    usual, *changed = _list_decompositions(base)
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
        reason = f"It may be {low:.2g} to {high:.2g} s, mostly because of {_UNKNOWN.get(widest, widest)}."
        return TimePrediction((), (0.0, 0.0, 0.0), reason)
    return TimePrediction(tuple(row for row in rows if row.before or row.likely), (low, total, high))


@lru_cache(2)  # of a base that is asked about many settings
def _list_decompositions(base: Baseline) -> tuple[_Decomposition, ...]:
    """Return the parts of the recorded step at the usual rates, then with each rate as far off as its spread."""
    rates = _find_rates(base)
    changed = [
        {one.name: getattr(rates, one.name) * factor}
        for one in fields(_Rates)
        for spread in (_SPREADS.get(one.name, _SPREAD),)
        for factor in (spread, 1 / spread)
        if getattr(rates, one.name)
    ]
    return tuple(_Decomposition(base, replace(rates, **rate)) for rate in ({}, *changed, {"grows": 1.0}))


def _find_ends(likely: float, others: Sequence[float], noise: float) -> tuple[float, float]:
    """Return the ends of an interval: what independent rates and noise make of a figure."""
    less, more = (hypot(noise, *(max(0.0, sign * (one - likely)) for one in others)) for sign in (-1, 1))
    return max(0.0, likely - less), likely + more


def find_time_obstacle(base: Baseline, setup: EngineSetup, work: Workload, nodes: int) -> str:
    """Return why the time is not known, as a sentence; "" if it is."""
    times = base.times
    phases = () if times is None else (times.forward, times.backward, times.update)
    if times is None or not (times.iteration > 0 and all(part >= 0 for part in phases)):
        return "The recording has too few steps with the times of their phases: record ten or more."
    is_scaled = (count_tokens(work), work.checkpointing) != (count_tokens(base.work), base.work.checkpointing)
    if is_scaled and min(times.forward, times.backward) <= 0:
        return "The recording has no times of forward and backward, so another batch's is not known."
    if is_scaled and not work.sequence and not _is_gpu_slower(times):
        return (
            "In the recording the GPU waits for the host, so the time that it takes for a row is not known: record a few"
            " steps with the larger micro-batch."
        )
    if nodes > base.nodes:
        return "The connection of more nodes than recorded was not measured: record a few steps on them."
    gpu = _find_gpu(base)
    if work.checkpointing != base.work.checkpointing and gpu is None:
        return f"The arithmetic of {base.gpu or 'this GPU'} has no known peak, from which recomputation could be told."
    kinds = [(one.bytes_each, one.state_each, one.master_each, one.computes_wide) for one in (setup, base.setup)]
    if kinds[0] != kinds[1]:
        return "Arithmetic in another dtype, or with another optimizer, was not measured: record a few steps with it."
    devices = [(one.offload_optimizer, one.offload_parameters) for one in (setup, base.setup)]
    zero = [(*pair, one.stage, one.ranks) for pair, one in zip(devices, (setup, base.setup), strict=True)]
    if devices[0] != devices[1] and any("nvme" in pair for pair in devices):
        return "The speed of the NVMe drive was not measured: record a few steps with it."
    return _find_zero_obstacle(base, setup, gpu) if zero[0] != zero[1] else ""


def _is_gpu_slower(times: PhaseTimes) -> bool:
    """Return whether the forward's length is that of the GPU's arithmetic, not that of the host's launches."""
    return times.launches is not None and times.forward >= _BUSY * times.launches[0]


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
    if setup.ranks > 1 and gpu.link is None:
        return f"The speed of the connection of {base.gpu}s was not measured: `zerotop doctor --measure` does that there."
    return ""


def _find_gpu(base: Baseline) -> GpuSpeeds | None:
    found = find_speeds(base.gpu)
    if found is None:
        return None
    return replace(found, link=base.machine.get("all_reduce", None if "PCI" in base.gpu.upper() else found.link))


def _find_rates(base: Baseline) -> _Rates:
    """Return the usual rates, with those that ``doctor --measure`` found."""
    names = {"to_host": "from_gpu", "cpu_adam": "adam", "cpu_adam_core": "adam_per_core"}
    return replace(_Rates(), **{name: base.machine[key] for name, key in names.items() if key in base.machine})


def _count_flops(base: Baseline, setup: EngineSetup, work: Workload) -> tuple[float, float]:
    """Return the FLOPs of the forward and of the backward of one micro-batch.

    A token of a sequence of s takes 2 s h more in each layer's attention (Korthikanti et al., arXiv:2205.05198,
    appendix A, where half of 4 s h is masked).
    """
    attention = (work.sequence or 0) * base.shape.hidden * base.shape.layers if base.shape is not None else 0
    each = (setup.parameters + attention) * work.micro_batch * (work.sequence or 1)
    return 2.0 * each, (6.0 if work.checkpointing != "none" else 4.0) * each


def _wait(device: float, host: float) -> float:
    """Return how long a GPU waits for launches: part of a phase is bound by them, part is not, so it is no sharp maximum."""
    return float((device**_SHARPNESS + host**_SHARPNESS) ** (1 / _SHARPNESS)) - device


def _subtract(total: float, part: float) -> float:
    """Return the other part of a phase, the GPU's or the host's."""
    return float(max(0.0, total**_SHARPNESS - part**_SHARPNESS) ** (1 / _SHARPNESS))


def _is_offloaded(setup: EngineSetup) -> bool:
    return setup.offload_optimizer != "none"


class _Decomposition:
    """The parts of the recorded phases, from which those of other settings are composed."""

    def __init__(self, base: Baseline, rates: _Rates) -> None:
        assert base.times is not None
        self.base, self.rates, self.times = base, rates, base.times
        self.gpu = _find_gpu(base)
        setup, work, times = base.setup, base.work, base.times
        self.flops = _count_flops(base, setup, work)
        self._read_forward(times)
        self._read_backward(times)
        self._read_update(setup, times)
        own = work.accumulation * (times.forward + times.backward) + times.update
        self.between = max(0.0, times.iteration - own)

    # --- what was measured -------------------------------------------------------------------------------------------------

    def _read_forward(self, times: PhaseTimes) -> None:
        """Find the arithmetic of the recorded forward, and the time of its launches in stage 0.

        If the host is as slow as the GPU, what the GPU waits for it tells little: then the usual efficiency counts, too.
        """
        each, host = times.forward, times.launches[0] if times.launches is not None else times.forward
        host = min(host, each)
        self.forward = _subtract(each, host)
        guess = self._guess_compute(self.flops[0])
        if guess is not None and each < _BUSY * host:
            self.forward = min(each, sqrt(guess * min(max(self.forward, guess / _MOST_OFF), _MOST_OFF * guess)))
            host = max(_subtract(each, self.forward), 0.5 * each)
        self.forward = _subtract(each, host)
        self.launch = host / self._weigh_forward(self.base.setup)
        gathered = sum(self._list_gathered(self.base.setup).values())
        self.gathered_factor = min(1.0, self.forward / gathered) if gathered else 1.0

    def _guess_compute(self, flops: float) -> float | None:
        if self.gpu is None:
            return None
        peak = self.gpu.fp32_peak if self.base.computes_in == "fp32" else self.gpu.peak
        return flops / (self.rates.efficiency * peak)

    def _read_backward(self, times: PhaseTimes) -> None:
        """Find the arithmetic of the recorded backward, and its host time in launches of a plain forward."""
        setup, each = self.base.setup, times.backward
        beside = sum(self._list_backward(setup, self.base.work).values())
        self.backward = self.forward * self.flops[1] / self.flops[0] if self.flops[0] else each
        weight = self.launch * self._weigh_backward(setup, self.base.work)
        device = self.backward + beside
        if device >= each:
            device = _subtract(each, min(weight, 0.8 * each))
        self.beside_factor = min(1.0, 0.7 * device / beside) if beside else 1.0
        self.backward = device - self.beside_factor * beside
        self.hooks = _subtract(each, device) / weight if weight else 1.0

    def _read_update(self, setup: EngineSetup, times: PhaseTimes) -> None:
        """Find how much longer each part of the update takes than the rates say."""
        self.factors = dict.fromkeys((OPTIMIZER, TRANSFERS, _CPU), 1.0)
        parts = self._list_update(setup)
        gathered = min(parts[COMMUNICATION], 0.5 * times.update)
        own = times.update - gathered
        cpu = min(times.cpu_optimizer, 0.9 * own) if parts[_CPU] else 0.0
        if cpu:
            self.factors[_CPU] = cpu / parts[_CPU]
        names = [name for name in self.factors if not (cpu and name == _CPU)]
        rest = sum(parts[name] for name in names)
        self.factors |= {name: (own - cpu) / rest for name in names if rest and parts[name]}
        self.factors[COMMUNICATION] = gathered / parts[COMMUNICATION] if parts[COMMUNICATION] else 1.0

    # --- the parts at any setting ------------------------------------------------------------------------------------------

    def _weigh_forward(self, setup: EngineSetup) -> float:
        return self.rates.gathered_forward if setup.stage == 3 and not setup.is_loop else 1.0

    def _weigh_backward(self, setup: EngineSetup, work: Workload) -> float:
        """Return the host time of a backward: in stage 1 the mean, as only the last micro-batch is reduced."""
        rates = self.rates
        plain, reduced = rates.plain_backward, rates.reduced_backward
        if setup.is_loop:
            return plain
        once = plain + (reduced - plain) / work.accumulation
        weight = (plain, once, reduced, rates.gathered_backward)[setup.stage]
        return weight + (rates.offloaded_backward if _is_offloaded(setup) and setup.stage < 3 else 0.0)

    def _time_link(self, size: float, setup: EngineSetup) -> float:
        """Return the seconds of a collective whose ranks send and receive (n - 1) / n of the bytes."""
        if setup.ranks == 1 or self.gpu is None or self.gpu.link is None or setup.is_loop:
            return 0.0
        return size * (setup.ranks - 1) / setup.ranks / (self.gpu.link * self.rates.link)

    def _list_backward(self, setup: EngineSetup, work: Workload) -> dict[str, float]:
        """Return what a backward does beside its arithmetic: in stages 0 and 1 the mean over the micro-batches."""
        gradients, parts = self._time_link(setup.bytes_each * setup.trainable, setup), self._list_gathered(setup)
        if setup.stage < 3:  # an all-reduce has two halves; ZeRO-2 uses one, too, for each bucket
            gradients *= 2 / (work.accumulation if setup.stage < 2 else 1)
        offloaded = 4 * setup.trainable * setup.offloaded_share / setup.ranks if _is_offloaded(setup) else 0.0
        parts[COMMUNICATION] = parts.get(COMMUNICATION, 0.0) + gradients
        parts[TRANSFERS] = parts.get(TRANSFERS, 0.0) + offloaded / self.rates.to_host
        return parts

    def _list_gathered(self, setup: EngineSetup) -> dict[str, float]:
        """Return the time in which stage 3 gathers all parameters once, where they are offloaded also from the CPU."""
        if setup.stage < 3:
            return {}
        weights = setup.bytes_each * setup.parameters
        own = weights / setup.ranks if setup.offload_parameters != "none" else 0.0
        return {COMMUNICATION: self._time_link(weights, setup), TRANSFERS: own / self.rates.to_host}

    def _count_offloaded(self, setup: EngineSetup) -> float:
        """Return the elements that a node's CPUs update."""
        return setup.trainable * setup.offloaded_share / self.base.nodes if _is_offloaded(setup) else 0.0

    def _list_update(self, setup: EngineSetup) -> dict[str, float]:
        """Return the parts of an update: the host's work on each tensor and the GPU's memory, the node's CPUs, copies."""
        rates, offloaded = self.rates, self._count_offloaded(setup)
        share = (1 + 1 / setup.ranks) / 2 if setup.stage in (1, 2) else 1.0
        updated = setup.trainable / (setup.ranks if setup.stage else 1) - offloaded * self.base.nodes / setup.ranks
        memory = self.gpu.memory if self.gpu is not None else 2e12
        cores = self.base.threads * setup.ranks / self.base.nodes if self.base.threads is not None else inf
        parts = {
            OPTIMIZER: self.launch * rates.update * share + rates.update_bytes * max(0.0, updated) / memory,
            _CPU: offloaded / min(rates.cpu_adam, cores * rates.cpu_adam_core),
            TRANSFERS: offloaded / min(rates.moved, cores * rates.moved_core),
            COMMUNICATION: self._time_link(setup.bytes_each * setup.parameters, setup) if setup.stage in (1, 2) else 0.0,
        }
        factors = dict(self.factors)
        if setup.ranks != self.base.setup.ranks:  # they share the node's cores otherwise: half of what was measured counts
            factors |= {name: sqrt(factors[name]) for name in (_CPU, TRANSFERS)}
        return {name: factors.get(name, 1.0) * each for name, each in parts.items()}

    def compose(self, setup: EngineSetup, work: Workload) -> Mapping[str, float]:
        """Return the seconds of each part of a step."""
        parts = dict.fromkeys(_FORMULAS, 0.0)
        flops = _count_flops(self.base, setup, work)
        ratios = [after / before if before else 1.0 for after, before in zip(flops, self.flops, strict=True)]
        count = work.accumulation
        forward, host = self.forward * ratios[0], self.launch * self._weigh_forward(setup)
        gathering = {name: self.gathered_factor * each for name, each in self._list_gathered(setup).items()}
        gathered = sum(gathering.values())
        parts[COMPUTE] += count * forward
        for name, each in gathering.items():  # while earlier layers compute
            parts[name] += count * each * max(0.0, 1 - forward / gathered) if each else 0.0
        parts[LAUNCHES] += count * _wait(max(forward, gathered), host)
        backward, host = self.backward * ratios[1], self.launch * self.hooks * self._weigh_backward(setup, work)
        beside = {name: self.beside_factor * each for name, each in self._list_backward(setup, work).items()}
        parts[COMPUTE] += count * backward
        parts[LAUNCHES] += count * _wait(backward + sum(beside.values()), host)
        for name, each in beside.items():
            parts[name] += count * each
        for name, each in self._list_update(setup).items():
            parts[OPTIMIZER if name == _CPU else name] += each
        each_micro = self.between * self.rates.split
        parts[BETWEEN] = self.between + each_micro * (count / self.base.work.accumulation - 1)
        parts[BETWEEN] *= 1 + self.rates.grows * (count_tokens(work) / count_tokens(self.base.work) - 1)
        return parts
