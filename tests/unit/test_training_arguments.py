"""``zerotop estimate`` of a DeepSpeed config, of the Trainer's arguments, and of a command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerotop.cli import main
from zerotop.commands.common.training_arguments import parse_words

ZERO_3 = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "reduce_bucket_size": 5e7,
    },
}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}
TRAINER = """\
# arguments of the Trainer
output_dir: out
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
gradient_checkpointing: true
bf16: true
optim: adamw_torch_fused
deepspeed: auto.json
max_length: 2048
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in (("ds", ZERO_3), ("auto", AUTO)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    return tmp_path


def estimate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command, separator, training = f" {' '.join(words)}".partition(" -- ")
    after = ["--", *training.split()] if separator else []
    assert main(["estimate", *command.split(), "--gpu-memory", "80GB", "--json", *after]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def find_row(content: dict[str, Any], moment: str, name: str) -> float:
    (option,) = content["options"]
    (found,) = [one for one in option["memory"]["moments"] if one["name"] == moment]
    return float(next(row["bytes"] for row in found["rows"] if row["name"] == name))


def test_a_config_gives_batch_dtype_optimizer_offload_and_bucket(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = estimate(capsys, "llama-8b --gpus 4 --config", str(folder / "ds.json"))
    (option,) = content["options"]
    # 64 rows are 2 micro-batches of 8 on 4 ranks, as DeepSpeed has it.
    assert (option["stage"], option["offload"], option["micro_batch"]) == (3, "optimizer", 8)
    assert content["expectation"]["accumulation"] == 2
    parameters = content["model"]["model"]["parameters"]
    assert content["model"]["model"]["offloaded_share"] == 0.5
    host = sum(row["bytes"] for row in option["memory"]["host_rows"])
    whole = json.loads(json.dumps(ZERO_3))
    del whole["zero_optimization"]["offload_optimizer"]["ratio"]
    (folder / "ds.json").write_text(json.dumps(whole))
    (all_offloaded,) = estimate(capsys, "llama-8b --gpus 4 --config", str(folder / "ds.json"))["options"]
    difference = all_offloaded["memory"]["host_rows"], option["memory"]["host_rows"]
    assert sum(row["bytes"] for row in difference[0]) - host >= 6 * parameters / 4  # half of 12 bytes, of a rank
    assert option["memory"]["allocated"]["likely"] > all_offloaded["memory"]["allocated"]["likely"]
    assert '"ratio": 0.5' in content["recommendation"]


def test_the_trainers_arguments_fill_in_what_is_auto(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = estimate(capsys, "llama-8b --gpus 4 --config", str(folder / "trainer.yaml"))
    (option,) = content["options"]
    assert (option["stage"], option["offload"], option["micro_batch"]) == (2, "none", 8)
    kept = content["expectation"]
    assert (kept["sequence"], kept["accumulation"], kept["ranks"]) == (2048, 4, 4)
    assert content["tokens"] == 8 * 2048
    # The Trainer's bucket is the square of the hidden size, of 2 bytes each.
    zero = {"stage": 3, "reduce_bucket_size": "auto"}
    (folder / "auto.json").write_text(json.dumps(AUTO | {"zero_optimization": zero}))
    content = estimate(capsys, "llama-8b --gpus 4 --config", str(folder / "trainer.yaml"))
    assert find_row(content, "loss", "reduce bucket") == 2 * 4096**2
    fp32 = folder / "trainer.yaml"
    fp32.write_text(TRAINER.replace("bf16: true", "bf16: false"))
    assert estimate(capsys, "llama-8b --gpus 4 --config", str(fp32))["model"]["model"]["bytes_each"] == 4


def test_options_win(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--micro-batch 2 --seq-length 512 --optimizer lion --dtype bf16_master --gradient-accumulation 1"
    content = estimate(capsys, "llama-8b --gpus 4", asked, "--config", str(folder / "trainer.yaml"))
    kept = content["expectation"]
    assert (kept["micro_batch"], kept["sequence"], kept["accumulation"]) == (2, 512, 1)
    assert (content["model"]["model"]["state_each"], content["model"]["model"]["master_each"]) == (2, 2)


def test_a_command_line_of_a_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "train.py --model_name_or_path llama-8b --per_device_train_batch_size=2 --bf16 True"
    content = estimate(capsys, "-- torchrun --nproc_per_node 4", script, "--fsdp full_shard --gradient_checkpointing")
    (option,) = content["options"]
    assert (option["is_loop"], option["stage"], option["gpus"], option["micro_batch"]) == (True, 3, 4, 2)
    assert content["model"]["model"]["bytes_each"] == 4  # fp32 weights under autocast
    content = estimate(
        capsys,
        "-- deepspeed --num_gpus 8",
        script.replace("=2", "=4"),
        f"--deepspeed {folder / 'ds.json'}",
        "--max_length 256",
    )
    assert (content["hardware"]["gpus"], content["expectation"]["sequence"]) == (8, 256)
    assert content["expectation"]["stage"] == 3
    content = estimate(capsys, "llama-8b -- python train.py --torch_dtype bfloat16 --use_peft --lora_r 8 --load_in_4bit")
    assert content["model"]["model"]["trainable"] < 50e6
    assert content["model"]["model"]["frozen_bytes"] < 6.1e9
    unused = estimate(capsys, "llama-8b -- python train.py --use_peft False --lora_r 8 --bf16")
    assert unused["model"]["model"]["trainable"] == unused["model"]["model"]["parameters"]


def test_words_of_a_command_line() -> None:
    words = "torchrun --nproc_per_node 4 train.py -x --bf16 --a-b=1 --lora_target_modules q_proj v_proj -- --c"
    assert dict(parse_words(words.split())) == {
        "nproc_per_node": "4",
        "bf16": True,
        "a_b": "1",
        "lora_target_modules": ["q_proj", "v_proj"],
        "c": True,
    }


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (ZERO_3, "--gpus 3", "train_batch_size 64 is not micro-batch 10 x accumulation 2 x 3 ranks"),
        (ZERO_3, "--gpus 4 --stage 2", "has a stage and an offload mode of its own"),
        (ZERO_3, "--gpus 4 --framework ddp", "--config is DeepSpeed's, which --framework ddp does not use"),
        ({"optimizer": {"type": "Adagrad"}, "bf16": {"enabled": True}}, "--gpus 4", "The optimizer Adagrad has no formula"),
        ({"train_micro_batch_size_per_gpu": 0}, "", "train_micro_batch_size_per_gpu is 0, which is not a positive whole"),
        ({"train_micro_batch_size_per_gpu": "many"}, "", "is 'many', which is not a positive whole number"),
        ({"gradient_accumulation_steps": -2, "fp16": {}}, "", "gradient_accumulation_steps is -2"),
        ({"per_device_train_batch_size": 1.5}, "", "per_device_train_batch_size is 1.5"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 7}}}, "", "ratio of offload"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "",
            "does not train with ZeRO stage 1",
        ),
        ({"zero_optimization": 3}, "", "no valid zero_optimization"),
        ({"optim": "my_adam", "output_dir": "o"}, "", "The optimizer my_adam has no formula"),
        ({"deepspeed": "nowhere.json", "output_dir": "o"}, "", "Cannot read the DeepSpeed config nowhere.json"),
    ],
)
def test_impossible_arguments_are_answered_with_a_sentence(
    config: dict[str, Any], options: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert main(["estimate", "llama-8b", "--gpu-memory", "80GB", *options.split(), "--config", str(path)]) != 0
    assert sentence in capsys.readouterr().err


def test_a_part_offloaded_in_stage_2_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    assert main(["estimate", "llama-8b", "--config", str(tmp_path / "ds.json"), "--gpus", "4", "--gpu-memory", "80GB"]) == 1
    assert "it refuses a ratio of 0.3 in stage 2" in capsys.readouterr().err
