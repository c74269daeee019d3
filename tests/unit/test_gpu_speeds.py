"""The model FLOPs utilization."""

from __future__ import annotations

import math

import pytest

from zerotop.analysis.hardware.gpu_speeds import measure_mfu

H100 = "NVIDIA H100 80GB HBM3"


def test_the_formula_by_the_peak_of_all_gpus() -> None:
    # 6 x 8e9 FLOPs a token, 989e12 on each of 8 GPUs
    share = 60_000 * 6 * 8e9 / (8 * 989e12)
    assert measure_mfu(60_000, 8 * 10**9, 8 * 10**9, 8, [H100] * 8, "bf16", "LlamaForCausalLM") == pytest.approx(share)
    frozen = measure_mfu(60_000, 8 * 10**9, 0, 8, [H100] * 8, "bf16", "LlamaForCausalLM")
    assert frozen == pytest.approx(share * 4 / 6)


@pytest.mark.parametrize(
    ("gpus", "dtype", "model"),
    [
        ([H100], "fp32", "LlamaForCausalLM"),
        ([H100], "bf16", "MixtralForCausalLM"),
        ([H100], "bf16", "Qwen3MoeForCausalLM"),
        (["NVIDIA T4"], "bf16", "LlamaForCausalLM"),
        ([H100, "NVIDIA A100-SXM4-80GB"], "bf16", "LlamaForCausalLM"),
        ([], "bf16", "LlamaForCausalLM"),
    ],
)
def test_there_is_none_without_a_peak_or_a_count(gpus: list[str], dtype: str, model: str) -> None:
    assert math.isnan(measure_mfu(60_000, 8 * 10**9, None, 1, gpus, dtype, model))


def test_no_tokens_no_figure() -> None:
    assert math.isnan(measure_mfu(math.nan, 8 * 10**9, None, 1, [H100], "bf16", "LlamaForCausalLM"))
    assert math.isnan(measure_mfu(1.0, None, None, None, [H100], "bf16", ""))
