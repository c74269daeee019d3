"""Loops of PyTorch alone, Accelerate's and the Trainer's: what was recorded against what they counted themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loop_runs import Counted, run_loop, torch_version
from rank_recordings import Rank
from zerotop.analysis.memory.expected.zero_model import compute_expected, parse_setup
from zerotop_probe.recording.events import EngineFacts
from zerotop_probe.recording.tables import BOUNDARY, EVAL, FAILED, PHASE_CODE, SKIPPED

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

BOTH = pytest.mark.parametrize("number", [0, 1])
# Each is a rank of one job, in this order.
STYLES = (
    "alternate",
    "search",
    "fuse",
    "misbehave",
    "descend",
    "share",
    "reload",
    "mend",
    "idle",
    "distill",
    "parts",
    "infer",
)


@pytest.fixture(scope="module")
def single_runs(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """All styles that need one process."""
    return run_loop("plain", tmp_path_factory.mktemp("alone"), *STYLES, launcher="python", ranks=len(STYLES))


@pytest.fixture(scope="module")
def ddp_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Two ranks with DDP, a loss scaler, accumulation, an evaluation, and a checkpoint."""
    return run_loop("plain", tmp_path_factory.mktemp("ddp"), "accumulate", launcher="torchrun")


def find_style(alone: Counted, style: str) -> tuple[Rank, dict[str, Any]]:
    """Return the recording and the own counts of the rank of that style."""
    return alone.read_rank(STYLES.index(style))


def count_iterations(rank: Rank) -> int:
    return int(np.count_nonzero(rank.select_phases("step")["flags"] & BOUNDARY))


def list_forwards(rank: Rank) -> list[list[int]]:
    spans = rank.select_phases("forward")
    spans = spans[(spans["flags"] & (EVAL | FAILED)) == 0]
    return [list(row) for row in spans[["rows", "sequence"]].tolist()]


def test_results_are_the_same_to_the_bit_without_the_probe(single_runs: Counted, ddp_run: Counted, tmp_path: Path) -> None:
    for name, options, counted in (("alone", STYLES, single_runs), ("together", ("accumulate",), ddp_run)):
        (tmp_path / name).mkdir()
        launcher, ranks = ("python", len(STYLES)) if counted is single_runs else ("bare", 2)
        blind = run_loop(
            "plain", tmp_path / name, *options, launcher=launcher, ranks=ranks, recording=Path(), bootstrap=False
        )
        for number, own in blind.by_rank.items():
            assert own | {"pid": 0} == counted.by_rank[number] | {"pid": 0}


def test_nothing_went_wrong_inside(single_runs: Counted, ddp_run: Counted) -> None:
    ranks = [find_style(single_runs, style)[0] for style in STYLES[:-1]] + [
        ddp_run.read_rank(number)[0] for number in (0, 1)
    ]
    for rank in ranks:
        assert not rank.find_events("probe_error")
        assert (rank.probe[-1]["lost"], rank.probe[-1]["errors"]) == (0, 0)
        assert (rank.events[0]["event"], rank.events[-1]["event"]) == ("hello", "goodbye")


@BOTH
def test_steps_micro_steps_and_batches(ddp_run: Counted, number: int) -> None:
    rank, own = ddp_run.read_rank(number)
    steps = rank.select_phases("step")
    skips = [BOUNDARY | SKIPPED * skipped for skipped in own["skipped"]]
    assert steps[["step", "micro_step", "flags"]].tolist() == [(step, 1, skip) for step, skip in enumerate(skips)]
    assert rank.select_phases("backward")[["step", "micro_step"]].tolist() == [(s, m) for s in range(6) for m in range(2)]
    assert list_forwards(rank) == own["forwards"]
    assert np.all(rank.spans["flags"] & FAILED == 0)


@BOTH
def test_skipped_updates_have_their_loss_scale(ddp_run: Counted, number: int) -> None:
    rank, own = ddp_run.read_rank(number)
    expected = [(step, *scales) for step, scales in enumerate(own["scales"]) if own["skipped"][step]]
    overflows = [(e["step"], e["loss_scale_before"], e["loss_scale_after"]) for e in rank.find_events("overflow")]
    assert overflows == expected != []


