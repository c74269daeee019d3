"""Libraries that train without DeepSpeed: PEFT on a frozen base, TRL, PyTorch Lightning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loop_runs import run_loop
from zerotop.analysis.memory.expected.zero_model import compute_expected, parse_setup
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import BOUNDARY, EVAL, FAILED, LOGGED_BITS, OF_NEXT_STEP, OPTIMIZER_RATE

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_lora_on_a_base_that_is_frozen_and_partly_quantized(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    rank, own = run_loop("with_lora", tmp_path, launcher="python", ranks=1).read_rank(0)
    assert not rank.find_events("probe_error")
    assert rank.select_phases("step")["flags"].tolist() == [BOUNDARY] * own["steps"]
    assert len(rank.select_phases("checkpoint_save")) == 1
    (evaluation,) = rank.select_phases("eval")  # in evaluation mode generation is one
    assert (evaluation["step"], rank.list_phases_inside(evaluation)) == (2, ["generate"])
    (engine,) = rank.find_events("engine")
    assert engine["model"] == "PeftModelForCausalLM"
    assert engine["trainable_parameters"] == own["trainable"]
    assert engine["parameters"] == own["trainable"] + own["frozen"] + own["quantized"]
    sizes = {"vocabulary": 64, "hidden": 32, "intermediate": 64, "heads": 2, "key_heads": 2, "layers": 2}
    assert engine["dimensions"] == sizes
    hosts = {event["when"]: event["host"] for event in rank.find_events("tensors")}
    buffers = hosts["init"]["parameters"] - 4 * own["trainable"]
    assert 0 < buffers < 1000  # the scales of the quantized layer, and frequencies of the positions
    assert hosts["init"] == {
        "parameters": 4 * own["trainable"] + buffers,
        "frozen_parameters": 4 * own["frozen"],
        "quantized_parameters": own["quantized"],
    }
    assert hosts["before_update"]["gradients"] == 4 * own["trainable"]
    setup = parse_setup(EngineFacts(engine))
    assert setup is not None
    assert compute_expected(setup).host["frozen_parameters"] == 4 * own["frozen"]
    assert hosts["after_update"]["optimizer_state"] == pytest.approx(8 * own["trainable"], abs=4 * 16)


def test_supervised_finetuning_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    rank, own = run_loop("with_trl", tmp_path, str(tmp_path / "output_dir"), launcher="python", ranks=1).read_rank(0)
    assert not rank.find_events("probe_error")
    assert rank.select_phases("backward")[["step", "micro_step"]].tolist() == [
        (s, m) for s in range(own["steps"]) for m in (0, 1)
    ]
    # TRL recomputes blocks: they are called again within the backward, which are no forwards of their own.
    assert len(rank.select_phases("forward")) == 2 * own["steps"]
    (engine,) = rank.find_events("engine")
    facts = [engine[name] for name in ("library", "model", "micro_batch", "activation_checkpointing")]
    assert facts == ["Trainer", "PeftModelForCausalLM", 2, own["checkpoints"]]


def test_reinforcement_learning_of_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="0.14")  # the first with GRPO
    rank, own = run_loop("with_grpo", tmp_path, str(tmp_path / "output_dir"), launcher="python", ranks=1).read_rank(0)
    assert not rank.find_events("probe_error")
    steps = range(own["steps"])
    assert rank.select_phases("step")[["step", "flags"]].tolist() == [(step, BOUNDARY) for step in steps]
    assert rank.select_phases("backward")[["step", "micro_step"]].tolist() == [(step, m) for step in steps for m in (0, 1)]
    forwards = rank.select_phases("forward")
    trained = forwards[forwards["flags"] & EVAL == 0]
    assert trained[["step", "micro_step", "rows"]].tolist() == [(step, m, 2) for step in steps for m in (0, 1)]
    # The first one is before the recording begins. Its many forwards are one phase.
    assert rank.select_phases("generate")[["step", "depth"]].tolist() == [(2, 0), (4, 0)]
    assert own["generated"] == [4, 4, 4]
    assert all(rank.list_phases_inside(span) == [] for span in rank.select_phases("generate"))
    # Between generation and training both models are asked for probabilities, which is no evaluation.
    asked = forwards[forwards["flags"] & EVAL > 0]
    assert set(asked["step"].tolist()) == {2, 4}
    assert not len(rank.select_phases("eval"))
    # TRL adds hooks for each generation: where steps take long enough for another look, the engine is described again.
    engines = rank.find_events("engine")
    assert 1 <= len(engines) <= 1 + len(rank.find_events("training_changed"))
    # TRL leaves requires_grad of the reference on; no optimizer updates it.
    assert {engine["trainable_parameters"] for engine in engines} == {own["trained"]}
    assert {engine["parameters"] for engine in engines} == {own["trained"] + own["reference"]}
    engine = engines[-1]
    hosts = {event["when"]: event["host"] for event in rank.find_events("tensors")}
    assert hosts["before_update"]["frozen_parameters"] == 4 * own["reference"]
    setup = parse_setup(EngineFacts(engine))
    assert setup is not None
    assert compute_expected(setup).host["gradients"] == hosts["before_update"]["gradients"] == 4 * own["trained"]


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    counted = run_loop("with_lightning", tmp_path, launcher="torchrun")
    for number in (0, 1):
        rank, own = counted.read_rank(number)
        assert not rank.find_events("probe_error")
        assert np.count_nonzero(rank.select_phases("step")["flags"] & BOUNDARY) == own["steps"] == 4
        assert rank.select_phases("backward")[["step", "micro_step"]].tolist() == [
            (s, m) for s in range(4) for m in range(2)
        ]
        forwards = rank.select_phases("forward")
        assert forwards["rows"][forwards["flags"] & EVAL == 0].tolist() == own["rows"]
        # Two batches are a check before the training.
        assert len(forwards[forwards["flags"] & EVAL > 0]) == own["evaluations"] - 2 == 4
        assert rank.select_phases("eval")["step"].tolist() == [2, 4]
        logged = rank.read_table("logged")
        known = LOGGED_BITS["loss"], LOGGED_BITS["learning_rate"] | OF_NEXT_STEP
        losses, rates = (logged[logged["known"] == bits] for bits in known)
        assert losses["loss"].tolist() == pytest.approx(own["losses"][1::2])
        assert rates["learning_rate"].tolist() == pytest.approx([1e-3] * len(rates))
        steps = rank.select_phases("step")
        ends = steps["end_ns"][steps["flags"] & BOUNDARY > 0]
        assert set(np.searchsorted(ends, rates["time_ns"]).tolist()) == {0, 1, 2, 3}  # each is of the step that follows
        own_rates = logged[logged["known"] & OPTIMIZER_RATE > 0]
        assert set(own_rates["learning_rate"].tolist()) <= {1e-3}  # read now and then: such a short job may have none
        assert len(own_rates) <= 1
        assert len(losses) + len(rates) + len(own_rates) == len(logged)
        assert rank.select_phases("checkpoint_save")["step"].tolist() == [4]
        assert np.all(rank.spans["flags"] & FAILED == 0)
        (engine,) = rank.find_events("engine")
        facts = [engine[name] for name in ("library", "parallelism", "autocast", "gradient_accumulation", "model")]
        assert facts == ["Lightning", "DDP", "bf16", 2, "Module"]
        assert [event["steps"] for event in rank.find_events("total_steps")] == [4]
