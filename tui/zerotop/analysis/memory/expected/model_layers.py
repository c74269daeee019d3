"""The layers of decoder-only families as Transformers builds them: linear layers, norms, activations that autograd saves.

``FAMILIES`` lists what distinguishes them (``modeling_<family>.py``). Vision-language models count by their text part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of a family's layer. Biases: of queries, keys and values, of attention's output, of the MLP."""

    is_gated: bool = True
    layer_norm: bool = False  # with bias; else an RMS norm, computed in fp32
    norms: int = 2  # each layer
    head_norms: bool = False  # of queries and keys, for each head
    wide_norms: bool = False  # of queries and keys over all heads
    biases: tuple[bool, bool, bool] = (False, False, False)
    inner_kept: int = 8  # bytes of an MLP's inner element that autograd saves
    head_bias: bool = False
    is_tied: bool = False  # by default
    packs_inputs: bool = False  # queries, keys and values in one matrix; gate and up too
    has_dropout: bool = False  # by default, of each half of a layer
    wide_norm_product: bool = False  # the norm multiplies in fp32


_ALL_BIASES = (True, True, True)
# GELU of elementary operations saves five tensors, PyTorch's own its input, ReLU its result; the down projection its input.
_SLOW_GELU, _GELU, _RELU = 10, 4, 2

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "granite", "smollm3", "mixtral"), Family()),
    "qwen": Family(biases=(True, False, False), packs_inputs=True),
    **dict.fromkeys(("qwen2", "qwen2_moe"), Family(biases=(True, False, False))),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Family(head_norms=True)),
    "phi3": Family(packs_inputs=True),
    "olmo2": Family(wide_norms=True, wide_norm_product=True),
    "gemma": Family(is_tied=True, wide_norm_product=True),
    "gemma2": Family(norms=4, is_tied=True, wide_norm_product=True),
    "gemma3_text": Family(norms=4, head_norms=True, is_tied=True, wide_norm_product=True),
    "phi": Family(False, True, 1, biases=_ALL_BIASES, inner_kept=_SLOW_GELU, head_bias=True),
    "gpt_neox": Family(False, True, biases=_ALL_BIASES, inner_kept=_GELU, packs_inputs=True),
    "falcon": Family(False, True, 1, inner_kept=_GELU, is_tied=True, packs_inputs=True),
    "opt": Family(False, True, biases=_ALL_BIASES, inner_kept=_RELU, is_tied=True, has_dropout=True),
    "gpt2": Family(
        False, True, biases=_ALL_BIASES, inner_kept=_SLOW_GELU, is_tied=True, packs_inputs=True, has_dropout=True
    ),
    "gpt_bigcode": Family(
        False, True, biases=_ALL_BIASES, inner_kept=_GELU, is_tied=True, packs_inputs=True, has_dropout=True
    ),
}


@dataclass(frozen=True, slots=True)
class Layers:
    """Sizes that a configuration gives: parameters, and bytes that autograd keeps per token in 16-bit training."""

    parameters: int
    embeddings: int  # parameters of embedding and head
    layer: int  # parameters of one layer
    largest: int
    linears: Mapping[str, tuple[int, int, int]] = field(hash=False)  # of a layer: inputs, outputs, how many
    kept: int  # of a layer
    kept_frozen: int  # of a layer whose weights are not trained
    ends: int
    inner: int  # elements of the MLP's inner size that a token uses


