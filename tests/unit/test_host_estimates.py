"""The host memory of a rank, and its GPU memory outside of PyTorch, by formulas, against what recorded runs held."""

from __future__ import annotations

import pytest

from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, estimate_memory, find_context
from zerotop.analysis.memory.expected.model_shape import ModelShape
from zerotop.analysis.memory.expected.peak_moments import Workload
from zerotop.analysis.memory.expected.zero_model import TrainedModel
from zerotop.analysis.sweeps.estimates import Hardware, build_setup


def estimate(parameters: int, largest: int, gpus: int, stage: int, offload: str, *, is_loop: bool = False) -> JobMemory:
    model = TrainedModel(parameters, parameters, largest, is_loop=is_loop)
    shape = ModelShape(32, 4096, 32, 128256, parameters, largest)
    return estimate_memory(shape, build_setup(model, Hardware(gpus), stage, offload), Workload(1, 512))


@pytest.mark.parametrize(
    ("parameters", "largest", "gpus", "stage", "measured"),
    [
        (8_030_261_248, 525_336_576, 4, 2, 40.81e9),  # x4-attached
        (494_032_768, 136_134_656, 1, 2, 12.15e9),  # gpu-offload-110
        (188_905_472, 51_463_168, 2, 2, 4.48e9),  # shared: bigger
        (494_032_768, 136_134_656, 1, 3, 12.38e9),  # a point of a sweep on an H200
    ],
)
def test_offloaded_optimizers(parameters: int, largest: int, gpus: int, stage: int, measured: float) -> None:
    assert estimate(parameters, largest, gpus, stage, "optimizer").host.likely == pytest.approx(measured, rel=0.02)


def test_a_process_without_deepspeed_is_smaller() -> None:
    loops = [estimate(10**8, 10**7, gpus, 0, "none", is_loop=True).host.likely for gpus in (1, 2)]
    assert loops[0] == pytest.approx(1.66e9, rel=0.02)  # hand-foreach
    assert loops[0] < loops[1] < estimate(10**8, 10**7, 1, 0, "none").host.likely


@pytest.mark.parametrize(
    ("gpus", "is_loop", "measured"),
    [
        (1, True, 0.79e9),  # hand-clean0
        (2, True, 1.68e9),  # x2-fsdp2
        (1, False, 1.38e9),  # gpu-clean
        (1, False, 1.79e9),  # z2
        (2, False, 1.89e9),  # shared: bigger
        (4, False, 2.19e9),  # x4-attached
    ],
)
def test_context_and_nccl_are_in_the_interval(gpus: int, is_loop: bool, measured: float) -> None:
    model = TrainedModel(10**8, 10**8, 10**7, is_loop=is_loop)
    context = find_context("NVIDIA H200", build_setup(model, Hardware(gpus), 0 if is_loop else 2, "none"))
    assert context.low <= measured * 1.01
    assert measured <= context.high
    assert context.likely == pytest.approx(measured, rel=0.24)


def test_a_small_training_reserves_little_more_than_it_allocates() -> None:
    model = TrainedModel(10**7, 10**7, 10**6, is_loop=True)
    shape = ModelShape(4, 256, 4, 1000, 10**7, 10**6)
    memory = estimate_memory(shape, build_setup(model, Hardware(1), 0, "none"), Workload(1, 64))
    assert memory.reserved.likely < 1.5 * memory.allocated.likely
