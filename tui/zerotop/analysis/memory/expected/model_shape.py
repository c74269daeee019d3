"""The shape of a decoder-only transformer from its Hugging Face configuration: parameters, layers and activations.

Parameters and activations are counted by the layers that Transformers builds for the families in ``_GATED`` (Llama and its
relatives: gated MLP, grouped key-value heads, RMS norms) and for GPT-2. Other families have no count here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3")
_QKV_BIAS = ("qwen2",)
_HEAD_NORMS = ("qwen3",)
_WIDE_NORMS = ("olmo2",)  # of queries and keys too; they multiply in fp32


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Activations that the forward keeps for the backward, in bytes for each token in 16-bit training."""

    layer: int
    ends: int  # before the first layer and after the last, without the logits


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Activations at the peak, in bytes for each token of a micro-batch."""

    layers: int
    logits: int  # with their copies in the loss

    @property
    def total(self) -> int:
        return self.layers + self.logits


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that estimates need. ``parameters`` and ``largest_layer`` are None for unknown families."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    parameters: int | None
    largest_layer: int | None  # parameters of the module that holds most of its own, as DeepSpeed's estimates count it
    kept: KeptBytes | None = None  # None for unknown families

    def count_activations(self, *, recompute: bool = False) -> ActivationBytes:
        """Return the bytes for each token of a micro-batch at the peak, when the loss's backward begins, in 16 bits.

        The layers save the bytes of :func:`_count_kept_gated`, or by the rule of thumb for an unknown family; with full
        recomputation only their inputs, 2 h each. The logits of v words then are three fp32 tensors, 12 v: cross-entropy
        casts the model's 16-bit logits, its backward holds their log_softmax (4 v), and allocates the gradient of that (4 v)
        and of the logits (4 v). A script that keeps the model's output until then has 2 v more; fused losses (Liger) have
        less. Measured for Qwen2 0.5 B in ZeRO-3 on H100 and H200: 3,207.4 kB a token; computed: 3,208.0.
        """
        kept = self.kept or KeptBytes(layer=34 * self.hidden, ends=5 * self.hidden)
        each = 2 * self.hidden if recompute else kept.layer
        return ActivationBytes(self.layers * each + kept.ends, 12 * self.vocabulary)

    def estimate_activations(self, sequence: int, *, recompute: bool = False, fused_attention: bool = True) -> float:
        """Return the bytes of activations that the backward needs for each token of a micro-batch, in 16-bit training.

        From Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198): with
        sequence length s, micro-batch b, hidden size h, a heads, L layers and vocabulary v, a layer keeps
        s b h (34 + 5 a s / h) bytes (equation 1), s b h 34 where attention keeps no s x s matrices (section 5), and 2 s b h
        with full recomputation (section 5); the input and output layers add s b h (1 + 4 (1 + v / h)) (section 4.3). It
        describes GPT with dropout and a plain MLP: a rule of thumb for others. It counts the logits once, in fp32.
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
    if kind in _GATED:
        counts = _count_gated(config, kind, hidden, layers, heads, vocabulary)
        return ModelShape(layers, hidden, heads, vocabulary, *counts, _count_kept_gated(config, kind, hidden, heads))
    if kind == "gpt2":
        counts = _count_gpt2(config, hidden, layers, vocabulary)
        return ModelShape(layers, hidden, heads, vocabulary, *counts, _count_kept_gpt2(config, hidden, heads))
    return ModelShape(layers, hidden, heads, vocabulary, None, None)


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


def _count_kept_gated(config: Mapping[str, Any], kind: str, hidden: int, heads: int) -> KeptBytes | None:
    """Return the bytes that autograd saves of a Transformers layer whose attention keeps no s x s matrices.

    In bytes for each element, from the operations of ``modeling_llama.py``. A norm saves its input in fp32 (4) and the
    factor of its weight (2); a linear layer its input (2); attention the rotated queries and keys, the values and its result
    (2 each) and a sum of exponentials for each head (4); the gated MLP gate, activated gate, up and product (2 each). A test
    compares the sum with what autograd saves: they agree to 2 %; for Phi-3, which packs its projections, to 15 %.
    """
    inner = _read(config, "intermediate_size")
    if inner is None:
        return None
    size = _read(config, "head_dim") or hidden // heads
    queries, keys = heads * size, (_read(config, "num_key_value_heads") or heads) * size
    norm = 8 if kind in _WIDE_NORMS else 6
    attention = 4 * queries + 4 * keys + 4 * heads
    if kind in _HEAD_NORMS + _WIDE_NORMS:
        attention += norm * (queries + keys)
    return KeptBytes(layer=2 * (norm + 2) * hidden + attention + 8 * inner, ends=(norm + 2) * hidden)


def _count_kept_gpt2(config: Mapping[str, Any], hidden: int, heads: int) -> KeptBytes:
    """Return the same for GPT-2, whose GELU consists of operations that save five tensors of the MLP's inner size."""
    inner = _read(config, "n_inner") or 4 * hidden
    return KeptBytes(layer=20 * hidden + 10 * inner + 4 * heads, ends=4 * hidden)


def _count_gpt2(config: Mapping[str, Any], hidden: int, layers: int, vocabulary: int) -> tuple[int, int]:
    inner = _read(config, "n_inner") or 4 * hidden
    positions = _read(config, "n_positions", "max_position_embeddings") or 1024
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * inner + inner + hidden
    total = (vocabulary + positions) * hidden + layers * (attention + mlp + 4 * hidden) + 2 * hidden
    return total, max(vocabulary * hidden, hidden * inner + inner, 3 * hidden * hidden + 3 * hidden)
