"""The parts of a recorded training's step, and those of the same training at another setting.

A phase takes the GPU its arithmetic, communication and transfers, or the host its launches, whichever is longer.
:class:`Rates` are the speeds of the parts; what a recording measured replaces them, as its phases are decomposed with the
same model. So at the recorded setting each phase takes what was measured, and a rate has influence only where a setting
changes what it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, isnan, sqrt

from zerotop.analysis.hardware.gpu_speeds import GpuSpeeds, find_speeds
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline
from zerotop.analysis.sweeps.phase_times import PhaseTimes
from zerotop.analysis.sweeps.seen_errors import count_tokens

COMPUTE, LAUNCHES, COMMUNICATION = "compute", "launches", "communication"
OPTIMIZER, TRANSFERS, BETWEEN = "optimizer", "transfers", "between phases"
PARTS = (COMPUTE, LAUNCHES, COMMUNICATION, OPTIMIZER, TRANSFERS, BETWEEN)
_CPU = "CPU optimizer"
BUSY = 1.4
"""Times the host's launches: what the GPU takes longer is its arithmetic."""
_MOST_OFF = 2.0  # times the usual efficiency: not more than its peak, and rarely less
_SHARPNESS = 3.0


@dataclass(frozen=True, slots=True)
class Rates:
    """The speeds that a recording need not tell. Host times are in those of the launches of a plain forward."""

    efficiency: float = 0.4  # share of the peak that the arithmetic of large batches reaches
    busy: float = 1.0  # times NVML's share of the time in which kernels run
    link: float = 1.0  # times NCCL's speed on this type of GPU
    gathered_forward: float = 6.5  # host time in stage 3, which gathers the parameters of each module
    gathered_backward: float = 12.0
    plain_backward: float = 2.3  # in stage 0
    reduced_backward: float = 4.2  # in stages 1 and 2, which put each gradient into a bucket
    offloaded_backward: float = 7.0  # more in these, if each gradient is copied to the CPU
    update: float = 1.7  # of an update on the GPU: norms of tensors, in stages 1 and 2 half of it for a rank's own
    update_bytes: float = 30.0  # of GPU memory for each updated element
    to_host: float = 50e9  # B/s of a GPU's gradients in the backward
    # Elements/s of a node, whose memory limits them, and of a core: of the CPU update, and of what DeepSpeed does around
    # it, as it unscales gradients, and casts weights and copies them to the GPUs.
    cpu_adam: float = 6e9
    cpu_adam_core: float = 0.62e9
    moved: float = 11e9
    moved_core: float = 0.3e9
    split: float = 0.5  # share of the time between phases that each micro-batch takes, not each step
    grows: float = 0.0  # share of it that grows with a micro-batch's tokens: loading data does, logging does not


def find_gpu(base: Baseline) -> GpuSpeeds | None:
    found = find_speeds(base.gpu)
    if found is None:
        return None
    return replace(found, link=base.machine.get("all_reduce", None if "PCI" in base.gpu.upper() else found.link))


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
    return _join(device, host) - device


def _join(one: float, other: float) -> float:
    """Return how long a phase takes whose two parts overlap: a little longer than the longer one."""
    return float((one**_SHARPNESS + other**_SHARPNESS) ** (1 / _SHARPNESS))


def _subtract(total: float, part: float) -> float:
    """Return the other part of a phase, the GPU's or the host's."""
    return float(max(0.0, total**_SHARPNESS - part**_SHARPNESS) ** (1 / _SHARPNESS))


def _is_offloaded(setup: EngineSetup) -> bool:
    return setup.offload_optimizer != "none"


class StepParts:
    """The parts of the recorded phases, from which those of other settings are composed."""

    def __init__(self, base: Baseline, rates: Rates) -> None:
        assert base.times is not None
        self.base, self.rates, self.times = base, rates, base.times
        self.gpu = find_gpu(base)
        setup, work, times = base.setup, base.work, base.times
        self.flops = _count_flops(base, setup, work)
        self._read_forward(times)
        self._read_backward(times)
        self._read_update(setup, times)
        self._read_kernels(times)
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
        if guess is not None and each < BUSY * host:
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
        # More than both is neither arithmetic nor a launch: the backward ends once gloo has exchanged the gradients.
        self.exchanged = max(0.0, each - _join(device, weight)) if times.is_over_gloo else 0.0
        each -= self.exchanged
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

    def _read_kernels(self, times: PhaseTimes) -> None:
        """Find how long kernels run that are too small for their FLOPs to decide, as the GPU's use shows that they do.

        They also run while the host launches, so no phase is longer by them.
        """
        setup, work, all_flops = self.base.setup, self.base.work, sum(self.flops)
        beside = sum((*self._list_gathered(setup).values(), *self._list_backward(setup, work).values()))
        busy = min(1.0, self.rates.busy * times.busy) * (times.iteration - times.update) / work.accumulation - beside
        is_known = not isnan(times.busy) and busy > 0 and all_flops > 0
        arithmetic = (self.forward, self.backward)
        self.kernels = tuple(
            _subtract(busy * flops / all_flops, each) if is_known else 0.0
            for flops, each in zip(self.flops, arithmetic, strict=True)
        )

    # --- the parts at any setting ------------------------------------------------------------------------------------------

    def _weigh_forward(self, setup: EngineSetup) -> float:
        return self.rates.gathered_forward if setup.stage == 3 and not setup.is_loop else 1.0

    def _weigh_backward(self, setup: EngineSetup, work: Workload) -> float:
        """Return the host time of a backward. In stage 1 it is a mean: only the last micro-batch reduces gradients."""
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
        parts = dict.fromkeys(PARTS, 0.0)
        flops = _count_flops(self.base, setup, work)
        ratios = [after / before if before else 1.0 for after, before in zip(flops, self.flops, strict=True)]
        count = work.accumulation
        forward, host = self.forward * ratios[0], self.launch * self._weigh_forward(setup)
        gathering = {name: self.gathered_factor * each for name, each in self._list_gathered(setup).items()}
        gathered = sum(gathering.values())
        for name, each in gathering.items():  # while earlier layers compute
            parts[name] += count * each * max(0.0, 1 - forward / gathered) if each else 0.0
        _add_phase(parts, count, forward, _wait(max(forward, gathered), host), self.kernels[0])
        backward, host = self.backward * ratios[1], self.launch * self.hooks * self._weigh_backward(setup, work)
        beside = {name: self.beside_factor * each for name, each in self._list_backward(setup, work).items()}
        _add_phase(parts, count, backward, _wait(backward + sum(beside.values()), host), self.kernels[1])
        for name, each in beside.items():
            parts[name] += count * each
        if setup.ranks > 1:
            parts[COMMUNICATION] += (
                self.base.work.accumulation * self.exchanged * setup.trainable / max(1, self.base.setup.trainable)
            )
        for name, each in self._list_update(setup).items():
            parts[OPTIMIZER if name == _CPU else name] += each
        each_micro = self.between * self.rates.split
        parts[BETWEEN] = self.between + each_micro * (count / self.base.work.accumulation - 1)
        parts[BETWEEN] *= 1 + self.rates.grows * (count_tokens(work) / count_tokens(self.base.work) - 1)
        return parts


def _add_phase(parts: dict[str, float], count: int, device: float, launches: float, kernels: float) -> None:
    """Add the arithmetic of a phase and its launches, in part of which small kernels run."""
    busy = min(_join(device, kernels), device + launches)
    parts[COMPUTE] += count * busy
    parts[LAUNCHES] += count * (device + launches - busy)
