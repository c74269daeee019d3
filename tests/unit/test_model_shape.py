"""Parameters of models by their configuration, as Transformers builds them, and the rule of thumb for activations."""

from __future__ import annotations

from typing import Any

import pytest

from zerotop.analysis.memory.expected.model_shape import VISION_MODELS, parse_shape
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
PLAIN = {
    **{name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")},
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Their attention is not SDPA, or saves s x s matrices on a CPU; experts are chosen by the data.
NO_SDPA = ("mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "falcon", "gpt_bigcode")
CONFIGS: dict[str, dict[str, Any]] = {
    **PRESETS,
    **{kind: {"model_type": kind, **SMALL} for kind in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3")},
    **{kind: {"model_type": kind, **SMALL} for kind in ("gemma", "gemma2", "gemma3_text", "granite", "phi")},
    **{kind: {"model_type": kind, **PLAIN} for kind in ("gpt_neox", "falcon", "opt")},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
    "qwen2_moe": {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "shared_expert_intermediate_size": 80},
    "gpt_bigcode": {"model_type": "gpt_bigcode", "vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96},
    "biased": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_parameters_are_those_that_transformers_builds(name: str) -> None:
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


_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {**SMALL, "hidden_size": 512, "head_dim": 128}
_QWEN_VISION = {"depth": 8, "patch_size": 14}
_VISION = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "image_size": 112,
    "patch_size": 14,
}
VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
    },
    "gemma3": {"text_config": {"model_type": "gemma3_text", **_TEXT}, "vision_config": _VISION | {"vision_use_head": False}},
    "qwen2_vl": {
        "text_config": {**_TEXT, **_MROPE},
        "vision_config": {**_QWEN_VISION, "embed_dim": 256, "hidden_size": 512, "num_heads": 4},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_MROPE},
        "vision_config": {
            **_QWEN_VISION,
            "hidden_size": 256,
            "intermediate_size": 700,
            "out_hidden_size": 512,
            "num_heads": 4,
        },
    },
}


@pytest.mark.parametrize("name", sorted(VISION_MODELS))
def test_counts_a_vision_part(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **VISION_CONFIGS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    shape = parse_shape(config.to_dict())
    assert shape is not None
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=0.01)
    assert 0 < shape.vision < (shape.parameters or 0)


def test_an_unknown_vision_part_is_not_counted() -> None:
    text = {"model_type": "llama", **SMALL}
    shape = parse_shape({"model_type": "other_vl", "text_config": text, "vision_config": _VISION})
    assert shape is not None
    assert shape.parameters is None


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


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in (*PRESETS, *NO_SDPA)])
def test_counted_activations_are_those_that_autograd_saves(name: str) -> None:
    assert count_saved(CONFIGS[name]) == pytest.approx(
        count_layers(CONFIGS[name]), rel=0.1 if name in ("phi", "phi3") else 0.02
    )


def test_counted_activations_of_gpt2_are_those_that_autograd_saves() -> None:
    config = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "attn_pdrop": 0.0}
    assert count_saved(config) == pytest.approx(count_layers(config), rel=0.02)


def count_layers(config: dict[str, Any]) -> float:
    """Return the layers' bytes for each token, without the input of the output layer, which is not called here."""
    shape = parse_shape(config)
    assert shape is not None
    return shape.count_activations().layers - 2 * shape.hidden


def count_saved(config: dict[str, Any]) -> float:
    """Return the bytes that autograd saves in a forward for each token, parameters excluded."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config, use_cache=False), attn_implementation="sdpa", dtype=torch.bfloat16
    )
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    saved: dict[int, Any] = {}

    def save(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, 320, (2, 256))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = model.base_model(input_ids=tokens)
    assert output is not None
    return float(sum(storage.nbytes() for storage in saved.values()) / tokens.numel())


def test_activations_and_logits_as_measured() -> None:
    """The line through a sweep of Qwen2 0.5 B on two H200s rises by 3,207.4 kB a token."""
    shape = parse_shape(PRESETS["qwen-0.5b"])
    assert shape is not None
    activations = shape.count_activations()
    assert activations.logits == 12 * 151936
    assert activations.total == pytest.approx(3_207_400, rel=0.001)
    assert shape.count_activations(recompute=True).layers == 24 * 2 * 896 + 8 * 896
    unknown = parse_shape({"hidden_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 64, "vocab_size": 51200})
    assert unknown is not None
    assert unknown.count_activations().layers == 6144 * (48 * 34 + 5)


def test_other_configurations_have_no_shape() -> None:
    assert parse_shape({"model_type": "resnet"}) is None
