"""The fine-tuning script on a user's own model and text, from local folders and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from real_jobs import BIN, Run, finetune_command, free_port, run_recorded
from zerotop import demo

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def make_model(folder: Path) -> None:
    """A small Llama with a tokenizer of its own, saved the way the hub has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["one two three"] * 10, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_local_model_and_files(tmp_path: Path, finetune_run: Callable[..., Run]) -> None:
    make_model(tmp_path / "model")
    lines = [f'{{"text": "one two three {number}"}}\n' for number in range(2000)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    options = ("--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"))
    run = finetune_run("zero3_bf16", launcher="torchrun", options=options)
    assert run.returncode == 0, run.output[-4000:]
    assert "after 3 steps" in run.output


def test_accelerate_told_to_use_the_cpu_still_uses_deepspeed(tmp_path: Path, job_environment: dict[str, str]) -> None:
    plain = finetune_command("python", demo.find_config("zero2_bf16"), ())[1:]
    accelerate = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2"]
    run = run_recorded([*accelerate, "--main_process_port", str(free_port()), *plain], tmp_path, job_environment)
    assert run.returncode == 0, run.output[-4000:]
    assert "DeepSpeed" in run.output
    assert "after 3 steps" in run.output
