"""Dtypes, optimizers, adapters and quantization of a training, and the bytes of states that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.zero_model import TrainedModel

DTYPES = {
    "mixed": "16-bit weights with fp32 master weights",
    "pure": "16-bit weights, gradients and state",
    "bf16_master": "16-bit weights with 16-bit master weights and state",
    "fp32_weights": "fp32 weights, gradients and state, 16-bit arithmetic",
    "fp32": "all in fp32",
}
"""Regimes of dtypes."""

FRAMEWORKS = ("deepspeed", "none", "ddp", "fsdp")

# Moments of each optimizer by its name; Adafactor's rows and columns are next to nothing.
OPTIMIZERS = {"adamw": 2, "adamw8bit": 2, "lion": 1, "muon": 1, "sgd": 0, "adafactor": 0}

QUANTIZATIONS = {"nf4": 0.5 + 4 / 64, "nf4-dq": 0.5 + 1 / 64 + 4 / 64 / 256, "gptq4": 0.5 + 2.5 / 128}
"""Bytes of a quantized weight: 4 bits, and a scale for each block. nf4 has fp32 scales of 64 weights, in 8 bits with
double quantization (bitsandbytes, ``functional.py``); GPTQ has an fp16 scale and a 4-bit zero for each group of 128."""

_LORA_TARGETS = {
    "q": ("q_proj",),
    "v": ("v_proj",),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "all-linear": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True, slots=True)
class Regime:
    """What is trained, in which dtypes, by which optimizer."""

    dtype: str = "mixed"  # of DTYPES
    optimizer: str = "adamw"  # of OPTIMIZERS
    trained: int = 0  # parameters; 0: all, or the adapters alone
    lora_rank: int = 0  # 0: no adapters
    lora_targets: Sequence[str] = ("all-linear",)
    quantization: str = ""  # of QUANTIZATIONS, of the frozen layers
    framework: str = "deepspeed"  # of FRAMEWORKS
    fp32_norms: bool = False  # as ``prepare_model_for_kbit_training`` makes them: so are the inputs of layers


def count_adapters(shape: ModelShape, rank: int, targets: Sequence[str]) -> int:
    """Return the parameters of LoRA: r (inputs + outputs) for each adapted matrix."""
    if shape.counted is None:
        return 0
    names = {name for target in targets for name in _LORA_TARGETS.get(target, (target,))}
    parts = [size for name, size in shape.counted.linears.items() if name in names]
    return shape.layers * sum(rank * (inputs + outputs) * count for inputs, outputs, count in parts)


def size_states(dtype: str, optimizer: str) -> tuple[int, int, int]:
    """Return the bytes of a weight, of its optimizer state and of its master weight."""
    weight = {"fp32": 4, "fp32_weights": 4}.get(dtype, 2)
    wide = dtype in ("mixed", "fp32", "fp32_weights")
    moments = OPTIMIZERS[optimizer]
    state = moments * (4 if wide else 2) if optimizer != "adamw8bit" else moments
    return weight, state, 2 if dtype == "bf16_master" else 4


def build_model(shape: ModelShape, parameters: int, regime: Regime) -> TrainedModel:
    """Return the model with the bytes of its states."""
    if regime.lora_rank:
        moments = OPTIMIZERS[regime.optimizer]
        adapters = count_adapters(shape, regime.lora_rank, regime.lora_targets)
        frozen = round(_size_frozen(shape, parameters, regime))
        state = moments * 4
        loop = regime.framework != "deepspeed"
        total = parameters + adapters
        largest = shape.largest_layer
        if not loop:
            return TrainedModel(total, adapters, largest, 2, state, frozen_bytes=frozen)
        return TrainedModel(
            total,
            adapters,
            largest,
            4,
            state,
            frozen_bytes=frozen,
            is_loop=True,
            is_sharded=regime.framework == "fsdp",
            wide_residual=regime.fp32_norms,
        )
    weight, state, master = size_states(regime.dtype, regime.optimizer)
    trained = regime.trained or parameters
    return TrainedModel(
        parameters,
        trained,
        shape.largest_layer,
        weight,
        state,
        frozen_bytes=weight * (parameters - trained) if trained < parameters else None,
        master_each=master,
        is_loop=regime.framework != "deepspeed",
        is_sharded=regime.framework == "fsdp",
        computes_wide=regime.dtype == "fp32",
    )


def _size_frozen(shape: ModelShape, parameters: int, regime: Regime) -> float:
    if not regime.quantization or shape.counted is None:
        return 2.0 * parameters
    linears = shape.layers * sum(each * out * count for each, out, count in shape.counted.linears.values())
    return linears * QUANTIZATIONS[regime.quantization] + 2 * (parameters - linears)