@BOTH
def test_evaluation_checkpoint_and_data(ddp_run: Counted, number: int) -> None:
    rank, own = ddp_run.read_rank(number)
    evaluation, inner = rank.select_phases("eval")
    assert (evaluation["step"], rank.list_phases_inside(evaluation).count("forward")) == (4, own["evaluations"])
    # Of the model that DDP wraps, which the loop does not call in training.
    assert (inner["step"], rank.list_phases_inside(inner).count("forward")) == (5, own["inner_evaluations"])
    assert rank.select_phases("checkpoint_save")["step"].tolist() == [4]
    # Recording begins with the first forward: all fetches but the first, and those of the evaluation; each loader is also
    # asked once more, to say that it has no more.
    assert len(rank.select_phases("data")) == len(own["forwards"]) - 1 + own["evaluations"] + 2


@BOTH
def test_the_recorded_loop_has_its_model_and_optimizer(ddp_run: Counted, number: int) -> None:
    rank, own = ddp_run.read_rank(number)
    (engine,) = rank.find_events("engine")
    expected = {
        "kind": "loop",
        "parallelism": "DDP",
        "library": "",
        "model": "Model",
        "optimizer": "AdamW",
        "dtype": "fp32",
        "autocast": "bf16",
        "world_size": 2,
        "data_parallel": 2,
        "rank": number,
        "local_rank": number,
        "parameters": own["parameters"],
        "trainable_parameters": own["parameters"],
        "unread": {},
    }
    assert {name: engine[name] for name in expected} == expected
    assert engine["names"] == {"model": "ddp", "optimizer": "optimizer", "scheduler": "schedule"}
    assert rank.find_events("hello")[0]["launcher"] == "torchrun"
    hosts = {event["when"]: event["host"] for event in rank.find_events("tensors")}
    weights = 4 * own["parameters"]
    assert hosts["init"] == {"parameters": weights}
    assert hosts["before_update"] == {"parameters": weights, "gradients": weights}
    # Two moments for each parameter, and a step count for each of five tensors.
    assert hosts["next_forward"] == {"parameters": weights, "optimizer_state": 2 * weights + 5 * 4}
    assert hosts["after_update"] == hosts["next_forward"] | {"gradients": weights}
    setup = parse_setup(EngineFacts(engine))
    assert setup is not None
    assert compute_expected(setup).host == hosts["after_update"]


def test_an_iteration_of_two_optimizers_ends_when_both_have_stepped(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "alternate")
    steps = rank.select_phases("step")
    assert len(steps) == own["updates"] == 12
    assert steps["flags"].tolist() == [0, 0, BOUNDARY] * own["steps"]
    assert rank.select_phases("backward")["micro_step"].tolist() == [0, 1, 2] * own["steps"]
    (event,) = rank.find_events("optimizers")
    assert [(o["class"], o["counts"]) for o in event["optimizers"]] == [("Adam", True), ("SGD", True)]
    states = [event["optimizer_states"] for event in rank.find_events("tensors") if event["when"] == "after_update"]
    # Two moments of 20 parameters and two step counts; the momentum of 6 parameters.
    assert states == [[{"class": "Adam", "device": 0, "host": 168}, {"class": "SGD", "device": 0, "host": 24}]]
    assert (rank.find_events("engine")[0]["model"], rank.find_events("engine")[0]["optimizer"]) == ("Linear", "Adam + SGD")


def test_a_closure_belongs_to_forward_and_backward(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "search")
    assert count_iterations(rank) == own["steps"]
    assert list_forwards(rank) == own["forwards"]
    assert len(rank.select_phases("backward")) == len(own["forwards"])
    assert np.all(rank.spans["depth"] == 0)
    assert rank.find_events("engine")[0]["model"] == "Model"


def test_optimizers_that_step_during_the_backward(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "fuse")
    assert count_iterations(rank) == len(rank.select_phases("backward")) == own["steps"]


