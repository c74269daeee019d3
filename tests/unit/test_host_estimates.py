"""The host memory of a rank by formulas, against what recorded runs held."""

from __future__ import annotations

import pytest

from zerotop.analysis.memory.expected.beyond_allocated import JobMemory, estimate_memory
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
