"""Hand-written loops under real DeepSpeed: what was recorded against what script and engine counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loop_runs import MISSING, Counted, run_loop, run_loop_variants
from rank_recordings import Rank
from zerotop_probe.recording.tables import ANOTHER_ITERATOR, BOUNDARY, EVAL, FAILED, PHASES, SKIPPED

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

BOTH = pytest.mark.parametrize("number", [0, 1])
OFFLOADED = (
    *("--stage", "2", "--offload", "--dtype", "bf16"),
    *("--accumulation", "2", "--evaluate-every", "2", "--stumble", "5"),
)
OVERFLOWED = ("--dtype", "fp16", "--scale-power", "24", "--steps", "8")


def make_folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("loop")


@pytest.fixture(scope="module")
def offloaded_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """Stage 2, optimizer on the CPU, accumulation, evaluations, a failing forward, a data loader's worker."""
    return run_loop("hand_written", make_folder(tmp_path_factory), *OFFLOADED, "--workers", "1")


VARIANTS = {
    MISSING: OFFLOADED,
    "direct": ("--stage", "3", "--dtype", "bf16", "--direct", "--accumulation", "2", "--steps", "3"),
    "resumed": ("--stage", "1", "--dtype", "bf16", "--checkpoint", "checkpoint", "--wall-clock-breakdown"),
    "overflowed2": (*OVERFLOWED, "--stage", "2"),
    "overflowed3": (*OVERFLOWED, "--stage", "3"),
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    """The runs of which only the engine is of interest."""
    return run_loop_variants("hand_written", make_folder(tmp_path_factory), VARIANTS, ("deepspeed",))


@pytest.fixture(scope="module")
def direct_run(variants: dict[str, Counted]) -> Counted:
    """Stage 3, ``loss.backward()``, accumulation."""
    return variants["direct"]


@pytest.fixture(scope="module")
def resumed_run(variants: dict[str, Counted]) -> Counted:
    """Stage 1, a checkpoint saved and loaded, DeepSpeed's own timers on."""
    return variants["resumed"]


@pytest.fixture(scope="module", params=["2", "3"])
def overflowed_run(request: pytest.FixtureRequest, variants: dict[str, Counted]) -> Counted:
    """fp16 with a first loss scale that is too high, in stages 2 and 3."""
    return variants[f"overflowed{request.param}"]


def are_nested(rank: Rank) -> bool:
    """Whether every span lies within one of the next lower depth."""
    spans = rank.spans
    for span in spans[spans["depth"] > 0]:
        outer = spans[spans["depth"] == span["depth"] - 1]
        if not np.any((outer["begin_ns"] <= span["begin_ns"]) & (outer["end_ns"] >= span["end_ns"])):
            return False
    return True


def list_forwards(rank: Rank, *, evaluation: bool) -> list[list[int]]:
    spans = rank.select_phases("forward")
    chosen = spans[((spans["flags"] & EVAL) > 0) == evaluation]
    chosen = chosen[(chosen["flags"] & FAILED) == 0]
    return [list(row) for row in chosen[["step", "rows", "sequence"]].tolist()]


def every_run(counted: Counted, number: int) -> None:
    """Check what holds for every run: no record is lost, no span open or outside of its parent."""
    rank, own = counted.read_rank(number)
    assert list_forwards(rank, evaluation=False) == own["forwards"]
    assert list_forwards(rank, evaluation=True) == own["evaluations"]
    assert are_nested(rank)
    begun = {tuple(row) for row in rank.begins[["time_ns", "phase"]].tolist()}
    ended = {tuple(row) for row in rank.spans[["begin_ns", "phase"]].tolist()}
    assert begun <= ended
    # Only parts of a phase can be so brief that their beginning is not worth a record.
    outermost = rank.spans[rank.spans["depth"] == 0]
    assert begun >= {tuple(row) for row in outermost[["begin_ns", "phase"]].tolist()}
    last = rank.probe[-1]
    assert (last["lost"], last["errors"]) == (0, 0)
    assert 0 < len(rank.probe) <= len(own["steps"]) + 1
    assert last["boundaries"] == len(rank.begins) + len(rank.spans)
    assert [event["event"] for event in rank.events if event["event"] in ("hello", "goodbye")] == [
        "hello",
        "goodbye",
    ]
    assert not rank.find_events("probe_error")


@BOTH
def test_offloaded_states_are_counted_as_host_memory_of_the_rank(offloaded_run: Counted, number: int) -> None:
    """The master weights and both moments of this rank's share, in four bytes each."""
    rank, _ = offloaded_run.read_rank(number)
    (engine,) = rank.find_events("engine")
    inventories = {event["when"]: event["host"] for event in rank.find_events("tensors")}
    assert list(inventories) == ["init", "before_forward", "before_update", "after_update"]
    share = engine["parameters"] / engine["world_size"]
    for host in inventories.values():
        assert host["master_weights"] == pytest.approx(4 * share, rel=0.05)
        assert host["parameters"] >= 2 * engine["parameters"]
    assert inventories["after_update"]["optimizer_state"] == pytest.approx(8 * share, rel=0.05)
    assert "optimizer_state" not in inventories["before_update"]


@BOTH
def test_offloaded_counts(offloaded_run: Counted, number: int) -> None:
    every_run(offloaded_run, number)
    rank, own = offloaded_run.read_rank(number)
    steps = rank.select_phases("step")
    # Calls between two updates do nothing, and are not recorded.
    assert (steps["flags"] & BOUNDARY).tolist() == [BOUNDARY] * 4
    assert steps["step"].tolist() == [0, 1, 2, 3]
    assert steps["micro_step"].tolist() == [1] * 4
    assert rank.select_phases("backward")["micro_step"].tolist() == [0, 1] * 4
    training = rank.select_phases("forward")
    training = training[(training["flags"] & (EVAL | FAILED)) == 0]
    assert training["micro_step"].tolist() == [0, 1] * 4
    assert training["tokens"].sum() == sum(rows * length for _, rows, length in own["forwards"])


@BOTH
def test_a_forward_that_fails_and_is_repeated(offloaded_run: Counted, number: int) -> None:
    rank, own = offloaded_run.read_rank(number)
    assert own["stumbles"] == 1
    (failed,) = rank.spans[(rank.spans["flags"] & FAILED) > 0]
    assert (PHASES[failed["phase"]], failed["step"], failed["micro_step"], failed["depth"]) == (
        "forward",
        2,
        1,
        0,
    )


@BOTH
def test_the_inside_of_an_offloaded_step(offloaded_run: Counted, number: int) -> None:
    rank, _ = offloaded_run.read_rank(number)
    for step in rank.select_phases("step"):
        assert rank.list_phases_inside(step) == OFFLOADED_PARTS


OFFLOADED_PARTS = ["grads_to_cpu", "cpu_optimizer", "params_to_gpu", "allgather"]


@BOTH
def test_evaluations_last_from_their_first_forward_to_their_last(offloaded_run: Counted, number: int) -> None:
    rank, _ = offloaded_run.read_rank(number)
    evaluations = rank.select_phases("eval")
    assert evaluations[["step", "depth"]].tolist() == [(0, 0), (2, 0)]
    seen = rank.select_phases("forward")
    for evaluation in evaluations:
        within = seen[(seen["begin_ns"] >= evaluation["begin_ns"]) & (seen["end_ns"] <= evaluation["end_ns"])]
        assert len(within) == 3
        assert within["begin_ns"][0] == evaluation["begin_ns"]
        assert within["end_ns"][-1] == evaluation["end_ns"]
        assert rank.list_phases_inside(evaluation) == ["forward", "data", "forward", "data", "forward"]


@BOTH
def test_every_batch_was_fetched_and_data_loader_workers_write_nothing(offloaded_run: Counted, number: int) -> None:
    rank, own = offloaded_run.read_rank(number)
    # Each evaluation's loader is also asked once more, to say that it has no more.
    assert len(rank.select_phases("data")) == len(own["forwards"]) + len(own["evaluations"]) + 2
    assert not np.any(rank.select_phases("data")["flags"] & ~np.uint16(ANOTHER_ITERATOR))  # of the evaluations
    # Rank 0 also has the values that it logs.
    names = [path.name for path in offloaded_run.recording.glob(f"*rank{number}-*")]
    assert len(names) == 4 + (number == 0), names


@BOTH
def test_engine_facts(offloaded_run: Counted, number: int) -> None:
    rank, own = offloaded_run.read_rank(number)
    (engine,) = rank.find_events("engine")
    expected = {
        "engine": 0,
        "zero_stage": 2,
        "offload_optimizer": "cpu",
        "offload_parameters": "none",
        "dtype": "bf16",
        "micro_batch": 2,
        "gradient_accumulation": 2,
        "train_batch": 8,
        "world_size": 2,
        "data_parallel": 2,
        "rank": number,
        "parameters": own["parameters"],
        "trainable_parameters": own["parameters"],
        "rank_parameters": own["parameters"],
        "model": "Model",
        "inner_optimizer": "DeepSpeedCPUAdam",
        "activation_checkpointing": False,
        "device": "cpu",
        "devices": [],
        "unread": {},
    }
    assert {name: engine[name] for name in expected} == expected
    assert engine["config"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert engine["config"]["train_batch_size"] == 8
    (optimizer,) = engine["optimizers"]
    assert (optimizer["class"], optimizer["parameters"], optimizer["tensors"]) == ("DeepSpeedCPUAdam", None, None)
    assert optimizer["settings"]["lr"] > 0
    assert "not-for-recordings" not in json.dumps(engine)


@BOTH
def test_the_hello_event_has_ranks_and_world_size(offloaded_run: Counted, number: int) -> None:
    rank, own = offloaded_run.read_rank(number)
    (hello,) = rank.find_events("hello")
    assert (hello["rank"], hello["local_rank"], hello["node_rank"], hello["world_size"]) == (
        number,
        number,
        0,
        2,
    )
    assert hello["launcher"] == "deepspeed"
    assert {"python", "torch", "deepspeed"} <= hello.keys()
    assert next(offloaded_run.recording.glob(f"spans-rank{number}-*-{own['pid']}.rec")).exists()


def test_a_recording_that_is_not_there_changes_nothing(offloaded_run: Counted, variants: dict[str, Counted]) -> None:
    """Nothing is written, nothing is said, and the training comes out the same to the bit."""
    blind = variants[MISSING]
    assert not blind.recording.exists()
    for number in (0, 1):
        for name in ("losses", "weights", "steps"):
            assert blind.by_rank[number][name] == offloaded_run.by_rank[number][name]


@BOTH
def test_loss_backward_without_the_engine(direct_run: Counted, number: int) -> None:
    every_run(direct_run, number)
    rank, own = direct_run.read_rank(number)
    backwards = rank.select_phases("backward")
    assert backwards[["step", "micro_step"]].tolist() == [(s, m) for s in range(3) for m in range(2)]
    assert not np.any(backwards["flags"])
    assert [rank.list_phases_inside(span) for span in backwards] == [["reduce"]] * 6
    (engine,) = rank.find_events("engine")
    assert engine["rank_parameters"] == own["parameters"] / 2


@BOTH
def test_checkpoints_and_the_steps_after_them(resumed_run: Counted, number: int) -> None:
    every_run(resumed_run, number)
    rank, own = resumed_run.read_rank(number)
    assert rank.select_phases("checkpoint_save")["step"].tolist() == [2, 3]
    assert rank.select_phases("checkpoint_load")["step"].tolist() == [4]
    assert rank.select_phases("step")["step"].tolist() == [step for step, *_ in own["steps"]] == [0, 1, 2, 3, 2]
    assert rank.find_events("engine")[0]["wall_clock_breakdown"] is True
    for step in rank.select_phases("step"):
        assert rank.list_phases_inside(step) == ["optimizer", "allgather"]


def test_deepspeeds_own_timers_still_work(resumed_run: Counted) -> None:
    assert "optimizer_allgather: " in resumed_run.output
    assert "optimizer_step: " in resumed_run.output


@BOTH
def test_overflows(overflowed_run: Counted, number: int) -> None:
    every_run(overflowed_run, number)
    rank, own = overflowed_run.read_rank(number)
    skipped_before = 0
    expected: list[dict[str, Any]] = []
    scale = 2.0**24
    for step, skipped, after in own["steps"]:
        if skipped > skipped_before:
            expected.append({"step": step, "loss_scale_before": scale, "loss_scale_after": after})
        skipped_before, scale = skipped, after
    assert len(expected) == own["skipped_steps"] > 2
    assert [{name: event[name] for name in expected[0]} for event in rank.find_events("overflow")] == expected
    steps = rank.select_phases("step")
    assert np.all(steps["flags"] & BOUNDARY)
    assert steps["step"][(steps["flags"] & SKIPPED) > 0].tolist() == [event["step"] for event in expected]
    for step in steps:
        assert ("optimizer" in rank.list_phases_inside(step)) is not bool(step["flags"] & SKIPPED)


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rank, dict[str, Any]]:
    """Two engines, exceptions, threads and forks in one process."""
    return run_loop("two_engines", make_folder(tmp_path_factory), launcher="bare", ranks=1).read_rank(0)


def test_two_engines_are_distinguished(two_engines: tuple[Rank, dict[str, Any]]) -> None:
    rank, _ = two_engines
    assert [(event["engine"], bool(event["optimizer"])) for event in rank.find_events("engine")] == [
        (0, True),
        (1, False),
    ]
    assert rank.select_phases("init")["engine"].tolist() == [0, 1]
    steps = rank.select_phases("step")
    assert steps["engine"].tolist() == [0, 0, 0, 1]
    assert steps["flags"].tolist() == [BOUNDARY] * 3 + [FAILED]


def test_a_reference_model_evaluates_nothing(two_engines: tuple[Rank, dict[str, Any]]) -> None:
    rank, own = two_engines
    spans = rank.select_phases("forward")
    assert len(spans[spans["engine"] == 1]) == own["steps"]
    assert np.all(spans["flags"][spans["engine"] == 1] == EVAL)
    assert not len(rank.select_phases("eval"))


def test_a_backward_that_fails_is_no_micro_step(two_engines: tuple[Rank, dict[str, Any]]) -> None:
    rank, own = two_engines
    backwards = rank.select_phases("backward")
    assert (backwards["flags"] & FAILED).tolist() == [FAILED, 0] * own["failures"]
    assert backwards["micro_step"].tolist() == [0, 0] * own["failures"]
    assert np.all(backwards["depth"] == 0)


def test_other_threads_and_forked_children_are_not_the_training(two_engines: tuple[Rank, dict[str, Any]]) -> None:
    rank, own = two_engines
    assert len(rank.select_phases("data")) == own["steps"] + 1
    assert not rank.find_events("probe_error")
    assert {path.stem.rsplit("-", 1)[1] for path in rank.recording.glob("*rank*")} == {str(own["pid"])}
    assert os.listdir(rank.recording) != []


def test_a_script_can_ask_to_be_recorded(tmp_path: Path) -> None:
    rank, own = run_loop("attached", tmp_path, launcher="bare", ranks=1, bootstrap=False).read_rank(0)
    assert own["answers"] == [True, True]
    assert rank.select_phases("step")[["step", "flags"]].tolist() == [(1, BOUNDARY), (2, BOUNDARY), (3, BOUNDARY)]
    assert rank.list_phases_inside(rank.select_phases("step")[0]) == ["optimizer", "allgather"]
    (engine,) = rank.find_events("engine")
    assert engine["global_steps"] == 1
    assert len(rank.select_phases("backward")) == len(rank.select_phases("forward")) == own["steps"] - 1


def test_a_script_that_asks_without_a_recording_trains_on(tmp_path: Path) -> None:
    asked = run_loop("attached", tmp_path, launcher="bare", ranks=1, bootstrap=False, recording=Path())
    assert asked.by_rank[0] | {"pid": 0} == {"answers": [False, False], "steps": 4, "pid": 0}


@pytest.fixture(scope="module")
def pipelined_run(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return run_loop("pipelined", make_folder(tmp_path_factory), launcher="bare")


@BOTH
def test_a_pipeline(pipelined_run: Counted, number: int) -> None:
    rank, own = pipelined_run.read_rank(number)
    assert rank.select_phases("step")[["step", "micro_step", "flags"]].tolist() == [
        (step, 2, BOUNDARY) for step in range(own["steps"])
    ]
    assert rank.select_phases("backward")["micro_step"].tolist() == [0, 1, 2] * own["steps"]
    forward = rank.select_phases("forward")
    assert forward["flags"].tolist() == [0] * 6 + [EVAL] * 3
    assert np.all(forward["rows"] == 2)
    (evaluation,) = rank.select_phases("eval")
    assert rank.list_phases_inside(evaluation).count("forward") == 3
    assert are_nested(rank)
    assert not rank.find_events("probe_error")
