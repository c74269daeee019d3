"""What formulas say beside what was measured: ZeRO's paper, DeepSpeed's own functions, figures of real runs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from memory_recording import GIB, gib_to_bytes, record_two_steps
from real_jobs import make_environment
from small_recording import BEGIN_NS, S
from zerotop.analysis.memory.expected.deepspeed_estimates import RuleOfThumb, estimate_zero2, estimate_zero3
from zerotop.analysis.memory.expected.zero_model import (
    compare_ledger,
    compute_expected,
    compute_rule_of_thumb,
    estimate_job,
    is_for_setup,
    parse_setup,
)
from zerotop.analysis.memory.gpu_ledger import read_ledgers
from zerotop.analysis.memory.host_ledger import read_host_ledgers
from zerotop.analysis.memory.phase_peaks import read_rank_peaks
from zerotop.analysis.memory.tensor_inventory import read_inventory
from zerotop.recording.moments.process_exits import find_alive_processes
from zerotop_probe.recording.events import EngineFacts

SIZES = [
    {"parameters": parameters, "layer": layer, "gpus": gpus, "nodes": nodes, "factor": factor}
    for (parameters, layer), gpus, nodes, factor in product(
        ((1, 1), (494_032_768, 136_134_656), (8_030_261_248, 525_336_576), (175_000_000_001, 617_558_016)),
        (1, 3, 8),
        (1, 2, 7),
        (1.5, 1.1),
    )
]


@pytest.fixture(scope="module")
def deepspeed_estimates(checkout_root: Path) -> dict[str, Any]:
    script = checkout_root / "tests" / "support" / "deepspeed_estimates.py"
    command = [sys.executable, str(script), json.dumps(SIZES)]
    run = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def test_estimates_are_deepspeeds_own(deepspeed_estimates: dict[str, Any]) -> None:
    assert len(deepspeed_estimates["estimates"]) == 8 * len(SIZES)
    for theirs in deepspeed_estimates["estimates"]:
        where = {"gpus": theirs["gpus"], "nodes": theirs["nodes"], "factor": theirs["factor"]}
        ours = (
            *estimate_zero2(theirs["parameters"], **where),
            *estimate_zero3(theirs["parameters"], theirs["layer"], **where),
        )
        options = (theirs["stage"], theirs["optimizer"], theirs["weights"], theirs["zero_init"])
        (mine,) = [e for e in ours if (e.stage, e.offload_optimizer, e.offload_parameters, e.zero_init) == options]
        assert [mine.gpu_bytes, mine.host_bytes] == theirs["sizes"], theirs


def test_the_largest_layer_is_counted_as_deepspeed_does(deepspeed_estimates: dict[str, Any]) -> None:
    assert deepspeed_estimates["layers"] == [40 * 11 + 11] * 2


def test_rows_are_called_and_ordered_as_in_deepspeeds_tables(deepspeed_estimates: dict[str, Any]) -> None:
    (table,) = deepspeed_estimates["tables"]
    theirs = [line.split("|") for line in table.splitlines() if line.count("|") == 2 and "GB" in line]
    ours = (*estimate_zero2(10**9, gpus=8, nodes=2), *estimate_zero3(10**9, 10**8, gpus=8, nodes=2))
    assert [(host.strip(), gpu.strip(), clean_options(options)) for host, gpu, options in theirs] == [
        (f"{e.host_bytes / GIB:.2f}GB", f"{e.gpu_bytes / GIB:.2f}GB", e.option_text) for e in ours
    ]


def clean_options(options: str) -> str:
    """Python versions differ in how they print DeepSpeed's name for the CPU."""
    return options.strip().replace("OffloadDeviceEnum.", "").replace("cpu ", "cpu")


def test_the_papers_example() -> None:
    """Figure 1 of arXiv:1910.02054: 7.5 billion parameters on 64 GPUs."""
    for stage, gigabytes in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.9)):
        facts = make_engine(zero_stage=stage, parameters=7_500_000_000, trainable_parameters=7_500_000_000, data_parallel=64)
        assert sum(expect_memory(facts).gpu.values()) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def make_engine(**facts: Any) -> dict[str, Any]:
    usual = {
        "zero_stage": 2,
        "offload_optimizer": "none",
        "offload_parameters": "none",
        "dtype": "bf16",
        "data_parallel": 2,
        "parameters": 1000,
        "trainable_parameters": 1000,
        "optimizer": "DeepSpeedZeroOptimizer",
        "inner_optimizer": "FusedAdam",
        "device": "cuda:0",
    }
    return {**usual, **facts}


