"""The shape of a decoder-only transformer from its Hugging Face configuration: parameters, layers and activations.

Parameters are counted by the layers that Transformers builds for the families in ``_GATED`` (Llama and its relatives: gated
MLP, grouped key-value heads, RMS norms) and for GPT-2. Other families have no count here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3")
_QKV_BIAS = ("qwen2",)
_HEAD_NORMS = ("qwen3",)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What estimates need of a model. ``parameters`` and ``largest_layer`` are None for unknown families."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    parameters: int | None
    largest_layer: int | None  # parameters of the module that holds most of its own, as DeepSpeed's estimates count it

    def estimate_activations(self, sequence: int, *, recompute: bool = False, fused_attention: bool = True) -> float:
        """Return the bytes of activations that the backward needs for each token of a micro-batch, in 16-bit training.

        From Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198): with
        sequence length s, micro-batch b, hidden size h, a heads, L layers and vocabulary v, a layer keeps
        s b h (34 + 5 a s / h) bytes (equation 1), s b h 34 where attention keeps no s x s matrices (section 5), and 2 s b h
        with full recomputation (section 5); the input and output layers add s b h (1 + 4 (1 + v / h)) (section 4.3). It
        describes GPT with dropout and a plain MLP: a rule of thumb for others.
        """
        attention = 0.0 if fused_attention else 5 * self.heads * sequence / self.hidden
        each = 2.0 if recompute else 34 + attention
        return self.hidden * (self.layers * each + 1 + 4 * (1 + self.vocabulary / self.hidden))


def parse_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape; None if the configuration is not that of a decoder-only transformer."""
    hidden = _read(config, "hidden_size", "n_embd")
    layers = _read(config, "num_hidden_layers", "n_layer")
    heads = _read(config, "num_attention_heads", "n_head")
    vocabulary = _read(config, "vocab_size")
    if hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    kind = str(config.get("model_type") or "")
    counts = (
        _count_gated(config, kind, hidden, layers, heads, vocabulary)
        if kind in _GATED
        else _count_gpt2(config, hidden, layers, vocabulary)
        if kind == "gpt2"
        else (None, None)
    )
    return ModelShape(layers, hidden, heads, vocabulary, *counts)


def _read(config: Mapping[str, Any], *names: str) -> int | None:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    return value if isinstance(value, int) and value > 0 else None


def _count_gated(
    config: Mapping[str, Any], kind: str, hidden: int, layers: int, heads: int, vocabulary: int
) -> tuple[int | None, int | None]:
    inner = _read(config, "intermediate_size")
    if inner is None:
        return None, None
    key_heads = _read(config, "num_key_value_heads") or heads
    size = _read(config, "head_dim") or hidden // heads
    queries, keys = heads * size, key_heads * size
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if kind in _QKV_BIAS or config.get("attention_bias"):
        attention += queries + 2 * keys + (hidden if config.get("attention_bias") and kind not in _QKV_BIAS else 0)
    norms = 2 * hidden + (2 * size if kind in _HEAD_NORMS else queries + keys if kind == "olmo2" else 0)
    mlp = 3 * hidden * inner + (2 * inner + hidden if config.get("mlp_bias") else 0)
    embedding = vocabulary * hidden
    total = layers * (attention + mlp + norms) + hidden + embedding * (1 if config.get("tie_word_embeddings") else 2)
    return total, max(embedding, 2 * hidden * inner if kind == "phi3" else hidden * inner, hidden * queries)


def _count_gpt2(config: Mapping[str, Any], hidden: int, layers: int, vocabulary: int) -> tuple[int, int]:
    inner = _read(config, "n_inner") or 4 * hidden
    positions = _read(config, "n_positions", "max_position_embeddings") or 1024
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * inner + inner + hidden
    total = (vocabulary + positions) * hidden + layers * (attention + mlp + 4 * hidden) + 2 * hidden
    return total, max(vocabulary * hidden, hidden * inner + inner, 3 * hidden * hidden + 3 * hidden)
