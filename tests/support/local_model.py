"""A user's own model and text, in local folders and files."""

from __future__ import annotations

from pathlib import Path


def make_sources(folder: Path) -> tuple[str, ...]:
    """Write both into ``folder``; return finetune.py's options for them."""
    make_model(folder / "model")
    lines = [f'{{"text": "one two three {number}"}}\n' for number in range(2000)]
    (folder / "rows.jsonl").write_text("".join(lines))
    return ("--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"))


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
