"""Pauses in which torch.compile compiles again, on a real recording with stacks written into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recordings
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.findings.support.lines.known_calls import find_known_call
from zerotop.recording.reader import Recording
from zerotop_probe.recording.tables import PHASE_CODE

LOOP = ("train.py", 120, "main", True)


@pytest.mark.parametrize(
    ("callees", "compiles"),
    [
        (("torch._dynamo.CatchErrorsWrapper.__call__", "torch._inductor.compile_fx", "acquire"), True),
        (("torch._inductor.compile_fx_inner", "torch._inductor.LambdaFuture.result", "acquire"), True),
        (("torch._dynamo._TorchDynamoContext.__call__", "torch._inductor.CompiledFxGraph.__call__"), False),
    ],
)
def test_compiling_is_distinguished_from_running_what_is_compiled(callees: tuple[str, ...], compiles: bool) -> None:
    known = find_known_call(callees)
    assert (known is not None and "TORCH_LOGS=recompiles" in known.fix) == compiles


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        (([("torch/_inductor/compile_fx.py", 7, "compile_fx", False), LOOP], ""), True),
        (([("train.py", 31, "forward", True), LOOP], "lzma.compress"), False),
    ],
    ids=["compiled again", "computed"],
)
def test_repeated_compiling_in_the_forward(tmp_path: Path, stack: Any, told: bool) -> None:
    folder = recordings.unpack_to_folder("gpu-clean", tmp_path)
    begins: list[int] = []

    def prolong_forwards(spans: Any) -> None:
        for step in range(10, 31, 5):
            is_forward = (spans["step"] == step) & (spans["phase"] == PHASE_CODE["forward"]) & (spans["depth"] == 0)
            (forward, *_) = spans[is_forward].copy()
            spans["begin_ns"][spans["begin_ns"] > forward["begin_ns"]] += 100_000_000
            spans["end_ns"][spans["end_ns"] >= forward["end_ns"]] += 100_000_000
            begins.append(int(forward["begin_ns"]))

    (table,) = folder.glob("spans-rank0-*.rec")
    header, _, records = table.read_bytes().partition(b"\n")
    rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]]).copy()
    prolong_forwards(rows)
    table.write_bytes(header + b"\n" + rows.tobytes())
    (path,) = folder.glob("events-rank0-*.jsonl")
    frames = [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in stack[0]]
    stacks = [{"seconds": 0.09, "call": stack[1], "frames": [*range(len(frames))]}]
    with path.open("a") as file:
        for begin in begins:
            times = {"time_ns": begin + 110_000_000, "begin_ns": begin, "end_ns": begin + 90_000_000}
            facts = {"where": "forward", "why": "slow", "frames": frames, "stacks": stacks}
            file.write(json.dumps({"event": "stacks", **times, **facts}) + "\n")
    recording = Recording.open(folder)
    details = [one.details for one in detect_findings(recording, recording.end_ns) if one.name == "repeated_pause"]
    assert len(details) == told
    assert all("train.py:120 in main (calls torch.compile, which compiles again)" in one for one in details)
