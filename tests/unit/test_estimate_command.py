"""``zerotop estimate`` of a model's configuration, without a run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerotop.analysis.memory.expected.model_shape import parse_shape
from zerotop.analysis.memory.expected.peak_moments import LOSSES, Workload
from zerotop.analysis.memory.expected.zero_model import TrainedModel
from zerotop.analysis.sweeps.estimates import Hardware, build_setup, estimate_time
from zerotop.analysis.sweeps.regimes import DTYPES, FRAMEWORKS, OPTIMIZERS, QUANTIZATIONS
from zerotop.cli import main
from zerotop.commands.options.sweep_options import add_regime_options

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def run_estimate(tmp_path: Path, *options: str, **changes: Any) -> int:
    """Run the command on Llama 3 8 B with some changes of its configuration."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return main(["estimate", str(path), *options])


def read_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[tuple[int, str], dict[str, Any]]:
    assert run_estimate(tmp_path, "--json", *options) == 0
    rows = json.loads(capsys.readouterr().out)["options"]
    return {(row["stage"], row["offload"]): row for row in rows}


def read_peak(row: dict[str, Any]) -> float:
    return float(row["memory"]["allocated"]["likely"])


@pytest.mark.parametrize(
    ("size", "preset"), [("8B", "llama-8b"), ("0.494B", "qwen-0.5b"), ("1500000000", "qwen-1.5b"), ("405b", "llama-70b")]
)
def test_parameters_alone_name_a_preset_of_that_size(size: str, preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--parameters", size]) == 2
    assert f"The preset of the nearest size is {preset}" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["eight", "0.3", "-1B", "8BB", ""])