def test_exceptions_threads_and_a_new_model(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "misbehave")
    steps = rank.select_phases("step")
    assert count_iterations(rank) == own["steps"]
    # A second step() without a backward is part of the same update.
    assert steps["flags"].tolist() == [BOUNDARY, BOUNDARY, 0, FAILED, *[BOUNDARY] * 4]
    assert len(rank.select_phases("backward")) == own["backwards"]
    assert list_forwards(rank) == own["forwards"]
    failed = rank.spans[rank.spans["flags"] & FAILED > 0]
    assert len(failed) == own["failures"] == 2
    assert np.all(rank.spans["depth"] == 0)


def test_a_failed_backward_a_new_layer_and_an_optimizer_without_parameters(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "mend")
    steps = rank.select_phases("step")
    assert count_iterations(rank) == own["steps"]
    assert steps["step"][steps["flags"] & BOUNDARY > 0].tolist() == [*range(own["steps"])]
    assert list_forwards(rank) == own["forwards"]
    failed = rank.spans[rank.spans["flags"] & FAILED > 0]
    assert failed["phase"].tolist() == [PHASE_CODE["backward"]] * own["failures"] != []
    assert np.all(rank.spans["depth"] == 0)
    (trains, empty) = rank.find_events("optimizers")[-1]["optimizers"]
    assert (trains["counts"], empty["counts"], empty["parameters"]) == (True, False, 0)


def test_the_steps_of_the_only_optimizer_count_though_it_has_no_parameters(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "idle")
    assert count_iterations(rank) == own["steps"]
    assert list_forwards(rank) == own["forwards"]
    setup = parse_setup(EngineFacts(rank.find_events("engine")[0]))
    assert setup is not None
    assert compute_expected(setup).host["optimizer_state"] == 0


def test_a_loop_without_an_optimizer_has_backwards_but_no_steps(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "descend")
    assert not len(rank.select_phases("step"))
    assert len(rank.select_phases("backward")) == len(own["losses"]) - 2  # it is recorded from the third on
    (engine,) = rank.find_events("engine")
    assert (engine["model"], engine["optimizer"]) == ("Model", "")


def test_two_models_of_one_optimizer(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "share")
    assert rank.select_phases("step")["flags"].tolist() == [BOUNDARY] * own["steps"]
    # Both models are called in each step, and the optimizer's parameters are counted once.
    assert len(rank.select_phases("forward")) == 2 * own["steps"]
    (engine,) = rank.find_events("engine")
    assert (engine["model"], engine["parameters"], engine["trainable_parameters"]) == ("Linear", *[own["parameters"]] * 2)


def test_a_whole_module_that_is_loaded_goes_on(single_runs: Counted) -> None:
    rank, own = find_style(single_runs, "reload")
    assert count_iterations(rank) == own["steps"]
    assert list_forwards(rank) == own["forwards"]
    assert len(rank.select_phases("checkpoint_save")) == own["saves"] - 1  # the first is before the training


def test_autocast_around_some_parts_of_a_model_is_known_at_the_update(single_runs: Counted) -> None:
    rank, _ = find_style(single_runs, "parts")
    assert {engine["autocast"] for engine in rank.find_events("engine")} == {"bf16"}
    assert not rank.find_events("training_changed")


def test_the_autocast_of_a_frozen_teacher_is_not_that_of_the_training(single_runs: Counted) -> None:
    rank, _ = find_style(single_runs, "distill")
    assert {engine["autocast"] for engine in rank.find_events("engine")} == {None}
    (changed,) = rank.find_events("training_changed")
    (change,) = changed["changes"]
    assert (change["name"], change["before"], change["after"]) == ("other_autocast", "", "bf16")
    assert changed["last_step"] < 8 <= changed["step"]


