"""The parameters of the vision part of a vision-language model: a transformer over patches, and a projection to the text.

Its activations are not counted: how many patches a row has depends on the images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerotop.analysis.memory.expected.model_layers import read_size

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