def read_size(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of the values that is there, if it is a positive integer."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def count_layers(
    config: Mapping[str, Any], kind: str, hidden: int, layers: int, heads: int, vocabulary: int
) -> Layers | None:
    """Return the layers of a family of ``FAMILIES``; None if a size is missing.

    Saved by autograd in bytes for each element, for attention without s x s matrices: an RMS norm its input in fp32 (4)
    and the factor of its weight (2, or 4 where it multiplies in fp32), a layer norm its input (2); a linear layer its input
    (2); attention queries, keys, values and result (2 each) and a sum of exponentials for each head (4); a gated MLP gate,
    activated gate, up and product (2 each). Weights that are not trained need no input of a linear layer and no factor.
    """
    family = FAMILIES[kind]
    inner = read_size(config, "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size")
    if inner is None and family.layer_norm:
        inner = 4 * hidden
    if inner is None:
        return None
    inner = inner // 2 if kind == "qwen" else inner  # its configuration counts gate and up
    size = read_size(config, "head_dim") or hidden // heads
    queries, keys = heads * size, _count_key_heads(config, kind, heads) * size
    linears = {
        "q_proj": (hidden, queries, 1),
        "k_proj": (hidden, keys, 1),
        "v_proj": (hidden, keys, 1),
        "o_proj": (queries, hidden, 1),
    }
    experts, active, router = _count_experts(config)
    expert = read_size(config, "moe_intermediate_size") or inner if experts else inner
    names = ("gate_proj", "up_proj") if family.is_gated else ("up_proj",)
    linears |= {name: (hidden, expert, max(1, experts)) for name in names} | {"down_proj": (expert, hidden, max(1, experts))}
    shared = read_size(config, "shared_expert_intermediate_size") if experts else None
    if shared:
        linears |= {"shared_gate_up": (hidden, shared, 2), "shared_down": (shared, hidden, 1)}
        router += hidden
    of_input, of_output, of_mlp = family.biases
    bias = bool(config.get("attention_bias"))
    biases = (queries + 2 * keys) * (of_input or bias) + hidden * (of_output or (bias and not of_input))
    mlp_bias = of_mlp or bool(config.get("mlp_bias"))
    biases += (inner * len(names) + hidden) * mlp_bias
    norm = hidden * (2 if family.layer_norm else 1)
    norms = family.norms * norm + (2 * size if family.head_norms else queries + keys if family.wide_norms else 0)
    layer = sum(each * out * count for each, out, count in linears.values()) + router + biases + norms
    embedding = vocabulary * hidden
    tied = bool(config.get("tie_word_embeddings", family.is_tied))
    positions = _count_positions(config, kind) * hidden
    embeddings = embedding * (1 if tied else 2) + vocabulary * family.head_bias
    used = inner if not experts else active * expert + (shared or 0)
    in_norm = 2 if family.layer_norm else 8 if family.wide_norm_product else 6
    attention = 4 * queries + 4 * keys + 4 * heads
    if family.packs_inputs and not family.has_dropout:  # the values are a view of the matrix's whole result
        attention += 2 * (queries + keys)
    attention += 4 * hidden * family.has_dropout
    if family.head_norms or family.wide_norms:
        attention += in_norm * (queries + keys)
    inputs = 2 * hidden * (1 if family.norms == 1 else 2)
    kept = family.norms * in_norm * hidden + inputs + attention + family.inner_kept * used
    frozen = family.norms * min(4, in_norm) * hidden + 2 * hidden + attention + (family.inner_kept - 2) * used
    packed = max(2 * hidden * inner * family.is_gated, hidden * (queries + 2 * keys) + biases) if family.packs_inputs else 0
    largest = max(
        embedding + vocabulary * family.head_bias,
        positions,
        (len(names) + 1) * hidden * expert * experts,  # all experts are one module
        hidden * inner + inner * mlp_bias,
        hidden * queries,
        packed if kind != "qwen" else 0,
    )
    total = layers * layer + norm + embeddings + positions
    return Layers(total, embeddings, layer, largest, linears, kept, frozen, (in_norm + 2) * hidden, used)


def _count_key_heads(config: Mapping[str, Any], kind: str, heads: int) -> int:
    if kind in ("gpt_bigcode", "falcon") and config.get("multi_query", True) and not config.get("new_decoder_architecture"):
        return 1
    if kind in ("gpt_neox", "opt", "gpt2"):
        return heads
    return read_size(config, "num_key_value_heads", "num_kv_heads") or heads


def _count_experts(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the experts of a layer, those that a token uses, and the router's parameters."""
    experts = read_size(config, "num_local_experts", "num_experts") or 0
    hidden = read_size(config, "hidden_size") or 0
    return experts, read_size(config, "num_experts_per_tok") or min(2, experts), experts * hidden


def _count_positions(config: Mapping[str, Any], kind: str) -> int:
    if kind not in ("gpt2", "gpt_bigcode", "opt"):
        return 0
    return (read_size(config, "n_positions", "max_position_embeddings") or 1024) + (2 if kind == "opt" else 0)