@pytest.fixture(scope="module")
def compiled_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Each way of using torch.compile, in one process."""
    return run_loop("compiled", tmp_path_factory.mktemp("compiled"), launcher="python", ranks=1)


def test_the_compiler_makes_the_same_graphs(compiled_run: Counted, tmp_path: Path) -> None:
    rank, own = compiled_run.read_rank(0)
    blind = run_loop("compiled", tmp_path, launcher="python", ranks=1, recording=Path(), bootstrap=False)
    assert own | {"pid": 0} == blind.by_rank[0] | {"pid": 0}
    # One graph each: no breaks, no recompilations. The second of two blocks has an input that needs a gradient.
    assert own["graphs"] == {"module": 1, "method": 1, "blocks": 2, "step": 1, "function": 1}
    assert not rank.find_events("probe_error")
    assert sum(event["graphs"] for event in rank.find_events("compiled")) == sum(own["graphs"].values())
    assert count_iterations(rank) == own["steps"]
    # A compiled function that calls the model hides its forward. Before PyTorch 2.5 this backend calls its layers.
    hidden = rank.select_phases("forward")["step"] >= own["steps"] * 4 // 5
    assert len(rank.select_phases("forward")) - np.count_nonzero(hidden) == own["steps"] * 4 // 5
    assert not np.any(hidden) or torch_version() < (2, 5)
    assert rank.find_events("engine")[0]["compiled"] is True


def test_a_program_that_only_infers_writes_nothing(single_runs: Counted) -> None:
    assert not list(single_runs.recording.glob(f"*rank{STYLES.index('infer')}*"))


def test_accelerate(tmp_path: Path) -> None:
    counted = run_loop("with_accelerate", tmp_path, launcher="bare")
    for number in (0, 1):
        rank, own = counted.read_rank(number)
        assert count_iterations(rank) == own["steps"] == 4
        assert rank.select_phases("forward")["rows"].tolist() == own["rows"]
        assert rank.select_phases("checkpoint_save")["step"].tolist() == [4]
        (engine,) = rank.find_events("engine")
        facts = [engine[name] for name in ("library", "parallelism", "autocast", "gradient_accumulation")]
        assert facts == ["Accelerate", "DDP", "bf16", 2]


def test_the_trainer_without_deepspeed(tmp_path: Path) -> None:
    counted = run_loop("with_trainer", tmp_path, "none", str(tmp_path / "output_dir"), launcher="bare")
    total = 0
    for number in (0, 1):
        rank, own = counted.read_rank(number)
        assert count_iterations(rank) == own["global_step"] == 4
        assert rank.select_phases("backward")[["step", "micro_step"]].tolist() == [
            (s, m) for s in range(4) for m in range(2)
        ]
        assert rank.select_phases("eval")["step"].tolist() == [2, 4]
        assert len(rank.select_phases("checkpoint_save")) == 1
        assert rank.select_phases("generate")["step"].tolist() == [3]
        spans = rank.select_phases("forward")
        assert len(spans[spans["flags"] & EVAL > 0]) == len(own["predictions"])
        total += int(spans["tokens"][spans["flags"] & EVAL == 0].sum())
        (engine,) = rank.find_events("engine")
        assert (engine["library"], engine["micro_batch"], engine["train_batch"]) == ("Trainer", 2, 8)
        assert [event["steps"] for event in rank.find_events("total_steps")] == [4]
    assert total == counted.by_rank[0]["tokens_of_all_ranks"] > 0


def test_updates_that_a_fused_optimizer_skips(tmp_path: Path) -> None:
    infinite = [*range(4), *range(100, 180, 4)]
    run = run_loop("fused_scaler", tmp_path, "300", *map(str, infinite), launcher="python", ranks=1)
    rank, own = run.read_rank(0)
    found = rank.find_events("skipped_updates")
    assert sum(event["skipped"] for event in found) == own["skipped"] == len(infinite)
    assert [event for event in found if event["skipped"]][-1]["loss_scale_after"] == own["loss_scale"]
    for event in found:
        steps = range(event["first_step"], event["last_step"] + 1)
        assert len(steps) == event["updates"]
        assert event["skipped"] == sum(step in infinite for step in steps)
        assert event["skipped"] == 0 or event["last_step"] - event["good_last"] in infinite
    assert not rank.find_events("probe_error")
    assert not rank.find_events("overflow")
