"""Estimates of the GPU and host memory that each stage and offload mode needs, without any run.

The sums are those of :mod:`zerotop.analysis.memory.expected.beyond_allocated`, with DeepSpeed's own estimates
(:mod:`zerotop.analysis.memory.expected.deepspeed_estimates`) beside them.

The time of a step without any run: FLOPs by formula, and the share of a GPU's peak that other trainings reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product

from zerotop.analysis.failures.out_of_memory import PostMortem
from zerotop.analysis.hardware.gpu_speeds import find_speeds, measure_mfu
from zerotop.analysis.memory.caching_allocator import DEFAULT_RULES, AllocatorRules
from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, MeasuredContext, Room, estimate_memory
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate, estimate_zero2, estimate_zero3
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.optimizer_states import StateBytes
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, TrainedModel, compute_expected, is_for_setup
from zerotop.analysis.sweeps.settings import OFFLOAD, OFFLOAD_DEVICES, STAGE, find_obstacle

# Least, usual and most share of the dense 16-bit peak: of the tuned rows of `benchmarks/estimate_truths.jsonl` on A100s (1
# to 70 B, 2,048 tokens and more, one to four GPUs), of which 90 % are within, and around six recorded forwards on H200s that
# the GPU decides (0.26 to 0.38).
_SHARES = {"A100": (0.30, 0.59, 0.72), "H100": (0.22, 0.35, 0.60), "H200": (0.22, 0.35, 0.60)}
# Of a layer's forward and backward: below, the host's launches may take longer, which in ZeRO-3 are those of gathering, too
# (12 ms a layer of Qwen2 0.5 B on an H200).
_LEAST_LAYER_S, _LEAST_GATHERED_S = 0.005, 0.015


@dataclass(frozen=True, slots=True)
class EstimatedTime:
    """The least, likely and most seconds of a step, and its rates; or the reason why there is no figure."""

    seconds: tuple[float, float, float] | None
    tokens_per_s: float
    mfu: float
    reason: str = ""


def estimate_time(shape: ModelShape, setup: EngineSetup, work: Workload, gpu: str, nodes: int) -> EstimatedTime:
    """Return the time of one step of a training on GPUs of this type."""
    name = next((name for name in _SHARES if name in gpu.upper()), "")
    speeds = find_speeds(name)
    reason = _find_obstacle(shape, setup, nodes)
    if speeds is None:
        reason = f"Give --gpu with one of {', '.join(_SHARES)}, of which is known what trainings reach."
    if reason or speeds is None:
        return EstimatedTime(None, 0.0, 0.0, reason)
    flops = _count_flops(shape, setup, work)
    least, usual, most = (flops / (share * speeds.peak) for share in reversed(_SHARES[name]))
    is_gathered = setup.stage == 3 and not setup.is_loop
    if usual < (_LEAST_GATHERED_S if is_gathered else _LEAST_LAYER_S) * shape.layers:
        reason = (
            "So few tokens that the host's launches may decide: record a few steps, or give more rows or a longer sequence."
        )
        return EstimatedTime(None, 0.0, 0.0, reason)
    rate = work.tokens * setup.ranks / usual
    mfu = measure_mfu(rate, setup.parameters, setup.trainable, setup.ranks, [name], "bf16", "")
    count = work.accumulation
    return EstimatedTime((count * least, count * usual, count * most), rate, mfu)


def _find_obstacle(shape: ModelShape, setup: EngineSetup, nodes: int) -> str:
    """Return why the time is not known, as a sentence; "" if it is."""
    ask = "record a few steps of any setting, and ask what-if"
    if setup.offload_optimizer != "none" or setup.offload_parameters != "none":
        return f"The speeds of the CPUs and of the transfers decide with offload: {ask}."
    if nodes > 1:
        return f"The connection of the nodes was not measured: {ask}."
    if setup.computes_wide:
        return f"Whether fp32 computes in TF32 is not known: {ask}."
    if shape.counted is None or shape.vision or shape.counted.linears["down_proj"][2] > 1:
        return f"The FLOPs of a token are counted for dense language models of known families alone: {ask}."
    return ""


def _count_flops(shape: ModelShape, setup: EngineSetup, work: Workload) -> float:
    """Return the FLOPs of a micro-batch: 2 for each parameter and token forward, 2 or 4 backward, 2 again if recomputed.

    A token of a sequence of s takes 2 s h more in each layer's forward, as half of attention's products is masked.
    """
    attention = work.sequence * shape.hidden * shape.layers
    passes = 3 if work.checkpointing == "full" else 2
    return work.tokens * 2.0 * (passes * (setup.parameters + attention) + setup.trainable + attention)


USABLE_HOST = 0.95  # of a node's memory


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: int = 1  # on each node
    nodes: int = 1
    gpu_bytes: int | None = None  # of one GPU
    gpu: str = ""  # its name
    host_bytes: int | None = None  # of one node
    measured: MeasuredContext | None = None  # on a machine with this GPU
    limit_bytes: int | None = None  # what PyTorch may use of one GPU, if that is less


@dataclass(frozen=True, slots=True)
class OptionEstimate:
    """One stage and offload mode. Bytes of one GPU, or of one node if the field says so."""

    stage: int
    offload: str  # one of OFFLOAD_DEVICES
    gpu_bytes: int  # model states
    host_bytes: int  # of a node
    nvme_bytes: int  # of a node
    own_estimates: tuple[Estimate, ...]  # DeepSpeed's for this option, with and without zero.Init
    memory: JobMemory
    gpus: int  # of a node
    node_ranks: int  # more where some share a GPU
    micro_batch: int
    rate: float | None  # of all ranks, each second
    rate_unit: str  # tokens, or rows where tokens are not counted
    fits_host: bool | None  # whether a node's memory holds the upper end of its ranks
    is_loop: bool = False  # FSDP in stage 3, else DDP or a single process
    offloaded_share: float = 1.0  # of the optimizer, where it is offloaded
    measured_most: int | None = None  # allocated by a recording of this option, outside of the steps of the estimate
    has_failed: bool = False  # a recording of this option ran out of GPU memory
    growth: str = ""  # how memory that grew in the recording fills a GPU, if it does not at first
    left_out: PostMortem | None = None  # a failure of the recording that the estimate does not have

    def is_usable(self, hardware: Hardware) -> bool:
        """Whether it fits, as far as is known also in the node's memory."""
        return self.fits(hardware) is True and self.fits_host is not False

    def fits(self, hardware: Hardware) -> bool | None:
        """Whether a GPU's memory holds the upper end of what is needed; None if that, or its size, is not known."""
        if self.has_failed:
            return False
        room = self.measure_room(hardware)
        if room is None or (self.left_out is not None and room.spare > 0):
            return None
        return room.spare > 0

    def measure_needed(self, hardware: Hardware) -> float:
        """Return the memory that the verdict counts: of the GPU, or of PyTorch where that has less room."""
        room = self.measure_room(hardware)
        return room.needed if room is not None else self.memory.needed

    def measure_room(self, hardware: Hardware) -> Room | None:
        """Return what it needs at most of what is there, and spares; None if the size is not known."""
        return self.memory.measure_room(hardware.gpu_bytes, hardware.limit_bytes, self.measured_most)


