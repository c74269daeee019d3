"""Estimates of the GPU and host memory that each stage and offload mode needs, without any run.

The sums are those of :mod:`zerotop.analysis.memory.expected.beyond_allocated`, with DeepSpeed's own estimates
(:mod:`zerotop.analysis.memory.expected.deepspeed_estimates`) beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product

from zerotop.analysis.memory.caching_allocator import DEFAULT_RULES, AllocatorRules
from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, MeasuredContext, estimate_memory
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate, estimate_zero2, estimate_zero3
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.optimizer_states import StateBytes
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, TrainedModel, compute_expected, is_for_setup
from zerotop.analysis.sweeps.settings import OFFLOAD, OFFLOAD_DEVICES, STAGE, find_obstacle

USABLE_HOST = 0.95  # of a node's memory


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: int = 1  # on each node
    nodes: int = 1
    gpu_bytes: int | None = None  # of one GPU
    gpu: str = ""  # its name
    host_bytes: int | None = None  # of one node
    measured: MeasuredContext | None = None  # on a machine with this GPU


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
    micro_batch: int
    rate: float | None  # of all ranks, each second
    rate_unit: str  # tokens, or rows where tokens are not counted
    fits_host: bool | None  # whether a node's memory holds the upper end of its ranks
    is_loop: bool = False  # FSDP in stage 3, else DDP or a single process
    offloaded_share: float = 1.0  # of the optimizer, where it is offloaded

    def is_usable(self, hardware: Hardware) -> bool:
        """Whether it fits, as far as is known also in the node's memory."""
        return self.fits(hardware) is True and self.fits_host is not False

    def fits(self, hardware: Hardware) -> bool | None:
        """Whether a GPU's memory holds the upper end of what is needed; None if its size is not known."""
        return None if hardware.gpu_bytes is None else self.memory.needed < hardware.gpu_bytes


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
    expected, gpus = compute_expected(setup), hardware.gpus
    tokens = work.micro_batch * (work.sequence or 1) * work.accumulation * setup.ranks
    size = hardware.host_bytes
    return OptionEstimate(
        setup.stage,
        offload,
        gpu_bytes=sum(expected.gpu.values()),
        host_bytes=round(memory.host.likely) * gpus,
        nvme_bytes=sum(expected.nvme.values()) * gpus,
        own_estimates=tuple(one for one in own if is_for_setup(one, setup) and "nvme" not in offload),
        memory=memory,
        gpus=gpus,
        micro_batch=work.micro_batch,
        rate=tokens / seconds if seconds else None,
        rate_unit="tokens/s" if work.sequence else "rows/s",
        fits_host=memory.host.high * gpus < USABLE_HOST * size if size and memory.host.high else None,
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
