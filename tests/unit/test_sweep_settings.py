"""Settings of a sweep: how values are written, which combinations are skipped, and how they reach the job."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from zerotop.analysis.sweeps.settings import OFFLOAD_DEVICES, build_points, format_values, parse_any, parse_numbers
from zerotop.commands.sweeping.placeholders import check_placeholders, expand_command
from zerotop.commands.sweeping.point_job import build_config, prepare_job
from zerotop.recording.sweeps import Plan, Point, Value


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("4", [4]), ("1,2,2", [1, 2]), ("128:512:128", [128, 256, 384, 512]), ("1,8:10", [1, 8, 9, 10]), ("1:6:2", [1, 3, 5])],
)
def test_numbers_and_ranges(text: str, numbers: list[int]) -> None:
    assert parse_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "-1", "5:1", "1:5:0", "1:2:3:4", "1:", "1.5", "1:999999999"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_numbers(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-128", "-128 is less than 1"),
        ("1:5:-1", "the range 1:5:-1 has a step of -1; it must be 1 or more"),
        ("512:128:128", "the range 512:128:128 runs backwards: write 128:512:128"),
        ("1.5", "'1.5' is not a whole number"),
    ],
)
def test_numbers_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(reason)}$"):
        parse_numbers(text)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([128, 256, 384, 512], "128:512:128"),
        ([1, 2, 3, 4], "1:4"),
        ([2, 3], "2, 3"),
        ([1, 2, 4, 8], "1, 2, 4, 8"),
        (["a"], "a"),
    ],
)
def test_values_are_shown_as_they_are_written(values: list[Value], text: str) -> None:
    assert format_values(values) == text


def test_values_of_a_user_s_own_setting() -> None:
    assert parse_any("0:4:2") == [0, 2, 4]
    assert parse_any("1e-4,5e-4") == ["1e-4", "5e-4"]
    for text in ("a,", "9:1"):
        with pytest.raises(ValueError, match=r"missing|backwards"):
            parse_any(text)


def test_impossible_combinations_are_skipped_with_the_reason() -> None:
    settings: dict[str, list[Value]] = {"stage": [0, 1, 2, 3], "offload": list(OFFLOAD_DEVICES), "gpus": [1, 4]}
    points = build_points(settings, {"gpus": 2})
    possible = {(point.settings["stage"], point.settings["offload"]) for point in points if point.result is None}
    assert possible == {
        (0, "none"), (1, "none"), (2, "none"), (1, "optimizer"), (2, "optimizer"),
        *((3, offload) for offload in OFFLOAD_DEVICES),
    }  # fmt: skip
    reasons = {point.result.reason for point in points if point.result is not None}
    assert "This machine has 2 GPUs, not 4." in reasons
    assert all(reason.endswith(".") for reason in reasons)


def test_every_possible_combination_has_a_config() -> None:
    settings: dict[str, list[Value]] = {"stage": [0, 1, 2, 3], "offload": list(OFFLOAD_DEVICES)}
    for point in build_points(settings, {}):
        if point.result is not None:
            continue
        for dtype in ("bf16", "fp16"):
            built = build_config({}, point.settings, dtype=dtype, nvme_path="/fast", has_batch=False)
            assert built["zero_optimization"]["stage"] == point.settings["stage"]
            assert built[dtype]["enabled"]
            sections = (built["zero_optimization"].get(f"offload_{part}", {}) for part in ("optimizer", "param"))
            devices = tuple(section.get("device", "none") for section in sections)
            assert devices == OFFLOAD_DEVICES[str(point.settings["offload"])]
            assert ("/fast" in json.dumps(built)) == ("nvme" in devices)


def test_an_own_config_gets_stage_offload_and_batch() -> None:
    base: dict[str, Any] = {"train_batch_size": 64, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}
    settings: dict[str, Value] = {"stage": 2, "offload": "optimizer", "micro_batch": 8}
    built = build_config(base, settings, dtype="bf16", nvme_path="", has_batch=True)
    assert built == {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    assert base["zero_optimization"]["stage"] == 3


def test_placeholders() -> None:
    words = ["train.py", "--len={n}", "{ckpt?--recompute}", "{other}", "{'a': {n}}", "{on?x}"]
    values = {"n": 8, "ckpt": "off", "on": "on"}
    assert expand_command(words, values) == ["train.py", "--len=8", "{other}", "{'a': 8}", "x"]


def test_other_braces_are_the_command_s_own() -> None:
    own = ["python", "-c", "print(f'{x} {y}')", "{'a': 1}", "{steps}", "--port={port}", "{n}", "{}"]
    check_placeholders(own, {"n": [1, 2]})
    with pytest.raises(ValueError, match=re.escape("the command has {rate}: give its values with --set rate=VALUES")):
        check_placeholders([*own, "{rate?--fast}"], {"n": [1, 2]})


def test_the_job_of_a_point(tmp_path: Path) -> None:
    plan = Plan(settings={}, model="tiny", steps=5)
    settings: dict[str, Value] = {
        "stage": 3,
        "gpus": 2,
        "seq_length": 64,
        "gradient_checkpointing": "on",
        "allocator": "default",
    }
    job = prepare_job(tmp_path, plan, Point(7, settings))
    assert job.command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--gradient-checkpointing" in job.command
    assert job.command[job.command.index("--deepspeed") + 1] == str(tmp_path / "configs" / "0007.json")
    assert job.environment["PYTORCH_CUDA_ALLOC_CONF"] is None
