"""The Hugging Face Trainer under real DeepSpeed: what was recorded against what it counted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loop_runs import Counted, run_loop
from zerotop_probe.recording.tables import BOUNDARY, ENGINE_LOSS, EVAL, LOGGED_BITS

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

BOTH = pytest.mark.parametrize("number", [0, 1])


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    folder = tmp_path_factory.mktemp("trainer")
    auto = "auto"
    config = {
        "zero_optimization": {"stage": 2},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": auto, "betas": auto, "eps": auto, "weight_decay": auto},
        },
        "train_micro_batch_size_per_gpu": auto,
        "gradient_accumulation_steps": auto,
        "train_batch_size": auto,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return run_loop("with_trainer", folder, str(folder / "config.json"), str(folder / "output_dir"), launcher="bare")


@BOTH
def test_steps_and_micro_steps(trained_run: Counted, number: int) -> None:
    rank, own = trained_run.read_rank(number)
    steps = rank.select_phases("step")
    assert own["global_step"] == own["engine_steps"] == len(steps) == 4
    assert steps[["step", "micro_step", "flags"]].tolist() == [(step, 1, BOUNDARY) for step in range(4)]
    backwards = rank.select_phases("backward")
    assert backwards[["step", "micro_step"]].tolist() == [(s, m) for s in range(4) for m in range(2)]
    assert [event["steps"] for event in rank.find_events("total_steps")] == [4]
    assert rank.find_events("total_steps")[0]["source"] == "trainer"


def test_tokens_of_all_ranks_are_what_the_trainer_says(trained_run: Counted) -> None:
    total = 0
    for number in (0, 1):
        spans = trained_run.read_rank(number)[0].select_phases("forward")
        total += spans["tokens"][(spans["flags"] & EVAL) == 0].sum()
    assert total == trained_run.by_rank[0]["tokens_of_all_ranks"] > 0


@BOTH
def test_values_that_the_trainer_logs_are_recorded(trained_run: Counted, number: int) -> None:
    rank, own = trained_run.read_rank(number)
    logged = rank.read_table("logged")
    by_trainer = logged[logged["known"] & (LOGGED_BITS["loss"] | ENGINE_LOSS) == LOGGED_BITS["loss"]]
    assert by_trainer["loss"].tolist() == own["losses"]
    assert len(own["losses"]) == 4
    assert (by_trainer["known"] == sum(LOGGED_BITS.values())).all()
    assert by_trainer["learning_rate"].tolist() == pytest.approx([3.75e-5, 2.5e-5, 1.25e-5, 0.0])
    assert (by_trainer["grad_norm"] > 0).all()
    if number:  # only the first rank's engine is read as well
        assert len(logged) == len(by_trainer)


@BOTH
def test_evaluations(trained_run: Counted, number: int) -> None:
    rank, own = trained_run.read_rank(number)
    evaluations = rank.select_phases("eval")
    assert evaluations[["step", "depth", "flags"]].tolist() == [(2, 0, 0), (4, 0, 0)]
    spans = rank.select_phases("forward")
    spans = spans[(spans["flags"] & EVAL) > 0]
    assert [list(row) for row in spans[["rows", "sequence"]].tolist()] == own["predictions"]
    assert np.all(spans["depth"] == 1)
    for evaluation in evaluations:
        assert rank.list_phases_inside(evaluation).count("forward") == len(own["predictions"]) / 2


@BOTH
def test_generation_is_one_phase(trained_run: Counted, number: int) -> None:
    rank, _ = trained_run.read_rank(number)
    (span,) = rank.select_phases("generate")
    assert (span["step"], span["depth"]) == (3, 0)
    assert rank.list_phases_inside(span) == []


@BOTH
def test_saves_hello_and_nothing_wrong(trained_run: Counted, number: int) -> None:
    rank, own = trained_run.read_rank(number)
    assert set(rank.select_phases("checkpoint_save")["step"].tolist()) == {4}
    (hello,) = rank.find_events("hello")
    assert {"transformers", "accelerate"} <= hello.keys()
    (engine,) = rank.find_events("engine")
    assert (engine["model"], engine["parameters"]) == ("LlamaForCausalLM", own["parameters"])
    assert (engine["micro_batch"], engine["gradient_accumulation"]) == (2, 2)
    assert not np.any(rank.probe["errors"])
    assert not rank.find_events("probe_error")
