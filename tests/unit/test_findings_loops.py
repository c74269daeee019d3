"""What PyTorch keeps in loops without DeepSpeed, in small recordings made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory_recording import UUID, PlantedRecording, gib_to_bytes, make_reading, record_two_steps
from small_recording import make_identity, make_span
from zerotop.analysis.findings import Finding, detect_findings
from zerotop_probe.recording import tables

LENGTH, WORDS = 1024, 50_257
BLOCK = 8 * LENGTH * WORDS * 4
SMALL_GPU = {"ordinal": 0, "uuid": f"{UUID}0", "name": "NVIDIA L4", "total_bytes": gib_to_bytes(24)}
LOOP: dict[str, Any] = {"kind": "loop", "zero_stage": None, "parallelism": "", "library": "", "device": "cuda:0"}
LOOP["devices"] = [SMALL_GPU]
LARGE_GPU: dict[str, Any] = {"devices": [SMALL_GPU | {"total_bytes": gib_to_bytes(140)}]}


def find_named(recording: PlantedRecording, name: str) -> list[Finding]:
    opened = recording.open_recording()
    return [finding for finding in detect_findings(opened, opened.end_ns) if finding.name == name]


def make_logits(folder: Path, sizes: list[list[int]], rows: int = 8, **facts: Any) -> PlantedRecording:
    """A loop whose backward peaks at 19.5 GiB, with blocks of these sizes before it."""
    recording = record_two_steps(folder)
    recording.write_engine(at=1.5, **LOOP | facts)
    more: dict[str, Any] = {"output_shape": [rows, LENGTH, WORDS], "output_item_bytes": 4, "unclaimed_groups": sizes}
    recording.write_inventory(12.5, "before_backward", {"parameters": 2}, **more)
    return recording


def test_logits_in_two_types_have_blocks_of_two_sizes(tmp_path: Path) -> None:
    (finding,) = find_named(make_logits(tmp_path, [[BLOCK + 512, 1], [BLOCK // 2 + 512, 2]]), "logits_peak")
    assert "take 3 blocks of up to 1.53 GiB with 8 x 1024 x 50,257 elements." in finding.details


def test_logits_and_their_copies_own_the_peak(tmp_path: Path) -> None:
    (finding,) = find_named(make_logits(tmp_path, [[BLOCK + 512, 3], [1 << 20, 90]]), "logits_peak")
    assert finding.headline == "Logits take 7.67 GiB of the memory peak of 19.50 GiB in backward"
    assert finding.details.startswith(
        "When backward begins, logits or copies of them take 3 blocks of 1.53 GiB with 8 x 1024 x 50,257 elements."
    )
    assert finding.advice.startswith(
        "Lower the DataLoader's batch_size from 8 to 2 and accumulate over as many more micro-batches: that needs 5.75 GiB"
        " less."
    )
    assert finding.step == 1


def test_nothing_is_saved_where_there_is_plenty(tmp_path: Path) -> None:
    (finding,) = find_named(make_logits(tmp_path, [[BLOCK + 512, 3]], **LARGE_GPU), "logits_peak")
    assert (finding.advice, finding.fix) == ("", "")


def test_the_default_of_the_trainer_is_named_only_where_it_holds(tmp_path: Path) -> None:
    trainer = {"library": "Trainer", "micro_batch": 8}
    for number, (rows, facts, named) in enumerate(
        ((8, trainer, True), (8, LOOP, False), (4, trainer | {"micro_batch": 4}, False))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (finding,) = find_named(make_logits(folder, [[BLOCK * rows // 8, 8]], rows, **facts), "logits_peak")
        assert ("the Trainer's default" in finding.details) == named
        assert (finding.fix == "use_liger_kernel=True") == (facts is not LOOP)


@pytest.mark.parametrize("sizes", [[[BLOCK, 1]], [[BLOCK + (2 << 20), 8]], []])
def test_other_blocks_are_no_logits(tmp_path: Path, sizes: list[list[int]]) -> None:
    assert find_named(make_logits(tmp_path, sizes), "logits_peak") == []


@pytest.mark.parametrize("reshards", [True, False])
def test_parameters_that_stay_gathered(tmp_path: Path, reshards: bool) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(at=1.5, **LOOP | {"parallelism": "FSDP2", "sharding": {"ranks": 2, "reshards": reshards}})
    recording.write_inventory(12.5, "before_backward", {"parameters": 2, "unsharded_parameters": 2})
    findings = find_named(recording, "kept_gathered")
    assert len(findings) == (not reshards)
    for finding in findings:
        assert finding.headline == "FSDP keeps 2.00 GiB of gathered parameters on each rank until backward"
        assert finding.fix == "fully_shard(layer, reshard_after_forward=True)"


@pytest.mark.parametrize("size", [0.0, 0.5, 2.0])
def test_gradient_buckets(tmp_path: Path, size: float) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_engine(at=1.5, **LOOP | {"parallelism": "DDP"})
    # The first inventory of that moment counts.
    recording.write_inventory(16.5, "before_update", {"gradients": 2, "gradient_buckets": size})
    findings = find_named(recording, "gradient_buckets")
    assert len(findings) == (size == 2)
    for finding in findings:
        assert finding.evidence["bucket_bytes"] == gib_to_bytes(2)
        assert "10 % of the peak of 19.50 GiB" in finding.details
        assert "gradient_as_bucket_view=True" in finding.fix


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize("trainable", [10, gib_to_bytes(1)])
def test_activations_by_the_layers_that_made_them(tmp_path: Path, trainable: int, autocast: str | None) -> None:
    recording = record_two_steps(tmp_path)
    dimensions = {"vocabulary": 32_000, "hidden": 4096, "intermediate": 11_008, "heads": 32, "layers": 32}
    facts = {"dimensions": dimensions, "trainable_parameters": trainable, "dtype": "fp32", "autocast": autocast}
    recording.write_engine(at=1.5, **LOOP | facts)
    sizes = [[4 * 512 * 11_008 * 2, 96], [4 * 512 * 4096 * 4, 128], [4 * 512 * 32_000 * 4, 1], [1000, 9]]
    more: dict[str, Any] = {"output_shape": [4, 512, 32_000], "unclaimed_groups": sizes}
    recording.write_inventory(12.5, "before_backward", {"parameters": 2}, unclaimed=12.25, **more)
    (finding,) = find_named(recording, "saved_activations")
    assert finding.headline == "Activations are 62 % of the memory peak: backward begins with 12.01 GiB"
    assert finding.details.startswith(
        "The peak is 19.50 GiB. Among the activations are 4.03 GiB in 96 blocks of 4 x 512 x 11,008 elements of 2 bytes"
        " (the width of its MLPs), 4.00 GiB in 128 blocks of 4 x 512 x 4,096 elements of 4 bytes (the"
        " model's width)."
    )
    assert ("Frozen weights" in finding.details) == (trainable == 10)
    copies = "Up to 2.00 GiB of them are autocast's 16-bit copies of weights."
    assert (copies in finding.details) == ("autocast" in finding.details) == (trainable > 10 and autocast is not None)


@pytest.mark.parametrize(
    ("kept", "is_named"), [(4 * 512 * 32_000 * 2, True), (4 * 511 * 32_000 * 4, True), (100 << 20, False)]
)
def test_memory_that_grows_by_the_logits_of_each_step_says_so(tmp_path: Path, kept: int, is_named: bool) -> None:
    recording, who = PlantedRecording(tmp_path), make_identity(0)
    recording.node_event()
    recording.write_engine(at=1.5, **LOOP)
    spans, readings = [], [make_reading(2, 2, 4, phase="init", edge="end")]
    for step in range(80):
        size = 6 + kept * max(0, step - 30) / (1 << 30)
        for edge, at, more in (("begin", 10.0, 0.0), ("end", 10.6, 0.0)):
            readings.append(make_reading(at + step, size + more, 22, phase="step", edge=edge, step=step))
        spans.append(make_span(10.0 + step, 10.6 + step, "step", step, tables.BOUNDARY))
    recording.write_records(tables.SPANS, who, spans, born=1)
    recording.write_records(tables.ALLOCATOR, who, readings, born=1, peaks="window")
    recording.write_inventory(9.5, "before_backward", {"parameters": 2}, output_shape=[4, 512, 32_000])
    (creep,) = find_named(recording, "memory_creep")
    assert ("Each step adds as much as its logits, 4 x 51" in creep.details) == is_named
    assert ("clone()" in creep.advice) == is_named