def list_options(*, is_loop: bool, loop_stage: int = 0) -> list[tuple[int, str]]:
    """Return the stages and offload modes that DeepSpeed has; of a loop the only one."""
    if is_loop:
        return [(loop_stage, "none")]
    pairs = product((0, 1, 2, 3), OFFLOAD_DEVICES)
    return [(stage, offload) for stage, offload in pairs if not find_obstacle({STAGE: stage, OFFLOAD: offload}, {})]


def estimate_options(
    model: TrainedModel, hardware: Hardware, shape: ModelShape, work: Workload, rules: AllocatorRules = DEFAULT_RULES
) -> list[OptionEstimate]:
    """Return the estimates of all options."""
    own = () if model.is_loop else estimate_all_rows(model, hardware)
    modes = list_options(is_loop=model.is_loop, loop_stage=3 if model.is_sharded else 0)
    return [estimate_option(model, hardware, shape, work, mode, own, rules=rules) for mode in modes]


def estimate_option(
    model: TrainedModel,
    hardware: Hardware,
    shape: ModelShape,
    work: Workload,
    mode: tuple[int, str],
    own: Sequence[Estimate],
    *,
    rules: AllocatorRules | None = DEFAULT_RULES,
) -> OptionEstimate:
    """Return the estimate of one stage and offload mode. ``rules``: of the simulated allocator; None without."""
    setup = build_setup(model, hardware, *mode)
    memory = estimate_memory(
        shape,
        setup,
        work,
        gpu=hardware.gpu,
        gpu_bytes=hardware.gpu_bytes,
        rules=rules,
        measured=hardware.measured,
    )
    return build_option(setup, mode[1], memory, hardware, own, work)


def build_option(
    setup: EngineSetup,
    offload: str,
    memory: JobMemory,
    hardware: Hardware,
    own: Sequence[Estimate],
    work: Workload,
    seconds: float | None = None,
) -> OptionEstimate:
    """Return an option with the memory of a node, and those of DeepSpeed's estimates that are for it.

    ``seconds``: of a step, where a recording tells.
    """
    expected, ranks = compute_expected(setup), max(1, setup.ranks // hardware.nodes)
    tokens = work.micro_batch * (work.sequence or 1) * work.accumulation * setup.ranks
    size = hardware.host_bytes
    return OptionEstimate(
        setup.stage,
        offload,
        gpu_bytes=sum(expected.gpu.values()),
        host_bytes=round(memory.host.likely) * ranks,
        nvme_bytes=sum(expected.nvme.values()) * ranks,
        own_estimates=tuple(one for one in own if is_for_setup(one, setup) and "nvme" not in offload),
        memory=memory,
        gpus=hardware.gpus,
        node_ranks=ranks,
        micro_batch=work.micro_batch,
        rate=tokens / seconds if seconds else None,
        rate_unit="tokens/s" if work.sequence else "rows/s",
        fits_host=memory.host.high * ranks < USABLE_HOST * size if size and memory.host.high else None,
        is_loop=setup.is_loop,
        offloaded_share=setup.offloaded_share,
    )


def estimate_all_rows(model: TrainedModel, hardware: Hardware) -> Sequence[Estimate]:
    """Return DeepSpeed's own estimates in all their rows; those of stage 3 need the largest layer."""
    rows = estimate_zero2(model.parameters, gpus=hardware.gpus, nodes=hardware.nodes)
    if model.largest_layer is not None:
        rows += estimate_zero3(model.parameters, model.largest_layer, gpus=hardware.gpus, nodes=hardware.nodes)
    return rows


def build_setup(model: TrainedModel, hardware: Hardware, stage: int, offload: str) -> EngineSetup:
    """Return the input of the formulas for one option."""
    optimizer, parameters = OFFLOAD_DEVICES[offload]
    return EngineSetup(
        **{field.name: getattr(model, field.name) for field in fields(TrainedModel)},
        stage=stage,
        offload_optimizer=optimizer,
        offload_parameters=parameters,
        ranks=hardware.gpus * hardware.nodes,
        trains=True,
        on_gpu=True,
        loop_state=StateBytes(model.state_each * model.trainable, 0, 0) if model.is_loop and model.state_each else None,
    )
