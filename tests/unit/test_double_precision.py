"""A model that trains in float64."""

from __future__ import annotations

from typing import Any

import pytest

import recordings
from zerotop.analysis.findings import detect_findings


@pytest.mark.parametrize(("dtype", "told"), [("fp64", 1), ("fp32", 0)])
def test_parameters_of_float64_are_told_once(dtype: str, told: int) -> None:
    def write(event: dict[str, Any]) -> object:
        return event | {"dtype": dtype} if event.get("event") == "engine" else event

    recording = recordings.rewrite_events("cpu-clean", write)
    found = [one for one in detect_findings(recording, recording.end_ns) if one.name == "double_precision"]
    assert [(one.severity.value, one.fix) for one in found] == [("info", "torch.set_default_dtype(torch.float32)")] * told
