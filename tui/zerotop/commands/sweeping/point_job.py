"""The job of one point: its command line, environment and DeepSpeed configuration."""

from __future__ import annotations

import copy
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotop.analysis.memory.allocator_settings import ANY_VARIABLE, CUDA_VARIABLE
from zerotop.analysis.sweeps.settings import (
    ACCUMULATION,
    ALLOCATOR,
    CHECKPOINTING,
    DEFAULT_ALLOCATOR,
    GPUS,
    MICRO_BATCH,
    OFFLOAD,
    OFFLOAD_DEVICES,
    SEQ_LENGTH,
    STAGE,
)
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.job.training_machine import build_environment, count_visible_gpus, find_free_port
from zerotop.commands.sweeping.placeholders import DEEPSPEED, PORT, STEPS, expand_command, find_placeholders
from zerotop.demo import SCRIPT_PATH, find_config
from zerotop.recording.atomic_write import write_text_file
from zerotop.recording.sweeps import CONFIGS_FOLDER, Plan, Point, Value

_OFFLOAD_KEYS = ("offload_optimizer", "offload_param")
DEFAULTS: dict[str, Value] = {GPUS: 1, SEQ_LENGTH: 256, MICRO_BATCH: 4}
"""Of the demo's training script, where they are not given."""

_ASKED = (GPUS, SEQ_LENGTH, MICRO_BATCH, ACCUMULATION)


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


@dataclass(frozen=True, slots=True)
class PointJob:
    """The process to start for a point. A variable of the environment that is None is removed."""

    command: list[str]
    environment: dict[str, str | None]
    port: int
    question: str = ""  # for the prediction that is kept beside the measurement


def prepare_job(folder: Path, plan: Plan, point: Point, gpus: Sequence[str] = ()) -> PointJob:
    """Write the point's DeepSpeed configuration if it needs one, and return its job. Raises OSError.

    ``gpus``: the GPUs that it may see; empty for all.
    """
    port = find_free_port()
    environment: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    allocator = point.settings.get(ALLOCATOR)
    if allocator is not None:
        chosen = None if allocator == DEFAULT_ALLOCATOR else str(allocator)
        # Newer releases of PyTorch read both, older ones the second.
        environment |= {ANY_VARIABLE: None, CUDA_VARIABLE: chosen}
    if plan.command:
        values = {**point.settings, STEPS: plan.steps, PORT: port}
        if DEEPSPEED in find_placeholders(plan.command):
            values[DEEPSPEED] = str(_write_config(folder, plan, point))
        return PointJob(expand_command(plan.command, values), environment, port)
    config = _write_config(folder, plan, point)
    command = _build_training_command(plan, point, config, port)
    gpus_here = count_visible_gpus()
    question = _ask_estimate(plan, point, config) if gpus_here and find_shape(plan.model) is not None else ""
    return PointJob(command, {**build_environment(gpus_here), **environment}, port, question)


def _ask_estimate(plan: Plan, point: Point, config: Path) -> str:
    """Return the question for the memory of the demo's training at a point."""
    settings = DEFAULTS | dict(point.settings)
    words = [word for name in _ASKED if name in settings for word in (f"--{name.replace('_', '-')}", str(settings[name]))]
    words += ["--gradient-checkpointing"] if settings.get(CHECKPOINTING) == "on" else []
    return shlex.join(["estimate", plan.model, "--config", str(config.absolute()), *words])


def _write_config(folder: Path, plan: Plan, point: Point) -> Path:
    # The demo's script has options for batch sizes, and fills them in.
    options = {"dtype": plan.dtype, "nvme_path": plan.nvme_path}
    config = build_config(plan.config, point.settings, has_batch=bool(plan.command), **options)
    path = folder / CONFIGS_FOLDER / f"{point.number:04}.json"
    path.parent.mkdir(exist_ok=True)
    write_text_file(path, json.dumps(config, indent=2) + "\n")
    return path


def _build_training_command(plan: Plan, point: Point, config: Path, port: int) -> list[str]:
    """Return the demo's training script with the point's settings; one rank needs no launcher."""
    settings = point.settings
    ranks = int(settings.get(GPUS, 1))
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(port)]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(SCRIPT_PATH), "--model", plan.model]
    command += ["--deepspeed", str(config), "--steps", str(plan.steps)]
    options = {SEQ_LENGTH: "--seq-length", MICRO_BATCH: "--micro-batch", ACCUMULATION: "--gradient-accumulation"}
    for name, option in options.items():
        command += [option, str(settings[name])] if name in settings else []
    return [*command, *(["--gradient-checkpointing"] if settings.get(CHECKPOINTING) == "on" else [])]
