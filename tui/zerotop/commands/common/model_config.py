"""A model's configuration: that of a preset, a file, a folder or a model in the hub's cache. Downloads nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotop.analysis.memory.expected.model_shape import ModelShape, parse_shape
from zerotop.commands.common.errors import Problem, suggest_name
from zerotop.demo.finetune import PRESETS

_FILE = "config.json"


def read_model_config(name: str) -> Mapping[str, Any]:
    """Return the configuration as in ``config.json`` of the Hugging Face hub. Raises Problem if there is none."""
    if name in PRESETS:
        preset: Mapping[str, Any] = PRESETS[name]
        return preset
    path = _find_file(name)
    if path is None:
        cached = [folder.name.removeprefix("models--").replace("--", "/") for folder in _find_cache().glob("models--*")]
        raise Problem(
            f"There is no model {name!r}: give a preset ({', '.join(PRESETS)}), a folder or file with its {_FILE}, or the id"
            f" of a model in this machine's Hugging Face cache{suggest_name(name, [*PRESETS, *cached])}"
        )
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise Problem(f"Cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise Problem(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Problem(f"{path} is not a model's configuration")
    return content


def find_nearest_preset(parameters: int) -> str:
    """Return the name of the preset whose number of parameters differs by the smallest factor."""
    counts = {name: shape.parameters for name, config in PRESETS.items() if (shape := parse_shape(config)) is not None}
    return min(counts, key=lambda name: abs(math.log((counts[name] or 1) / parameters)))


def find_shape(name: str) -> ModelShape | None:
    """Return a model's shape; None where it is not known."""
    try:
        return parse_shape(read_model_config(name)) if name else None
    except Problem:
        return None


def find_longest_sequence(name: str) -> int | None:
    """Return how many tokens a model supports; None where that is not known."""
    try:
        config = read_model_config(name)
    except Problem:  # it may be downloaded when training begins
        return None
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    return limit if isinstance(limit, int) else None


def _find_file(name: str) -> Path | None:
    path = Path(name)
    if path.is_file():
        return path
    if (path / _FILE).is_file():
        return path / _FILE
    snapshots = _find_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    files = sorted(snapshots.glob(f"*/{_FILE}"), key=lambda file: file.stat().st_mtime)
    return files[-1] if files else None


def _find_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
