"""Memory beyond PyTorch's allocated bytes: reserved segments, CUDA's context, NCCL, and the host memory of a rank.

Where the order of a step's blocks is known, reserved memory is that of a simulated allocator
(:mod:`zerotop.analysis.memory.expected.step_blocks`). Elsewhere the shares below are medians over measured runs
(``benchmarks/estimate_truths.py``), with the interval that held most of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerotop.analysis.formatting import Text
from zerotop.analysis.memory.caching_allocator import DEFAULT_RULES, AllocatorRules
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import (
    LOSS,
    LOSSES,
    STEP,
    MemoryRow,
    PeakMoment,
    Workload,
    compute_moments,
)
from zerotop.analysis.memory.expected.step_blocks import is_simulated, simulate_beyond
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected
from zerotop.analysis.memory.tensor_inventory import GRADIENTS, MASTER_WEIGHTS, PARAMETERS

_STATES_SPREAD, _ACTIVATIONS_SPREAD, _GUESSED_SPREAD = (0.98, 1.02), (0.94, 1.06), (0.7, 1.45)
"""Measured over computed allocated memory: of the optimizer's step, of other moments, and of adapters without checkpointing
and of unknown families, for which no formula here knows what the forward keeps (dropout and casts differ)."""

_PARTLY_USED, _PARTLY_USED_SHARE = 1.0e9, 0.1  # of segments, whatever their size; of small trainings a share of allocated
_LAYER_SHARE = 0.1  # of a layer's blocks
# Of the logits' blocks. With checkpointing the next forward puts layer inputs, which live long, into their free segments.
_LOGITS_SHARES = {"logits": 0.4, "fused": 0.9}
_LOGITS_SHARE = 0.1  # without checkpointing
_GATHERING_SHARE = 0.15  # of allocated: FSDP's stream for gathering has segments of its own
_RESERVED_SPREAD, _SIMULATED_SPREAD = (0.88, 1.22), (0.95, 1.18)
_STUCK_SHARE = 0.12  # the least seen of it, which counts for the verdict

# CUDA's context and libraries of one process, by the beginning of the GPU's name: lowest, usual, highest. NVML less
# reserved of 22 recorded loops on H100s and H200s is 0.66 to 0.81 GB.
_CONTEXTS = {"H100": (0.66e9, 0.79e9, 1.0e9), "H200": (0.66e9, 0.79e9, 1.0e9), "A100": (0.5e9, 0.8e9, 1.0e9)}
_OTHER_CONTEXT = (0.5e9, 1.0e9, 1.8e9)
_MORE_KERNELS = 0.8e9  # that a training loads at most beyond what the measuring program did
# NCCL's channels and buffers: DeepSpeed starts it for one rank, too (1.38 or 1.79 GB with the context in 17 recordings), and
# several ranks open more (1.9 to 2.2 GB in 17 with DeepSpeed, 1.68 in two loops).
_NCCL_ALONE, _NCCL, _NCCL_LOOP = (0.6e9, 0.61e9, 0.8e9), (0.5e9, 0.5e9, 0.8e9), (0.8e9, 0.89e9, 1.2e9)

_ROUNDED = 1.4  # between 1 and 2, by the shapes of tensors
_TENSORS = "pinned tensor by tensor: the next power of two of the largest, 1.4 x others"
DEEPSPEED_PROCESS, LOOP_PROCESS = (2.2e9, 2.3e9, 2.6e9), (1.5e9, 1.65e9, 2.1e9)
"""Host memory of Python, PyTorch's, Transformers' and CUDA's libraries, least, usual, most: with DeepSpeed and without."""
NCCL_HOST = 0.4e9
"""Host memory of a process that NCCL adds, among several ranks. DeepSpeed starts it for one, too."""
_SPREAD_PINNED = (0.93, 1.1)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate in bytes, with the interval that should hold nine tenths of measurements."""

    low: float
    likely: float
    high: float
    formula: str


@dataclass(frozen=True, slots=True)
class MeasuredContext:
    """Bytes of one process on this machine's GPUs, as a small program measured them."""

    context: float
    nccl: float | None  # None where it was not measured


