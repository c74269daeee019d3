"""The shape of a decoder-only transformer from its Hugging Face configuration: parameters, layers and activations.

Parameters and activations are counted by the layers that Transformers builds, for the families of
:mod:`zerotop.analysis.memory.expected.model_layers`. Other families have no count here.

The parameters of the vision part of a vision-language model: a transformer over patches, and a projection to the text.

Its activations are not counted: how many patches a row has depends on the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerotop.analysis.memory.expected.model_layers import FAMILIES, Layers, count_layers, read_size

_MERGES = ("qwen2_vl", "qwen2_5_vl")
VISION_MODELS = frozenset({"llava", "gemma3", *_MERGES})
"""By ``model_type``; a test compares each with Transformers' own count."""


def count_vision(config: Mapping[str, Any], hidden: int) -> int | None:
    """Return the parameters beside the text part, whose hidden size is ``hidden``; None where they are not known."""
    kind, vision = str(config.get("model_type") or ""), config.get("vision_config")
    if kind not in VISION_MODELS or not isinstance(vision, Mapping):
        return None
    width = read_size(vision, "embed_dim") or read_size(vision, "hidden_size")
    depth, patch = read_size(vision, "depth", "num_hidden_layers"), read_size(vision, "patch_size")
    if width is None or depth is None or patch is None:
        return None
    ratio = vision.get("mlp_ratio")
    inner = read_size(vision, "intermediate_size") or int(width * (ratio if isinstance(ratio, (int, float)) else 4))
    matrices = 3 if kind == "qwen2_5_vl" else 2  # of the MLP: it is gated
    layer = 4 * width * width + matrices * width * inner + 9 * width + inner
    channels = read_size(vision, "num_channels", "in_channels") or 3
    patches = channels * patch * patch * (read_size(vision, "temporal_patch_size") or 1) * width
    image = read_size(vision, "image_size")
    positions = (image // patch) ** 2 * width if image is not None and kind not in _MERGES else 0
    # SigLIP's head pools by attention, and has an MLP.
    head = layer if kind == "gemma3" and vision.get("vision_use_head", True) is True else 0
    return depth * layer + head + patches + positions + _count_projection(kind, vision, width, hidden)


def _count_projection(kind: str, vision: Mapping[str, Any], width: int, hidden: int) -> int:
    if kind in _MERGES:  # neighbours are merged into one token
        merged = width * (read_size(vision, "spatial_merge_size") or 2) ** 2
        return merged * merged + merged * hidden
    return width * hidden + (0 if kind == "gemma3" else hidden * hidden)


_TEXT_KINDS = {"gemma3": "gemma3_text", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}


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
    counted: Layers | None = None  # likewise
    vision: int = 0  # of all parameters those beside the text part, whose activations are not counted

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
    """Return the shape; None if the configuration is not that of a transformer.

    Of a model of several parts (vision and language) it is the shape of the text part, with the parameters of both if the
    other part is known.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) or isinstance(config.get("vision_config"), Mapping):
        is_tied = config.get("tie_word_embeddings")
        tied = {"tie_word_embeddings": is_tied} if isinstance(is_tied, bool) else {}
        part = _parse_text({**config, **(text if isinstance(text, Mapping) else {}), **tied})
        vision = count_vision(config, part.hidden) if part is not None else None
        if part is None or part.parameters is None or vision is None:
            return part and replace(part, parameters=None)
        return replace(part, parameters=part.parameters + vision, vision=vision)
    return _parse_text(config)


def _parse_text(config: Mapping[str, Any]) -> ModelShape | None:
    hidden = read_size(config, "hidden_size", "n_embd")
    layers = read_size(config, "num_hidden_layers", "n_layer")
    heads = read_size(config, "num_attention_heads", "n_head")
    vocabulary = read_size(config, "vocab_size")
    if hidden is None or layers is None or heads is None or vocabulary is None or hidden < heads:
        return None
    kind = str(config.get("model_type") or "").removesuffix("_text")
    kind = _TEXT_KINDS.get(kind, kind)
    counted = count_layers(config, kind, hidden, layers, heads, vocabulary) if kind in FAMILIES else None
    if counted is None:
        return ModelShape(layers, hidden, heads, vocabulary, None, None)
    kept = KeptBytes(counted.kept, counted.ends)
    return ModelShape(layers, hidden, heads, vocabulary, counted.parameters, counted.largest, kept, counted)
