"""Loops without DeepSpeed, as the reader knows them: setup, expected memory, and the words of advice."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zerotop.analysis.engine import LOOP, EngineSummary, measure_batch, parse_engine
from zerotop.analysis.findings.support.steps.fp16_warmup import estimate_state_bytes
from zerotop.analysis.memory.expected.optimizer_states import StateBytes, compute_state_bytes
from zerotop.analysis.memory.expected.zero_model import compute_expected, estimate_job, parse_setup
from zerotop.analysis.script_terms import read_terms
from zerotop.recording.steps.step_dtype import STEP_DTYPE
from zerotop_probe.inside.facts.loop_facts import find_device
from zerotop_probe.recording.events import EngineFacts, EngineOptimizer


def make_loop(**facts: Any) -> dict[str, Any]:
    """Return the facts of a loop: a frozen base of 1000 parameters, 100 of which an AdamW trains."""
    base: dict[str, Any] = {
        "kind": "loop",
        "parallelism": "DDP",
        "model": "Net",
        "dtype": "fp32",
        "autocast": "bf16",
        "parameters": 1000,
        "trainable_parameters": 100,
        "inner_optimizer": "AdamW",
        "optimizer": "AdamW",
        "optimizers": [{"class": "AdamW", "parameters": 100, "settings": {}}],
        "world_size": 4,
        "data_parallel": 4,
        "device": "cuda:0",
    }
    return base | facts


def test_a_loop_is_described_by_what_trains_it() -> None:
    engine = EngineSummary(
        **parse_engine(EngineFacts(make_loop(micro_batch=8, gradient_accumulation=2, trainable_parameters=1000)))
    )
    assert engine.describe_engine() == (
        "Net, 1,000 parameters, DDP x 4, AdamW, fp32, bf16 autocast, batch 8 x 2 x 4 (micro-batch x accumulation x ranks)"
    )
    assert (engine.setup_text, engine.method_text) == ("DDP x 4, bf16, AdamW", "DDP x 4, AdamW")
    assert (
        EngineSummary(**parse_engine(EngineFacts(make_loop(parallelism="", inner_optimizer="")))).setup_text
        == "bf16, no optimizer"
    )
    lora = EngineSummary(
        **parse_engine(EngineFacts(make_loop(parallelism="", dtype="fp32", frozen_dtype="bf16", autocast="")))
    )
    assert lora.setup_text == "bf16 base, fp32 trained, AdamW"
    assert "bf16 base, fp32 trained" in lora.describe_engine()
    assert "(100 trained)" in EngineSummary(**parse_engine(EngineFacts(make_loop()))).describe_engine()


def make_steps(rows: list[int], first_step: int = 0) -> NDArray[Any]:
    steps = np.zeros(len(rows), STEP_DTYPE)
    steps["rows"], steps["micro_steps"], steps["steps"] = rows, np.where(np.array(rows) < 0, -1, 1), 1
    steps["step"] = np.arange(len(rows)) + first_step
    return steps


@pytest.mark.parametrize(
    ("rows", "micro_steps", "stated", "measured"),
    [
        (16, 2, {}, {"micro_batch": 8, "gradient_accumulation": 2}),
        (17, 2, {}, {"gradient_accumulation": 2}),
        (-1, 1, {}, {"gradient_accumulation": 1}),
        (16, 2, {"micro_batch": 4, "gradient_accumulation": 2}, {}),
    ],
)
def test_batches_are_counted_where_no_library_states_them(
    rows: int, micro_steps: int, stated: dict[str, int], measured: dict[str, int]
) -> None:
    steps = np.zeros(1, STEP_DTYPE)
    steps["rows"], steps["micro_steps"] = rows, micro_steps
    assert measure_batch(EngineFacts(make_loop(**stated)), steps) == measured
    assert measure_batch(EngineFacts({"zero_stage": 2}), steps) == {}
    assert measure_batch(EngineFacts(make_loop(optimizers=[{}, {}], **stated)), steps) == {}


@pytest.mark.parametrize(
    ("rows", "measured"),
    [
        ([32, 32, 8], {"micro_batch": 32}),
        ([8, 32], {"micro_batch": 32}),
        ([32, 32, 32, 8] * 16, {"micro_batch": 32}),
        ([64] * 9 + [32, 32, 32, 8] * 16, {"micro_batch": 32, "batch_step": 109}),
        ([4] * 30 + [8] * 30 + [32] * 7, {"micro_batch": 32, "batch_step": 160}),
        ([4] * 30 + [-1] * 30 + [8] + [-1] * 10 + [32] * 6, {"micro_batch": 32, "batch_step": 171}),
        ([4] * 30 + [-1] * 30 + [8] + [-1] * 5, {"micro_batch": 8, "batch_step": 160}),
        ([4] * 30 + [-1] * 30 + [2] + [-1] * 5, {"micro_batch": 4}),
    ],
)
def test_the_batch_is_that_of_the_last_steps_and_names_them_where_it_changed(
    rows: list[int], measured: dict[str, int]
) -> None:
    """The smaller last batch of an epoch is no change; steps of -1 rows were only counted."""
    steps = make_steps(rows, first_step=100)
    assert measure_batch(EngineFacts(make_loop()), steps) == {"gradient_accumulation": 1, **measured}


def test_whatever_sizes_batches_have_a_change_begins_with_a_step_of_the_new_size() -> None:
    """As where each batch has as many rows as its lengths allow."""
    for length in range(1, 7):
        for rows in product((4, 8, 16), repeat=length):
            measured = measure_batch(EngineFacts(make_loop()), make_steps(list(rows)))
            assert rows[measured.get("batch_step", 0)] == measured["micro_batch"] or "batch_step" not in measured


@pytest.mark.parametrize(
    "rows",
    [
        [48, 17, 17, 38, 16, 52, 18, 37, 53, 20, 48, 68, 34, 20, 36],
        [60, 16, 40, 40, 40, 60, 60, 16, 24, 40, 40, 60, 16, 60, 40, 60, *[40] * 6, 24, 24],
        [151, 235, 115, 111, 133, 144, 142, 218],
    ],
)
def test_batches_that_differ_from_step_to_step_have_not_changed(rows: list[int]) -> None:
    assert "batch_step" not in measure_batch(EngineFacts(make_loop()), make_steps(rows))


def test_a_batch_that_a_library_states_and_the_steps_outgrow_is_that_of_the_steps() -> None:
    stated = EngineFacts({"zero_stage": 1, "micro_batch": 4, "gradient_accumulation": 1})
    grown = {"micro_batch": 8, "gradient_accumulation": 1, "batch_step": 20}
    assert measure_batch(stated, make_steps([4] * 20 + [8] * 20)) == grown
    assert measure_batch(stated, make_steps([4] * 19 + [1] + [4] * 20)) == {}
    assert measure_batch(stated, make_steps([512] * 20 + [1024] * 20)) == {}  # counts something else
    job = EngineSummary(zero_stage=1, ranks=2, micro_batch=8, gradient_accumulation=1, batch_step=20)
    assert job.describe_engine().endswith("batch 8 x 1 x 2 (micro-batch x accumulation x ranks) from step 20 on")


@pytest.mark.parametrize(("first_step", "batch"), [(0, 8), (100, 48)])
def test_forwards_before_the_training_do_not_make_the_batch_larger(first_step: int, batch: int) -> None:
    """As in docs/stories: five of them count as a part of the first step."""
    steps = make_steps([48, 8], first_step=first_step)
    assert measure_batch(EngineFacts(make_loop()), steps)["micro_batch"] == batch


@pytest.mark.parametrize(
    ("name", "settings", "each"),
    [
        ("AdamW", {}, 8),
        ("Adam", {"amsgrad": True}, 12),
        ("SGD", {"momentum": 0.9}, 4),
        ("SGD", {"momentum": 0}, 0),
        ("RMSprop", {"centered": True, "momentum": 0.5}, 12),
        ("AdamW8bit", {}, 2),
        ("Adafactor", {}, None),
    ],
)
def test_state_follows_from_the_optimizer(name: str, settings: dict[str, Any], each: int | None) -> None:
    optimizers = [{"class": name, "parameters": 100, "settings": settings}]
    assert compute_state_bytes([EngineOptimizer(one) for one in optimizers], 4) == (
        None if each is None else StateBytes(100 * each, 0, 0)
    )


def test_the_first_update_is_expected_to_add_what_its_optimizers_keep() -> None:
    optimizers = [
        {"class": "Adam", "parameters": 10, "settings": {}},
        {"class": "SGD", "parameters": 5, "settings": {"momentum": 0.9}},
    ]
    engine = make_loop(optimizers=optimizers, inner_optimizer="Adam + SGD")
    for device in (engine["device"], "cpu"):
        assert estimate_state_bytes(EngineFacts(engine | {"device": device})) == 10 * 8 + 5 * 4


def test_expected_memory_of_a_loop() -> None:
    setup = parse_setup(EngineFacts(make_loop()))
    assert setup is not None
    # Without the dtype of the frozen base there is no formula for it; neither are there master weights.
    assert compute_expected(setup).gpu == {"parameters": 400, "gradients": 400, "optimizer_state": 800}
    frozen = parse_setup(EngineFacts(make_loop(frozen_dtype="bf16", quantized_parameters=300)))
    assert frozen is not None
    assert compute_expected(frozen).gpu["frozen_parameters"] == 2 * (1000 - 100 - 300)
    assert estimate_job(setup) == ()
    shared = parse_setup(EngineFacts(make_loop(parallelism="FSDP2")))
    assert shared is not None
    assert compute_expected(shared).gpu == {"parameters": 100, "gradients": 100, "optimizer_state": 200}
    # Two replicas of two shards each.
    hybrid = parse_setup(EngineFacts(make_loop(parallelism="FSDP", sharding={"ranks": 2})))
    assert hybrid is not None
    assert compute_expected(hybrid).gpu == {"parameters": 200, "gradients": 200, "optimizer_state": 400}


def test_advice_names_settings_of_the_script() -> None:
    loop, zero, trainer = {"kind": LOOP}, {"zero_stage": 1}, {"library": "Trainer"}
    by_hand, by_trainer, deepspeed, both = (
        read_terms(EngineFacts(setup)) for setup in (loop, loop | trainer, zero, zero | trainer)
    )
    assert not any(
        "Trainer" in text or "zero" in text.replace("zerotop", "") or "DeepSpeed" in text for text in by_hand.values()
    )
    assert by_trainer["batch_size"] == both["batch_size"] == "per_device_train_batch_size"
    assert deepspeed["batch_size"] == "train_micro_batch_size_per_gpu"
    assert not any("per_device" in text or "Trainer" in text for text in deepspeed.values())
    assert deepspeed["accumulation_fix"] == '"gradient_accumulation_steps": 2'
    assert (
        read_terms(EngineFacts({"gradient_accumulation": 4} | trainer))["accumulation_fix"]
        == "gradient_accumulation_steps=8"
    )
    assert "DeepSpeed" in deepspeed["breakdown"]
    assert "DeepSpeed" not in by_trainer["breakdown"]


def test_a_model_without_memory_has_no_device() -> None:
    """As the model that torch.func.functional_call calls with the parameters of others."""
    meta, real = (SimpleNamespace(device=SimpleNamespace(type=name)) for name in ("meta", "cuda"))
    module = SimpleNamespace(parameters=lambda: [meta])
    optimizer = SimpleNamespace(param_groups=[{"params": [real]}])
    assert find_device([module], [optimizer]) is real.device
    assert find_device([module], []) is None