class Room(NamedTuple):
    """What a setting needs at most of what a GPU, or PyTorch on it, has."""

    needed: float
    size: int
    is_limited: bool  # PyTorch may use only a fraction of the device, which is less than it has

    @property
    def spare(self) -> float:
        return self.size - self.needed

    @property
    def sizes(self) -> Text:
        """``79.65 GiB`` or ``the 12.00 GiB that PyTorch may use``."""
        return Text("the {size:bytes} that PyTorch may use" if self.is_limited else "{size:bytes}", {"size": self.size})


@dataclass(frozen=True, slots=True)
class JobMemory:
    """The memory of one rank."""

    moments: tuple[PeakMoment, ...]  # the highest first
    allocated: Interval
    reserved: Interval
    context: Interval
    device: Interval  # reserved and context, as NVML counts the process
    host: Interval
    host_rows: tuple[MemoryRow, ...]
    stuck: MemoryRow  # reserved memory that PyTorch cannot give back before it fails
    ranks_on_gpu: int = 1  # a GPU must hold so many of them

    @property
    def needed(self) -> float:
        """The memory of a GPU that the verdict counts: PyTorch gives other cached segments back before it fails."""
        return self.ranks_on_gpu * (self.allocated.high + self.context.high + self.stuck.bytes)

    def measure_room(self, gpu_bytes: int | None, limit_bytes: int | None, allocated: float | None = None) -> Room | None:
        """Return the room on a GPU, or that of PyTorch if it is less; None if its size is not known.

        ``allocated``: the most, if it is not the upper end of these sums.
        """
        if gpu_bytes is None:
            return None
        allocated = self.allocated.high if allocated is None else max(allocated, self.allocated.high)
        needed = allocated + self.stuck.bytes
        room = Room(self.ranks_on_gpu * (needed + self.context.high), gpu_bytes, is_limited=False)
        limited = Room(needed, limit_bytes, is_limited=True) if limit_bytes is not None else room
        return min(room, limited, key=lambda one: one.spare)


def estimate_memory(
    shape: ModelShape,
    setup: EngineSetup,
    work: Workload,
    *,
    gpu: str = "",
    gpu_bytes: int | None = None,
    rules: AllocatorRules | None = DEFAULT_RULES,
    measured: MeasuredContext | None = None,
) -> JobMemory:
    """Return the memory of one rank.

    Args:
        gpu: its name.
        gpu_bytes: its memory, where known.
        rules: of the simulated allocator; None without a simulation, which takes some 20 ms.
        measured: on the machine of the GPU, for types that no training was measured on.
    """
    moments = compute_moments(shape, setup, work)
    peak = moments[0].bytes
    is_step = moments[0].name == STEP
    is_partial = setup.trainable < setup.parameters and work.checkpointing == "none"
    is_guessed = shape.counted is None or shape.vision > 0 or is_partial
    spread = _STATES_SPREAD if is_step else _GUESSED_SPREAD if is_guessed else _ACTIVATIONS_SPREAD
    low, high = spread
    allocated = Interval(low * peak, peak, high * peak, f"the {moments[0].name}: the highest of {len(moments)} moments")
    context = find_context(gpu, setup, measured)
    reserved = _estimate_reserved(shape, setup, work, moments, rules)
    reserved = replace(reserved, low=max(low * peak, reserved.low))
    device = add_intervals(reserved, context, "reserved + context")
    if gpu_bytes is not None:
        reserved, device = _limit(reserved, max(peak, gpu_bytes - context.low)), _limit(device, gpu_bytes)
    rows = tuple(list_host_rows(setup, work.accumulation))
    pinned = sum(row.bytes for row in rows)
    least, usual, most = LOOP_PROCESS if setup.is_loop else DEEPSPEED_PROCESS
    communicates = NCCL_HOST * (setup.is_loop and setup.ranks > 1)
    host = Interval(
        least + communicates + _SPREAD_PINNED[0] * pinned,
        usual + communicates + pinned,
        most + communicates + _SPREAD_PINNED[1] * pinned,
        "libraries of a process, and what is offloaded, pinned",
    )
    stuck = _find_stuck(shape, setup, work, moments[0])
    return JobMemory(moments, allocated, reserved, context, device, host, rows, stuck)