def expect_memory(facts: dict[str, Any]) -> Any:
    known = parse_setup(EngineFacts(facts))
    assert known is not None
    return compute_expected(known)


def list_sizes(facts: dict[str, Any]) -> dict[str, list[int]]:
    expected = expect_memory(facts)
    return {name: [sizes.get(name, 0) for sizes in (expected.gpu, expected.host, expected.nvme)] for name in expected.gpu}


def test_offloaded_states_are_in_host_memory_or_on_disk() -> None:
    assert list_sizes(make_engine(offload_optimizer="cpu")) == {
        "parameters": [2000, 0, 0],
        "gradients": [0, 2000, 0],
        "master_weights": [0, 2000, 0],
        "optimizer_state": [0, 4000, 0],
    }
    assert list_sizes(make_engine(zero_stage=3, offload_optimizer="nvme", offload_parameters="cpu")) == {
        "parameters": [0, 1000, 0],
        "gradients": [0, 0, 2000],
        "master_weights": [0, 0, 2000],
        "optimizer_state": [0, 0, 4000],
    }


def test_part_of_the_optimizer_is_offloaded() -> None:
    config = {"zero_optimization": {"offload_optimizer": {"ratio": 0.25}}}
    sizes = list_sizes(make_engine(zero_stage=3, offload_optimizer="cpu", config=config))
    assert (sizes["master_weights"], sizes["optimizer_state"]) == ([1500, 500, 0], [3000, 1000, 0])


def test_frozen_parameters_have_no_gradients_and_no_state() -> None:
    sizes = list_sizes(make_engine(trainable_parameters=10))
    assert sizes == {
        "parameters": [2000, 0, 0],
        "gradients": [10, 0, 0],
        "master_weights": [20, 0, 0],
        "optimizer_state": [40, 0, 0],
    }
    assert list_sizes(make_engine(optimizer="")) == {"parameters": [2000, 0, 0]}


@pytest.mark.parametrize(("name", "size"), [("FusedLion", 2000), ("DeepSpeedCPUAdagrad", 2000), ("Adam8bit", 1000)])
def test_other_optimizers_keep_other_states(name: str, size: int) -> None:
    assert list_sizes(make_engine(inner_optimizer=name))["optimizer_state"] == [size, 0, 0]


def test_state_of_an_optimizer_that_is_not_known_is_not_guessed() -> None:
    assert "optimizer_state" not in list_sizes(make_engine(inner_optimizer="SGD"))
    assert parse_setup(EngineFacts({"zero_stage": None, "parameters": 1})) is None


# Of zerotop's demo, 3 213 568 parameters on two ranks of a CPU, where all is in host memory: what the probe counted of rank
# 0, gradients before the first update and the others after it. DeepSpeed 0.19.8, torch 2.13.
MEASURED = {
    "zero0_bf16": (0, "none", "none", "bf16", (6427392, 6427136, 12854272, 25708544)),
    "zero1_bf16": (1, "none", "none", "bf16", (6427392, 3344384, 6427136, 12854272)),
    "zero2_bf16": (2, "none", "none", "bf16", (6427392, 3344384, 6427136, 12854272)),
    "zero3_bf16": (3, "none", "none", "bf16", (3213824, 3213568, 6427136, 12854272)),
    "zero1_fp32": (1, "none", "none", "fp32", (12854528, 6688768, 6427136, 12854272)),
    "zero3_fp32": (3, "none", "none", "fp32", (6436608, 6427136, 6427136, 12854272)),
    "zero1_offload_optimizer_bf16": (1, "cpu", "none", "bf16", (9640960, 6427296, 6427136, 12854272)),
    "zero2_offload_optimizer_bf16": (2, "cpu", "none", "bf16", (9640960, 6427296, 6427136, 12854272)),
    "zero3_offload_optimizer_params_bf16": (3, "cpu", "cpu", "bf16", (3218432, 9640704, 6427136, 12854272)),
}
# What DeepSpeed does other than the formulas.
DIFFERS = {
    # Stage 1 drops the gradients of other ranks' partitions before the update.
    ("zero1_bf16", "gradients"),
    ("zero1_fp32", "gradients"),
    # A 16-bit copy of the partition, to send back from.
    ("zero1_offload_optimizer_bf16", "parameters"),
    ("zero2_offload_optimizer_bf16", "parameters"),
    # Stage 3 keeps the 16-bit gradients that the fp32 ones are made of.
    ("zero3_offload_optimizer_params_bf16", "gradients"),
}
NAMES = ("parameters", "gradients", "master_weights", "optimizer_state")


