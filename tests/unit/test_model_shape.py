"""Parameters of models by their configuration, as Transformers builds them, and the rule of thumb for activations."""

from __future__ import annotations

from typing import Any

import pytest

from zerotop.analysis.memory.expected.model_shape import parse_shape
from zerotop.demo.finetune import PRESETS

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **PRESETS,
    **{kind: {"model_type": kind, **SMALL} for kind in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3")},
    "biased": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_what_transformers_builds(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = parse_shape(config.to_dict())
    assert shape is not None
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    own = [sum(one.numel() for one in part.parameters(recurse=False)) for part in model.modules()]
    assert shape.largest_layer == max(own)


def test_the_rule_of_thumb_for_activations() -> None:
    """GPT-3's 22 B model of the paper: 48 layers, hidden size 6144, 64 heads, sequence 2048."""
    shape = parse_shape({"hidden_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 64, "vocab_size": 51200})
    assert shape is not None
    assert shape.parameters is None
    per_layer = 6144 * (34 + 5 * 64 * 2048 / 6144)
    ends = 6144 * (1 + 4 * (1 + 51200 / 6144))
    assert shape.estimate_activations(2048, fused_attention=False) == pytest.approx(48 * per_layer + ends)
    assert shape.estimate_activations(2048) == pytest.approx(48 * 6144 * 34 + ends)
    assert shape.estimate_activations(2048, recompute=True) == pytest.approx(48 * 6144 * 2 + ends)


def test_other_configurations_have_no_shape() -> None:
    assert parse_shape({"model_type": "resnet"}) is None