def _estimate_reserved(
    shape: ModelShape,
    setup: EngineSetup,
    work: Workload,
    moments: tuple[PeakMoment, ...],
    rules: AllocatorRules | None,
) -> Interval:
    if rules is not None and is_simulated(shape, setup):
        likely = moments[0].bytes + simulate_beyond(shape, setup, work, rules)
        low, high = _SIMULATED_SPREAD
        return Interval(
            low * likely, likely, high * likely, "the blocks of two steps in a simulation of PyTorch's allocator"
        )
    likely = max(_add_segments(moment, setup, work) for moment in moments)
    low, high = _RESERVED_SPREAD
    text = (
        f"the highest moment with its segments: {_PARTLY_USED / 1e9:.0f} GB partly used, {_LAYER_SHARE} of a layer's blocks"
    )
    text += f", {_find_logits_share(work)} of the logits'" + (
        f", {_GATHERING_SHARE} of all for FSDP" if _gathers(setup) else ""
    )
    return Interval(low * likely, likely, high * likely, text)


def add_intervals(one: Interval, other: Interval, formula: str) -> Interval:
    return Interval(one.low + other.low, one.likely + other.likely, one.high + other.high, formula)


def _limit(part: Interval, most: float) -> Interval:
    return Interval(min(part.low, most), min(part.likely, most), min(part.high, most), part.formula)


def _gathers(setup: EngineSetup) -> bool:
    """Return whether FSDP gathers layers."""
    return setup.is_loop and setup.ranks > 1 and setup.stage == 3


def _find_logits_share(work: Workload) -> float:
    return _LOGITS_SHARES.get(work.loss, 0.0) if work.checkpointing != "none" else _LOGITS_SHARE


def _add_segments(moment: PeakMoment, setup: EngineSetup, work: Workload) -> float:
    """Return what is reserved if this moment decides."""
    layer = _sum_rows(moment, "gradients in a layer", "recomputed layer")
    logits = _sum_rows(moment, "logits and loss")
    partly_used = min(_PARTLY_USED, _PARTLY_USED_SHARE * moment.bytes)
    all_share = 1 + _GATHERING_SHARE * _gathers(setup)
    return all_share * moment.bytes + partly_used + _LAYER_SHARE * layer + _find_logits_share(work) * logits


def _find_stuck(shape: ModelShape, setup: EngineSetup, work: Workload, moment: PeakMoment) -> MemoryRow:
    if moment.name == STEP:
        return MemoryRow("stuck segments", 0, "the step's blocks are those of single parameters")
    if _gathers(setup):
        return MemoryRow("stuck segments", _STUCK_SHARE * moment.bytes, "0.12 of allocated: blocks of FSDP's own stream")
    size = 4 * shape.vocabulary * work.tokens if moment.name == LOSS and LOSSES[work.loss][0] else 0
    return MemoryRow("stuck segments", size, "4 v t: a free block of fp32 logits between blocks in use")


def _sum_rows(moment: PeakMoment, *names: str) -> float:
    return sum(row.bytes for row in moment.rows if row.name in names)


