"""Which launcher and which options each ready config is run with: one real run a config, for all tests."""

from __future__ import annotations

import pytest

EVALUATE = ("--eval-every", "2")
SAVE = ("--save-every", "2", "--output-dir", "checkpoints")
ACCUMULATE = ("--gradient-accumulation", "2")
RECOMPUTE = ("--gradient-checkpointing",)

# One launcher and one set of options a config: all pairs would take hours, and the parts are independent.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero0_bf16": ("torchrun", EVALUATE),
    "zero1_bf16": ("deepspeed", ACCUMULATE),
    "zero2_bf16": ("accelerate", (*RECOMPUTE, *SAVE)),
    "zero3_bf16": ("deepspeed", (*EVALUATE, *SAVE, *ACCUMULATE)),
    "zero1_offload_optimizer_bf16": ("torchrun", (*ACCUMULATE, *SAVE)),
    "zero2_offload_optimizer_bf16": ("deepspeed", (*EVALUATE, *SAVE, *ACCUMULATE)),
    "zero3_offload_optimizer_bf16": ("accelerate", EVALUATE),
    "zero3_offload_params_bf16": ("torchrun", (*RECOMPUTE, *ACCUMULATE)),
    "zero3_offload_optimizer_params_bf16": ("torchrun", (*RECOMPUTE, *EVALUATE)),
    "zero3_nvme_optimizer_bf16": ("deepspeed", ()),
    "zero3_nvme_params_bf16": ("torchrun", ACCUMULATE),
    "zero3_nvme_optimizer_params_bf16": ("accelerate", EVALUATE),
    "zero0_fp16": ("deepspeed", ()),
    "zero1_fp16": ("torchrun", ACCUMULATE),
    "zero2_fp16": ("deepspeed", EVALUATE),
    "zero3_fp16": ("accelerate", ()),
    "zero2_offload_optimizer_fp16": ("deepspeed", ACCUMULATE),
    "zero3_offload_optimizer_params_fp16": ("torchrun", ()),
}


def skip_if_impossible_here(config: str) -> None:
    if config.endswith("_fp16"):
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if not CPU_Accelerator().is_fp16_supported():
            pytest.skip("DeepSpeed says that this CPU cannot compute in fp16")
    if "nvme" in config:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            pytest.skip("DeepSpeed says that its async_io cannot be built here: libaio's headers are missing")