def test_no_number_of_parameters(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-8b", f"--parameters={size}"]) == 2
    assert "is not a number of parameters, such as 494M or 8B" in capsys.readouterr().err


def test_the_recommendation_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_estimate(tmp_path, "--gpus", "8", "--gpu-memory", "80GB") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Stage 1 fits: it needs at most ")
    assert " to spare; the fastest of 11 that fit by rule" in first
    config = first.partition(': "')[2]
    assert json.loads('{"' + config + "}") == {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1}
    assert run_estimate(tmp_path, "--gpus", "1", "--gpu-memory", "24GB", "--seq-length", "60000") == 0
    assert capsys.readouterr().out.startswith("Nothing fits in 24 GB: stage 3 with offload of ")


def test_every_combination_is_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpus", "4", "--gpu-memory", "80GB", "--host-memory", "150GB", "--all"]
    assert run_estimate(tmp_path, *asked, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["options"]
    assert {row["gpus"] for row in rows} == {1, 2, 4}
    assert len({(row["stage"], row["offload"]) for row in rows}) == 12
    usable = [row["is_usable"] for row in rows]
    assert usable == sorted(usable, reverse=True)
    for row in rows:
        # The upper ends, of a GPU and of the node.
        fits_host = row["memory"]["host"]["high"] * row["gpus"] < 0.95 * 150e9
        assert row["is_usable"] == (row["needed_bytes"] < 80e9 and fits_host)
    best = rows[0]
    assert (best["gpus"], best["offload"]) == (4, "none")
    assert all(
        row["gpus"] < 4 or row["stage"] >= best["stage"] for row in rows if row["is_usable"] and row["offload"] == "none"
    )
    assert run_estimate(tmp_path, *asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Stage {best['stage']} on 4 GPUs with {best['micro_batch']} rows a micro-batch fits: ")
    assert sum(line.endswith("does not fit in the host's memory") for line in lines) == sum(
        row["fits"] and not row["is_usable"] for row in rows
    )


def test_a_hosts_memory_decides_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_estimate(tmp_path, "--gpus", "1", "--gpu-memory", "40GB", "--host-memory", "32GB") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "nvme_optimizer" not in first
    assert first.startswith("Stage 3 with offload of optimizer to NVMe")
    assert run_estimate(tmp_path, "--gpus", "2", "--gpu-memory", "30GB", "--host-memory", "2GB") == 0
    assert "of a node's memory, which has 2 GB" in capsys.readouterr().out.splitlines()[0]


def test_the_step_decides_short_sequences_and_the_loss_long_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for length, name in (("128", "optimizer step"), ("8192", "loss")):
        row = read_options(tmp_path, capsys, "--gpus", "4", "--seq-length", length)[2, "none"]
        moments = row["memory"]["moments"]
        assert moments[0]["name"] == name
        sums = [sum(part["bytes"] for part in moment["rows"]) for moment in moments]
        assert sums == sorted(sums, reverse=True)


def test_adapters_on_a_quantized_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured with 4 x 4,096 tokens on an A100: 14.41 GB with Liger's loss, 27.26 GB with whole logits."""
    base = ["--gpus", "1", "--framework", "none", "--lora-rank", "16", "--quantization", "nf4", "--gradient-checkpointing"]
    base += ["--lora-targets", "q_proj,k_proj,v_proj,o_proj", "--micro-batch", "4", "--seq-length", "4096"]
    for loss, measured in (("liger", 14.41e9), ("fused", 27.26e9)):
        assert read_peak(read_options(tmp_path, capsys, *base, "--loss", loss)[0, "none"]) == pytest.approx(
            measured, rel=0.06
        )


def test_every_moment_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_estimate(tmp_path, "--gpus", "8", "--gpu-memory", "80GB", "--explain") == 0
    text = capsys.readouterr().out
    for part in (
        "stage 1, optimizer step: ",
        "stage 1, loss: ",
        "12 v t: ",
        "stuck segments",
        "host memory of a rank",
        "NCCL",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--quantization", "nf4"], "give the rank of their adapters with --lora-rank"),
        (["--framework", "none", "--gpus", "2"], "a process trains on one GPU"),
        (["--lora-rank", "8", "--lora-targets", "nowhere"], "has no layer called nowhere"),
        (["--framework", "fsdp", "--dtype", "bf16_master"], "are a setting of DeepSpeed"),
        (["--lora-rank", "100000000"], "is more than the hidden size"),
        (["--stage", "2", "--offload", "params"], "only stage 3 can offload them"),
        (["--framework", "fsdp", "--stage", "3"], "does not use DeepSpeed, whose settings stage and offload are"),
        (["--seq-length", "0"], "0 is not a positive whole number"),
        (["--micro-batch", "-3"], "-3 is not a positive whole number"),
        (["--seq-length", "1" + 40 * "0"], "is more than any machine trains with"),
        (["--dtype", "pure"], "DeepSpeed keeps master weights beside 16-bit ones"),
        (["--gpus", "5000"], "is more than any machine trains with"),
        (["--trained", "9000000000000"], "parameters, fewer than --trained 9,000,000,000,000"),
        (["--trained", "5", "--lora-rank", "8"], "--lora-rank trains its adapters alone"),
        (["--expandable-segments", "--all"], "--all does not simulate the allocator"),
    ],
)
def test_impossible_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    try:
        code = run_estimate(tmp_path, *options)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code != 0
    assert sentence in capsys.readouterr().err


def test_learned_positions_limit_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt2", "--seq-length", "5000"]) != 0
    assert "gpt2 has 1,024 positions, fewer than the sequence length, 5,000" in capsys.readouterr().err


def test_fsdp_is_called_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_estimate(tmp_path, "--framework", "fsdp", "--gpus", "8", "--gpu-memory", "80GB") == 0
    text = capsys.readouterr().out
    assert text.startswith("FSDP fits: it needs at most ")
    assert "zero_optimization" not in text


def test_options_offer_what_the_model_knows() -> None:
    parser = argparse.ArgumentParser()
    add_regime_options(parser)
    choices = {action.dest: tuple(action.choices) for action in parser._actions if action.choices}
    known = {
        "framework": FRAMEWORKS,
        "dtype": DTYPES,
        "optimizer": OPTIMIZERS,
        "quantization": QUANTIZATIONS,
        "loss": LOSSES,
    }
    assert choices == {name: tuple(values) for name, values in known.items()}


def test_damaged_configurations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes in ({"hidden_size": 0}, {"num_hidden_layers": -1}, {"num_attention_heads": 10**9}, {"vocab_size": "many"}):
        assert run_estimate(tmp_path, **changes) != 0
        assert "is not a decoder-only transformer" in capsys.readouterr().err


def test_absurd_depths_are_answered_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "deep.json").write_text(json.dumps(config | {"num_hidden_layers": 10**6}))
    begin = time.process_time()
    assert main(["estimate", str(tmp_path / "deep.json"), "--gpus", "2", "--gpu-memory", "80GB"]) == 0
    assert time.process_time() - begin < 2
    assert "deep.json" in capsys.readouterr().out


def test_it_needs_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    code = f"import sys; from zerotop.cli import main; main(['estimate', {str(path)!r}]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_the_answer_comes_before_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    for size, answer in (
        ("80GB", "Stage 1 fits: it needs at most "),
        ("40GB", "Stage 2 fits: it needs at most "),
        ("2GB", "Nothing fits in 2 GB: stage 3 with offload of "),
    ):
        assert main(["estimate", "llama-8b", "--gpus", "8", "--gpu-memory", size]) == 0
        text = capsys.readouterr().out
        assert answer in text.partition("\n\n")[0]