def find_context(gpu: str, setup: EngineSetup, measured: MeasuredContext | None = None) -> Interval:
    """Return CUDA's context of a rank, and NCCL's memory: of the GPU's type, else as measured, else as others have."""
    name = next((name for name in _CONTEXTS if name in gpu.upper()), "")
    is_known = name in ("H100", "H200")
    nccl = Interval(*(_NCCL_LOOP if setup.is_loop and is_known else _NCCL), "")
    if not name and measured is not None:
        size, text = measured.context, "CUDA's context and libraries, as measured on this machine"
        context = Interval(size, size, size + _MORE_KERNELS, text)
        if measured.nccl is not None:
            nccl = Interval(measured.nccl, measured.nccl, max(_NCCL[2], measured.nccl), "")
    else:
        text = f"CUDA's context and libraries, as seen on {name or 'other GPUs'}"
        context = Interval(*_CONTEXTS.get(name, _OTHER_CONTEXT), text)
        if is_known and not setup.is_loop:
            context = add_intervals(context, Interval(*_NCCL_ALONE, ""), f"{text}, and NCCL, which DeepSpeed starts")
    return add_intervals(context, nccl, f"{text}, and NCCL") if setup.ranks > 1 else context


def list_host_rows(setup: EngineSetup, accumulation: int = 1) -> list[MemoryRow]:
    """Return what a rank offloads to host memory.

    PyTorch rounds pinned blocks up to a power of two (``CachingHostAllocator``): those of gradients and master weights,
    DeepSpeed's 16-bit copy of the partition, and tensor by tensor parameters and the gradients of several micro-batches.
    """
    rows = []
    is_cast = setup.stage == 3 and setup.offload_optimizer == "cpu" and setup.offload_parameters == "none"
    # Stage 3 clones its master weights (``stage3.py``). With parameters in host memory, too, more is there than is known,
    # and the rounded sum is nearer to what was measured.
    pinned = (GRADIENTS,) if is_cast else (GRADIENTS, MASTER_WEIGHTS)
    for name, size in compute_expected(setup).host.items():
        if size and name in pinned:
            rows.append(MemoryRow(name, _round_up(size), "ZeRO's formula, pinned: the next power of two"))
        elif size and name == PARAMETERS:
            rows.append(MemoryRow(name, _round_tensors(setup, size), f"ZeRO's formula, {_TENSORS}"))
        elif size:
            rows.append(MemoryRow(name, size, "ZeRO's formula"))
    share = setup.bytes_each * setup.trainable / setup.ranks
    if rows:
        count = 2 if setup.offload_parameters == "cpu" else 1
        note = f"2 P / N, pinned{', twice' if count > 1 else ''}"
        rows.append(MemoryRow("16-bit copy", count * _round_up(share), note))
    if is_cast:
        rows.append(MemoryRow("updated weights", share, "2 P / N: cast to 16 bits before they go to the GPU"))
    if setup.offload_optimizer == "cpu" and setup.stage in (1, 2):
        rows += _list_gradient_buffers(setup, share, accumulation)
    return rows


def _list_gradient_buffers(setup: EngineSetup, share: float, accumulation: int) -> Iterator[MemoryRow]:
    """Yield the pinned buffers through which stages 1 and 2 bring gradients to the CPU (``stage_1_and_2.py``)."""
    if setup.largest_layer:
        largest = setup.bytes_each * min(setup.largest_layer, setup.trainable)
        yield MemoryRow(
            "gradient on its way", _round_up(largest), "of the largest tensor, pinned (temp_grad_buffer_for_cpu_offload)"
        )
    if accumulation > 1:
        yield MemoryRow("accumulated gradients", _round_tensors(setup, share), f"2 P / N, {_TENSORS}")


def _round_tensors(setup: EngineSetup, size: float) -> float:
    """Return a rank's share of all tensors, each of them pinned: the largest is known, others have many sizes."""
    largest = min(size, setup.bytes_each * (setup.largest_layer or 0) / (setup.ranks if setup.stage == 3 else 1))
    return (_round_up(largest) if largest else 0) + _ROUNDED * (size - largest)


def _round_up(size: float) -> int:
    return 1 << (max(1, int(size)) - 1).bit_length()
