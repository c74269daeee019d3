"""Settings of ZeRO-3 that save memory at the price of time, where memory is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import PlantedRecording, make_gpu_sample, make_record
from small_recording import make_identity, make_span
from zerotop.analysis.findings.pace import needless_savings
from zerotop.analysis.findings.support import Finding, detection
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import ALLOCATOR, BOUNDARY, GPUS, SPANS

SWAP = ("deepspeed/runtime/zero/stage3.py", "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters")
GATHER = ("deepspeed/runtime/zero/partitioned_param_coordinator.py", "PartitionedParameterCoordinator.fetch_sub_module")
OTHER = ("deepspeed/runtime/zero/stage3.py", "DeepSpeedZeroOptimizer_Stage3.step")
OFFLOAD: dict[str, Any] = {"offload_param": {"device": "cpu", "pin_memory": False}}
ZEROS = dict.fromkeys(("prefetch_bucket_size", "max_live_parameters"), 0)
NORMAL = {"prefetch_bucket_size": 50_000_000, "max_live_parameters": 1_000_000_000}


def find(
    folder: Path, zero: dict[str, Any], phase: str, sampled: tuple[str, str], *, used: float = 20, samples: int = 20
) -> tuple[Finding, ...]:
    """Write 30 steps of a second with 2 GiB of parameters, and stacks of one of its phases; return what is found."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.node_event()
    device = "cpu" if "offload_param" in zero else "none"
    recording.write_engine(
        zero_stage=3, offload_parameters=device, device="cuda:0", config={"zero_optimization": {"stage": 3} | zero}
    )
    spans = [
        make_span(2 + step + begin, 2 + step + end, name, step, BOUNDARY if name == "step" else 0)
        for step in range(30)
        for name, begin, end in (("forward", 0.0, 0.4), ("backward", 0.4, 0.6), ("step", 0.6, 0.99))
    ]
    recording.write_records(SPANS, who, spans, born=1)
    readings = [make_record(ALLOCATOR, at, device=0) for at in (2, 20)]
    recording.write_records(ALLOCATOR, who, readings, born=1, peaks="window")
    recording.write_records(GPUS, recording.node, [make_gpu_sample(at, used) for at in range(1, 32)])
    frames = [{"file": file, "line": 9, "function": name, "own": False} for file, name in (sampled, OTHER)]
    stacks = [{"count": samples // 4 * share, "frames": [at]} for at, share in ((0, 3), (1, 1))]
    told = {"begin_ns": 0, "end_ns": 0, "step": 9, "samples": samples}
    recording.write_event(who, 12, events.Stacks, where=phase, why="share", frames=frames, stacks=stacks, **told)
    runner = detection.Detection(recording.open_recording(), [needless_savings.detect])
    runner.update()
    return runner.ordered_findings


def test_offloaded_parameters_are_told_with_their_time(tmp_path: Path) -> None:
    (finding,) = find(tmp_path, OFFLOAD, "step", SWAP)
    assert str(finding.headline) == "Parameters on the CPU take 29 % of each iteration; 60.00 GiB are free"
    assert "offload_param.device is cpu and pin_memory false. Each rank's share of the parameters is 2.00 GiB" in str(
        finding.details
    )
    assert str(finding.fix) == '"offload_param": {"device": "none"}'


def test_settings_that_gather_late_are_told_with_their_defaults(tmp_path: Path) -> None:
    (finding,) = find(tmp_path, ZEROS, "forward", GATHER)
    assert str(finding.headline) == "Gathering parameters takes 30 % of each iteration; 60.00 GiB are free"
    assert str(finding.fix) == '"stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9'


@pytest.mark.parametrize(
    ("zero", "sampled", "more"),
    [
        (NORMAL, GATHER, {}),
        (ZEROS, OTHER, {}),  # it costs nothing
        (ZEROS, GATHER, {"samples": 4}),  # it is not known to
        (ZEROS, GATHER, {"used": 75}),  # memory would not suffice
        (OFFLOAD, GATHER, {}),  # what takes time is gathering
    ],
)
def test_settings_that_cost_nothing_or_are_needed_are_not_told(
    tmp_path: Path, zero: dict[str, Any], sampled: tuple[str, str], more: dict[str, Any]
) -> None:
    assert not find(tmp_path, zero, "forward", sampled, **more)
