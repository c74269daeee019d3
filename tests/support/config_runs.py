"""The launcher and the options for each ready config: one real run per config, for all tests."""

from __future__ import annotations

import pytest

EVALUATE = ("--eval-every", "2")
SAVE = ("--save-every", "2", "--output-dir", "checkpoints")
ACCUMULATE = ("--gradient-accumulation", "2")
RECOMPUTE = ("--gradient-checkpointing",)

TOGETHER = "together"
"""In place of a launcher: one job runs all of these one after another, see finetunes_in_turn.py."""

WITHOUT_DEEPSPEED = "without_deepspeed"
OWN_MODEL = "own_model"
"""Two more of them: without a config, and with a model and a text of the user's own."""

# One launcher and one set of options a config: all pairs would take hours, and the parts are independent. A start takes
# longer than three steps: only what test_launchers looks at has one of its own.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero0_bf16": ("torchrun", EVALUATE),
    "zero1_bf16": (TOGETHER, ACCUMULATE),
    "zero2_bf16": (TOGETHER, (*RECOMPUTE, *SAVE)),
    "zero3_bf16": ("deepspeed", (*EVALUATE, *SAVE, *ACCUMULATE)),
    "zero1_offload_optimizer_bf16": (TOGETHER, (*ACCUMULATE, *SAVE)),
    "zero2_offload_optimizer_bf16": (TOGETHER, (*EVALUATE, *SAVE, *ACCUMULATE)),
    "zero3_offload_optimizer_bf16": ("accelerate", EVALUATE),
    "zero3_offload_params_bf16": (TOGETHER, (*RECOMPUTE, *ACCUMULATE)),
    "zero3_offload_optimizer_params_bf16": (TOGETHER, (*RECOMPUTE, *EVALUATE)),
    "zero3_nvme_optimizer_bf16": (TOGETHER, ()),
    "zero3_nvme_params_bf16": (TOGETHER, ACCUMULATE),
    "zero3_nvme_optimizer_params_bf16": (TOGETHER, EVALUATE),
    "zero0_fp16": (TOGETHER, ()),
    "zero1_fp16": (TOGETHER, ACCUMULATE),
    "zero2_fp16": (TOGETHER, EVALUATE),
    "zero3_fp16": (TOGETHER, ()),
    "zero2_offload_optimizer_fp16": (TOGETHER, ACCUMULATE),
    "zero3_offload_optimizer_params_fp16": (TOGETHER, ()),
}


def explain_obstacle(config: str) -> str:
    """Return the reason for which this machine cannot train with the config, or an empty text."""
    if config.endswith("_fp16"):
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if not CPU_Accelerator().is_fp16_supported():
            return "DeepSpeed says that this CPU cannot compute in fp16"
    if "nvme" in config:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible():
            return "DeepSpeed says that its async_io cannot be built here: libaio's headers are missing"
    return ""


def skip_if_impossible_here(config: str) -> None:
    reason = explain_obstacle(config)
    if reason:
        pytest.skip(reason)
