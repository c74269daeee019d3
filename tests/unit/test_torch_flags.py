"""Flags of PyTorch that are off their defaults from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import PlantedRecording
from small_recording import make_identity, make_span
from zerotop.analysis.findings.pace import torch_flags
from zerotop.analysis.findings.support import Finding, detection
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS

MIB = 1 << 20
UNFUSED = {"flash_attention": False, "efficient_attention": False, "cudnn_attention": False, "math_attention": True}


def find(
    folder: Path, flags: dict[str, Any], *, call: str = "torch.nn.functional.scaled_dot_product_attention", **facts: Any
) -> tuple[Finding, ...]:
    """Write a job whose line net.py:19 calls a function and holds 12 x 64 MiB of a peak of 2 GiB."""
    recording, who = PlantedRecording(folder), make_identity(0)
    recording.write_engine(device=facts.get("device", "cuda:0"))
    spans = [make_span(2 + step, 3 + step, "step", step, BOUNDARY) for step in range(10)]
    recording.write_records(SPANS, who, spans, born=1)
    recording.write_event(who, 3, events.TorchFlags, step=1, **flags)
    frames = [{"file": "net.py", "line": 19, "function": "forward", "own": True}]
    told = {"begin_ns": 0, "end_ns": 0, "frames": frames}
    blocks = [{"count": 12, "size_bytes": facts.get("block", 64 * MIB), "frames": [0]}]
    look = {"why": "peak", "first_step": 4, "steps": 1, "peak_bytes": 2048 * MIB, "before_bytes": 0, "stacks": blocks}
    recording.write_event(who, 6, events.MemoryLines, entries=1, complete=True, seconds=0.1, **look, **told)
    stacks = [{"count": 1, "call": call, "frames": [0]}]
    recording.write_event(who, 8, events.Stacks, where="forward", why="share", step=4, samples=1, stacks=stacks, **told)
    runner = detection.Detection(recording.open_recording(), [torch_flags.detect])
    runner.update()
    return runner.ordered_findings


def test_attention_without_a_fused_kernel_is_told_with_its_line(tmp_path: Path) -> None:
    (finding,) = find(tmp_path, UNFUSED)
    assert str(finding.headline) == "Fused attention is off: 0.75 GiB of a 2.00 GiB peak are at net.py:19"
    assert "The largest blocks there are 12 blocks of 64.0 MiB." in str(finding.details)


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (UNFUSED | {"cudnn_attention": True}, {}),  # there is another kernel
        ({}, {}),  # an older PyTorch
        (UNFUSED, {"call": "torch.matmul"}),
        (UNFUSED, {"block": MIB}),  # it hardly matters
        (UNFUSED, {"device": "cpu"}),
    ],
)
def test_attention_that_may_be_fused_is_not_told(tmp_path: Path, flags: dict[str, Any], facts: dict[str, Any]) -> None:
    assert not find(tmp_path, flags, **facts)


def test_deterministic_algorithms_are_no_warning(tmp_path: Path) -> None:
    (finding,) = find(tmp_path, {"deterministic_algorithms": True, "cudnn_deterministic": True})
    assert finding.severity.value == "info"
    assert "How much that costs this job is not known" in str(finding.details)
