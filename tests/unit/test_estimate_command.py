"""``zerotop estimate`` of recordings: what the model's facts say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import Recording, gib_to_bytes, make_reading
from small_recording import make_identity, make_span
from zerotop.cli import main
from zerotop_probe.recording import directory, events, tables

LOOP: dict[str, Any] = {
    "kind": "loop",
    "parallelism": "",
    "model": "Net",
    "dtype": "fp32",
    "frozen_dtype": "bf16",
    "parameters": 1 << 30,
    "trainable_parameters": 1 << 20,
    "quantized_parameters": 1 << 29,
    "optimizer": "Prodigy",
    "optimizers": [{"class": "Prodigy", "package": "prodigyopt", "parameters": 1 << 20, "settings": {}}],
    "device": "cuda:0",
}


def test_quantized_parameters_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody can say what they take, so that what the recording had is more than activations."""
    path = tmp_path / "job"
    directory.create_session(["python", "train.py"], path=str(path))
    recording, rank = Recording(path), make_identity(0)
    recording.write_event(rank, 1, events.Engine, engine=0, **LOOP)
    step = make_span(6, 7, "step", flags=tables.BOUNDARY)
    spans = [make_span(2, 3, "forward", tokens=512), make_span(4, 5, "backward"), step]
    recording.write_records(tables.SPANS, rank, spans)
    peak = {"allocated_peak_bytes": gib_to_bytes(6), "reserved_peak_bytes": gib_to_bytes(7)}
    recording.write_records(tables.ALLOCATOR, rank, [make_reading(7, 5, 7, phase="step", edge="end", **peak)])
    assert main(["estimate", str(path), "--gpus", "1"]) == 0
    text = capsys.readouterr().out
    assert "  among them 536.9 M quantized parameters, which have no formula: the states below leave them out" in text
    assert "The optimizer's state is missing: its size is not known." in text


def test_the_answer_comes_before_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for size, answer in (
        ("80GB", "Start with stage 1, no offload: 44.95 GiB of the 74.51 GiB of each GPU."),
        ("40GB", "Start with stage 2, no offload: 31.86 GiB of the 37.25 GiB of each GPU."),
        ("2GB", "Nothing fits with 10% to spare"),
    ):
        assert main(["estimate", "llama-8b", "--gpus", "8", "--gpu-memory", size]) == 0
        text = capsys.readouterr().out
        assert answer in text.partition("\n\n")[0]
