"""The DeepSpeed configuration of one point: a ready one or the user's, with the point's stage, offload and batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from zerotop.analysis.sweeps.settings import ACCUMULATION, MICRO_BATCH, OFFLOAD, OFFLOAD_DEVICES, STAGE
from zerotop.demo import find_config
from zerotop.recording.sweeps import Value

_OFFLOAD_KEYS = ("offload_optimizer", "offload_param")


def build_config(
    base: Mapping[str, Any], settings: Mapping[str, Value], *, dtype: str, nvme_path: str, has_batch: bool
) -> dict[str, Any]:
    """Return the configuration for some settings; settings that are not given stay as in ``base``.

    An empty ``base`` stands for the ready config of the stage, offload mode and data type, in which the Hugging Face Trainer
    fills in "auto" values. ``has_batch``: whether to set batch sizes.
    """
    config = _change_config(base, settings) if base else _read_ready_config(settings, dtype)
    for key in _OFFLOAD_KEYS:
        offload = config["zero_optimization"].get(key) or {}
        if offload.get("device") == "nvme" and nvme_path:
            offload["nvme_path"] = nvme_path
    if has_batch:
        _set_batch(config, settings)
    return config


def _change_config(base: Mapping[str, Any], settings: Mapping[str, Value]) -> dict[str, Any]:
    """Return the user's own configuration with the stage and offload mode of the settings."""
    config = copy.deepcopy(dict(base))
    config["zero_optimization"] = zero = config.get("zero_optimization") or {}
    if STAGE in settings:
        zero["stage"] = settings[STAGE]
        if settings[STAGE] != 3:  # "auto" would stay as it is, and DeepSpeed refuses it
            config["zero_optimization"] = zero = {name: zero[name] for name in zero if not name.startswith("stage3_")}
    if OFFLOAD in settings:
        for key, device in zip(_OFFLOAD_KEYS, OFFLOAD_DEVICES[str(settings[OFFLOAD])], strict=True):
            zero.pop(key, None)
            if device != "none":
                zero[key] = {"device": device, "pin_memory": True}
    return config


def _read_ready_config(settings: Mapping[str, Value], dtype: str) -> dict[str, Any]:
    """Read a ready config. Not all exist for fp16: the others take its section from one that does."""
    stage, offload = settings.get(STAGE, 2), str(settings.get(OFFLOAD, "none"))
    mode = "" if offload == "none" else f"_{offload}" if offload.startswith("nvme") else f"_offload_{offload}"
    config: dict[str, Any] = json.loads(find_config(f"zero{stage}{mode}_bf16").read_text())
    if dtype == "fp16":
        del config["bf16"]
        config["fp16"] = json.loads(find_config("zero0_fp16").read_text())["fp16"]
    return config


def _set_batch(config: dict[str, Any], settings: Mapping[str, Value]) -> None:
    keys = {MICRO_BATCH: "train_micro_batch_size_per_gpu", ACCUMULATION: "gradient_accumulation_steps"}
    chosen = {key: settings[name] for name, key in keys.items() if name in settings}
    config.update(chosen)
    if chosen and config.get("train_batch_size") != "auto":
        config.pop("train_batch_size", None)  # it follows from the two and the number of ranks
