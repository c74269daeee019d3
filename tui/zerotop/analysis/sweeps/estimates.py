"""Estimates of the GPU and host memory that each stage and offload mode needs, without any run.

Model states by ZeRO's formulas (:mod:`zerotop.analysis.memory.expected.zero_model`), DeepSpeed's own estimates beside them
(:mod:`zerotop.analysis.memory.expected.deepspeed_estimates`), and activations by a slope in bytes for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, estimate_memory
from zerotop.analysis.memory.expected.deepspeed_estimates import Estimate, estimate_zero2, estimate_zero3
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.optimizer_states import StateBytes
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import EngineSetup, compute_expected, is_for_setup
from zerotop.analysis.sweeps.settings import OFFLOAD, OFFLOAD_DEVICES, STAGE, find_obstacle

_ADAM_STATE = 8  # bytes for each parameter


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: int = 1  # on each node
    nodes: int = 1
    gpu_bytes: int | None = None  # of one GPU
    gpu: str = ""  # its name


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model as estimates need it."""

    parameters: int
    trainable: int
    largest_layer: int | None  # parameters
    bytes_each: int = 2  # of a parameter
    state_each: int | None = _ADAM_STATE  # of the optimizer for each parameter
    frozen_bytes: int | None = None  # of the parameters that are not trained, where they have a dtype of their own
    master_each: int = 4  # bytes of a master weight
    is_loop: bool = False  # without DeepSpeed
    is_sharded: bool = False  # a loop's, by FSDP
    computes_wide: bool = False  # activations are in fp32
    wide_residual: bool = False  # the inputs of layers alone are in fp32


@dataclass(frozen=True, slots=True)
class OptionEstimate:
    """One stage and offload mode. Bytes of one GPU, or of one node if the field says so."""

    stage: int
    offload: str  # one of OFFLOAD_DEVICES
    gpu_bytes: int  # model states
    host_bytes: int  # of a node
    nvme_bytes: int  # of a node
    activation_bytes: float | None
    own_estimates: tuple[Estimate, ...]  # DeepSpeed's for this option, with and without zero.Init
    memory: JobMemory | None = None  # by the model's layers, if its configuration is known
    is_loop: bool = False  # FSDP in stage 3, else DDP or a single process

    @property
    def total_bytes(self) -> float:
        """Model states and activations on one GPU."""
        return self.gpu_bytes + (self.activation_bytes or 0.0)

    def fits(self, hardware: Hardware) -> bool | None:
        """Whether a GPU's memory holds the total, or the upper end of what the layers need; None if it is not known."""
        needed = self.memory.needed if self.memory is not None else self.total_bytes
        return None if hardware.gpu_bytes is None else needed < hardware.gpu_bytes


def estimate_options(
    model: TrainedModel,
    hardware: Hardware,
    *,
    token_bytes: float | None,
    tokens: int,
    shape: ModelShape | None = None,
    work: Workload | None = None,
) -> list[OptionEstimate]:
    """Return all options that DeepSpeed has, of a loop the only one.

    Args:
        token_bytes: of activations, from a recording.
        tokens: of a micro-batch on one GPU.
        shape: the model's, with the ``work`` of a step, if its configuration is known.
    """
    own = () if model.is_loop else estimate_all_rows(model, hardware)
    activations = None if token_bytes is None else token_bytes * tokens
    options = []
    for stage in (0, 1, 2, 3):
        for offload in OFFLOAD_DEVICES:
            if find_obstacle({STAGE: stage, OFFLOAD: offload}, {}):
                continue
            if model.is_loop and (stage, offload) != (3 if model.is_sharded else 0, "none"):
                continue
            setup = build_setup(model, hardware, stage, offload)
            expected = compute_expected(setup)
            sizes = [sum(part.values()) for part in (expected.gpu, expected.host, expected.nvme)]
            rows = tuple(one for one in own if is_for_setup(one, setup) and "nvme" not in offload)
            memory = None
            if shape is not None and work is not None:
                memory = estimate_memory(shape, setup, work, gpu=hardware.gpu, gpu_bytes=hardware.gpu_bytes)
            host, nvme = sizes[1] * hardware.gpus, sizes[2] * hardware.gpus
            if memory is not None:
                host = round(memory.host.likely) * hardware.gpus
            options.append(OptionEstimate(stage, offload, sizes[0], host, nvme, activations, rows, memory, model.is_loop))
    return options


def choose_option(options: Sequence[OptionEstimate], hardware: Hardware) -> OptionEstimate | None:
    """Return the fastest option that fits: without offload first, then the lowest stage, which communicates least."""
    fitting = [option for option in options if option.fits(hardware)]
    order = list(OFFLOAD_DEVICES)
    return min(fitting, key=lambda option: (order.index(option.offload), option.stage), default=None)


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
        stage=stage,
        offload_optimizer=optimizer,
        offload_parameters=parameters,
        offloaded_share=1.0,
        bytes_each=model.bytes_each,
        ranks=hardware.gpus * hardware.nodes,
        parameters=model.parameters,
        trainable=model.trainable,
        state_each=model.state_each,
        trains=True,
        on_gpu=True,
        largest_layer=model.largest_layer,
        frozen_bytes=model.frozen_bytes,
        master_each=model.master_each,
        is_loop=model.is_loop,
        loop_state=StateBytes(model.state_each * model.trainable, 0, 0) if model.is_loop and model.state_each else None,
        computes_wide=model.computes_wide,
        wide_residual=model.wide_residual,
    )
