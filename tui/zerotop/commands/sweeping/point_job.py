"""The job of one point: its command line, environment and DeepSpeed configuration."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerotop.analysis.memory.allocator_settings import ANY_VARIABLE, CUDA_VARIABLE
from zerotop.analysis.sweeps.settings import (
    ACCUMULATION,
    ALLOCATOR,
    CHECKPOINTING,
    DEFAULT_ALLOCATOR,
    GPUS,
    MICRO_BATCH,
    SEQ_LENGTH,
)
from zerotop.commands.common.model_config import find_shape
from zerotop.commands.job.training_machine import build_environment, count_visible_gpus, find_free_port
from zerotop.commands.sweeping.deepspeed_config import build_config
from zerotop.commands.sweeping.placeholders import DEEPSPEED, PORT, STEPS, expand_command, find_placeholders
from zerotop.demo import SCRIPT_PATH
from zerotop.recording.atomic_write import write_text_file
from zerotop.recording.sweeps import CONFIGS_FOLDER, Plan, Point, Value

DEFAULTS: dict[str, Value] = {GPUS: 1, SEQ_LENGTH: 256, MICRO_BATCH: 4}
"""Of the demo's training script, where they are not given."""

_ASKED = (GPUS, SEQ_LENGTH, MICRO_BATCH, ACCUMULATION)


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