@pytest.mark.parametrize("config", MEASURED)
def test_formulas_beside_real_runs(config: str) -> None:
    stage, optimizer, weights, dtype, sizes = MEASURED[config]
    facts = make_engine(zero_stage=stage, offload_optimizer=optimizer, offload_parameters=weights, dtype=dtype, device="cpu")
    expected = expect_memory({**facts, "parameters": 3213568, "trainable_parameters": 3213568})
    assert expected.gpu == {}
    for name, measured in zip(NAMES, sizes, strict=True):
        # Up to one bucket of gradients is on its way.
        near = expected.host[name] == pytest.approx(measured, rel=0.01, abs=140_000)
        assert near != ((config, name) in DIFFERS), (name, expected.host[name], measured)


# --- beside a recording --------------------------------------------------------------------------------------------------


def test_differences_of_a_gpu(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path).open_recording()
    facts = make_engine(parameters=GIB, trainable_parameters=GIB, data_parallel=1)
    (after,), (before,) = (read_ledgers(recording.at(BEGIN_NS + int(second * S))) for second in (19.5, 28))
    expected = {d.key: d for d in compare_ledger(after, expect_memory(facts))}
    assert {name: (d.expected_bytes, d.measured_bytes, d.difference_bytes) for name, d in expected.items()} == {
        "parameters": (gib_to_bytes(2), gib_to_bytes(2), 0),
        "gradients": (gib_to_bytes(2), 0, -gib_to_bytes(2)),
        "master_weights": (gib_to_bytes(4), gib_to_bytes(4), 0),
        "optimizer_state": (gib_to_bytes(8), gib_to_bytes(8), 0),
        "buffers": (None, gib_to_bytes(0.5), None),
    }
    assert expected["gradients"].note == "Gradients live from the backward to the update."
    alive = {d.key: d for d in compare_ledger(before, expect_memory(facts))}["gradients"]
    assert (alive.difference_bytes, alive.note) == (0, "")


def test_differences_of_a_host(tmp_path: Path) -> None:
    recording = record_two_steps(tmp_path)
    recording.write_inventory(19, "after_update", {}, host={"master_weights": 4, "optimizer_state": 9})
    (held,) = read_host_ledgers(recording.open_recording().at(BEGIN_NS + 19 * S + S // 2))
    facts = make_engine(parameters=GIB, trainable_parameters=GIB, data_parallel=1, offload_optimizer="cpu")
    expected = {d.key: d.difference_bytes for d in compare_ledger(held, expect_memory(facts))}
    assert (expected["master_weights"], expected["optimizer_state"]) == (0, GIB)


def test_estimates_for_the_jobs_own_setting_are_recognized() -> None:
    known = parse_setup(
        EngineFacts(make_engine(zero_stage=3, offload_optimizer="cpu", largest_layer_parameters=100, data_parallel=16))
    )
    assert known is not None
    found = estimate_job(known, nodes=2)
    assert found == (*estimate_zero2(1000, gpus=8, nodes=2), *estimate_zero3(1000, 100, gpus=8, nodes=2))
    assert [estimate.option_text for estimate in found if is_for_setup(estimate, known)] == [
        "offload_param=none, offload_optimizer=cpu, zero_init=1",
        "offload_param=none, offload_optimizer=cpu, zero_init=0",
    ]
    without = parse_setup(EngineFacts(make_engine(zero_stage=1)))
    assert without is not None
    assert {estimate.stage for estimate in estimate_job(without)} == {2}
    assert not any(is_for_setup(estimate, without) for estimate in estimate_job(without))


def test_the_rule_of_thumb(tmp_path: Path) -> None:
    assert RuleOfThumb(10, 20, 5, 4, 8).peak_bytes == 39
    assert RuleOfThumb(10, 20, 5, 4, 80).peak_bytes == 110
    recording, now = record_two_steps(tmp_path).open_recording(), BEGIN_NS + 29 * S
    (process,), (peaks,) = find_alive_processes(recording.at(now)), read_rank_peaks(recording.at(now))
    inventory = read_inventory(recording.at(now), process)
    assert inventory is not None
    assert compute_rule_of_thumb(inventory, peaks) == RuleOfThumb(
        gib_to_bytes(2), gib_to_bytes(12), gib_to_bytes(2), gib_to_bytes(18.5 - 16), gib_to_bytes(17.5 - 14)
    )
