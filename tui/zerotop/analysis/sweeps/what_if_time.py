"""The time of a recorded training's step at another setting, as far as its recording tells.

A forward and backward take time that follows the tokens, and time that does not: launches, and communication of parameters
and gradients. The former is what the arithmetic (6 P t FLOPs, 8 P t with recomputation) takes at the share of the GPU's peak
that large batches reach; the rest stays. Where nothing was measured there is no figure, but a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup
from zerotop.analysis.sweeps.baseline import Baseline

# Dense 16-bit FLOP/s by the beginning of the GPU's name (NVIDIA's data sheets).
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "V100": 125e12}
_FP32_PEAKS = {"H100": 67e12, "H200": 67e12, "A100": 19.5e12, "L40S": 92e12, "V100": 15.7e12}  # without TF32
_REACHED = (0.6, 0.42, 0.3)
"""Share of the peak that the arithmetic of large batches reaches: least, usual and most time."""
_BUSY = 1.5  # times the host's launches: the GPU is busy all the time
_MEASURED_SPREAD = 0.12  # between runs, and between steps of one


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
    """The parts of an iteration; none with the reason why there is no figure."""

    rows: tuple[TimeRow, ...]
    reason: str = ""

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The least, likely and most time."""
        return sum(row.low for row in self.rows), sum(row.likely for row in self.rows), sum(row.high for row in self.rows)


def predict_time(base: Baseline, setup: EngineSetup, work: Workload, nodes: int) -> TimePrediction:
    """Return the time of one step at another setting."""
    reason = find_time_obstacle(base, setup, work, nodes)
    return TimePrediction((), reason) if reason else TimePrediction(tuple(_list_rows(base, setup, work)))


def find_time_obstacle(base: Baseline, setup: EngineSetup, work: Workload, nodes: int) -> str:
    """Return why the recording does not tell the time, as a sentence; "" if it does."""
    if base.times is None or not base.times.iteration > 0:
        return "The recording has too few steps with the times of their phases: record ten or more."
    if nodes > base.nodes:
        return "The connection of more nodes than recorded was not measured: record a few steps on them."
    if (setup.offload_optimizer, setup.offload_parameters) != (base.setup.offload_optimizer, base.setup.offload_parameters):
        return (
            "Another offload moves other bytes over PCIe and computes elsewhere, which was not measured: record a few steps."
        )
    if setup.ranks != base.setup.ranks:
        return "Communication among another number of GPUs was not measured: record a few steps with them."
    if setup.stage != base.setup.stage and {setup.stage, base.setup.stage} != {1, 2}:
        return "Stage 0 has no partitions and stage 3 gathers parameters, which other stages do not: record a few steps."
    if work.checkpointing != base.work.checkpointing and _find_peak(base) is None:
        return f"The arithmetic of {base.gpu or 'this GPU'} has no known peak, from which recomputation could be told."
    return ""


def _find_peak(base: Baseline) -> float | None:
    peaks = _FP32_PEAKS if base.computes_in == "fp32" else _PEAKS
    return next((peak for name, peak in peaks.items() if name in base.gpu.upper()), None)


def _count_flops(setup: EngineSetup, work: Workload) -> tuple[float, float]:
    """Return those of the forward and of the backward of one micro-batch."""
    each = setup.parameters * work.micro_batch * (work.sequence or 1)
    return 2.0 * each, (6.0 if work.checkpointing != "none" else 4.0) * each


def _list_rows(base: Baseline, setup: EngineSetup, work: Workload) -> Iterator[TimeRow]:
    times, old = base.times, base.work.accumulation
    assert times is not None
    before, after = _count_flops(base.setup, base.work), _count_flops(setup, work)
    spread = _MEASURED_SPREAD if (setup, work) != (base.setup, base.work) else 0.0

    def build(name: str, recorded: float, ends: Sequence[float], formula: str) -> TimeRow:
        return TimeRow(name, recorded, (1 - spread) * ends[0], ends[1], (1 + spread) * ends[2], formula)

    for index, (name, each) in enumerate((("forward", times.forward), ("backward", times.backward))):
        launch = times.launches[index] if times.launches is not None else each
        scaled, note = _scale(base, each, launch, before[index], after[index])
        yield build(name, each * old, [work.accumulation * one for one in scaled], note)
    yield build("optimizer step", times.update, [times.update] * 3, "measured")
    rest = max(0.0, times.iteration - old * (times.forward + times.backward) - times.update)
    ends = sorted((rest, rest * work.accumulation / old))
    note = "measured" + (", for each micro-batch or once" if work.accumulation != old else "")
    yield build("between phases", rest, (ends[0], sum(ends) / 2, ends[1]), note)


def _scale(base: Baseline, each: float, launch: float, before: float, after: float) -> tuple[list[float], str]:
    """Return the least, likely and most seconds of a phase with other FLOPs, and how they were found.

    A phase that takes the GPU longer than the host's launches follows its arithmetic, down to the launches. In another one
    the GPU waits for launches, and its arithmetic takes a part of the time.
    """
    ratio = after / before if before else 1.0
    if ratio == 1:
        return [each] * 3, "measured for each micro-batch"
    if each > _BUSY * launch:
        likely = max(each * ratio, launch)
        return [likely, likely, max(likely, _BUSY * launch)], f"measured, {ratio:.3g} times the arithmetic"
    peak = _find_peak(base)
    if peak is None or not base.work.sequence:
        ends = sorted((each, each * ratio))
        note = f"{ratio:.3g} times the arithmetic; how much of the measured time follows it is not known"
        return [ends[0], sum(ends) / 2, ends[1]], note
    shares = [min(1.0, before / (reached * peak) / each) if each else 0.0 for reached in _REACHED]
    least, likely, most = (each * (1 - share + share * ratio) for share in shares)
    note = f"{ratio:.3g} times the arithmetic, which takes {shares[1]:.0%} of the measured time"
    return [min(least, most), likely, max(least, most)], note