def test_frozen_parameters_have_no_gradients_and_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_trained = read_options(tmp_path, capsys, "--stage", "2")[2, "none"]
    some = read_options(tmp_path, capsys, "--stage", "2", "--trained", "1000000000")[2, "none"]
    frozen = 8_030_261_248 - 10**9
    assert all_trained["gpu_bytes"] - some["gpu_bytes"] == pytest.approx(14 * frozen, rel=0.02)


def test_expandable_segments_reserve_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual, expandable = (
        read_options(tmp_path, capsys, "--stage", "2", "--gpus", "8", *options)[2, "none"]["memory"]
        for options in ((), ("--expandable-segments",))
    )
    assert expandable["reserved"]["likely"] < 0.9 * usual["reserved"]["likely"]
    assert expandable["allocated"] == usual["allocated"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--gpu", "A100", "--seq-length", "4096", "--stage", "3", "--offload", "none"],
            " tokens/s, MFU 55 %, by the FLOPs",
        ),
        (["--gpu", "A100", "--seq-length", "128", "--stage", "3", "--offload", "none"], "the host's launches may decide"),
        (["--seq-length", "4096"], "Give --gpu with one of A100"),
        (["--gpu", "A100", "--seq-length", "4096", "--stage", "2", "--offload", "optimizer"], "decide with offload"),
        (["--gpu", "A100", "--seq-length", "4096", "--nodes", "2"], "The connection of the nodes was not measured"),
        (
            ["--gpu", "A100", "--seq-length", "4096", "--dtype", "fp32", "--stage", "3", "--offload", "none"],
            "Whether fp32 computes in TF32 is not known",
        ),
    ],
)
def test_the_time_of_a_step_or_why_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    assert run_estimate(tmp_path, "--gpus", "8", "--gpu-memory", "80GB", *options) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Time of a step: "))
    assert text in line


def test_recomputation_takes_longer_and_accumulation_as_many_times() -> None:
    shape = parse_shape(CONFIG)
    assert shape is not None
    setup = build_setup(TrainedModel(8 * 10**9, 8 * 10**9, 10**9), Hardware(8), 2, "none")
    work = Workload(2, 4096)
    seconds = []
    for asked in (work, replace(work, checkpointing="full"), replace(work, accumulation=4)):
        time = estimate_time(shape, setup, asked, "A100", 1)
        assert time.seconds is not None
        seconds.append(time.seconds[1])
    assert seconds[1] == pytest.approx(seconds[0] * 4 / 3)
    assert seconds[2] == pytest.approx(seconds[0] * 4)
