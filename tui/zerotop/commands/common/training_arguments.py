"""The options of ``estimate`` that a DeepSpeed config, the Trainer's arguments or a training's command line give.

Options on zerotop's own command line win. Keys that say nothing of memory are left alone. The Trainer's ``auto`` in a
DeepSpeed config is resolved as in ``transformers.integrations.deepspeed``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerotop.commands.common.deepspeed_file import read_deepspeed_config
from zerotop.commands.common.errors import Problem

_DEFAULTS = {"framework": "deepspeed", "dtype": "mixed", "optimizer": "adamw", "loss": "logits"}
_ZERO_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"}
_TRAINER_KEYS = {"per_device_train_batch_size", "output_dir", "deepspeed", "model_name_or_path", "optim", "num_train_epochs"}

_LENGTHS = ("max_seq_length", "max_length", "max_seq_len", "model_max_length", "cutoff_len", "block_size", "seq_length")
_LISTS = ("lora_target_modules",)
_COUNTS = {
    "micro_batch": ("per_device_train_batch_size",),
    "gradient_accumulation": ("gradient_accumulation_steps",),
    "seq_length": _LENGTHS,
    "lora_rank": ("lora_r", "lora_rank"),
    "gpus": ("nproc_per_node", "num_gpus"),
    "nodes": ("nnodes", "num_nodes", "num_machines"),
}
# Names of optimizers in a DeepSpeed config and in the Trainer's ``optim``: ours, and whether it is fused.
_DEEPSPEED_OPTIMIZERS = {
    "adam": ("adamw", True),
    "adamw": ("adamw", True),
    "lamb": ("adamw", True),
    "lion": ("lion", True),
    "muon": ("muon", False),
    "sgd": ("sgd", False),
}
_TRAINER_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_hf"), ("adamw", False)),
    **dict.fromkeys(("adamw_torch_fused", "adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"), ("adamw", True)),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), ("adamw8bit", True)),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion", "paged_lion_32bit"), ("lion", True)),
    **{name: (name, False) for name in ("adafactor", "sgd", "muon")},
}


@dataclass
class TrainingSettings:
    """What was read."""

    config: Mapping[str, Any] | None = None  # DeepSpeed's
    offloaded_share: float = 1.0  # of the optimizer
    read: list[str] = field(default_factory=list)  # what was used, for people


def fill_options(options: argparse.Namespace) -> TrainingSettings:
    """Set the options that were not given, and return what was read. Raises Problem."""
    found = TrainingSettings()
    arguments = dict(parse_words(options.command))
    if options.config:
        content = read_deepspeed_config(options.config)
        if content.keys() & _TRAINER_KEYS and not content.keys() & (_ZERO_KEYS - {"bf16", "fp16"}):
            arguments = content | arguments
        else:
            found.config = content
    named = arguments.get("deepspeed") or arguments.get("deepspeed_config")
    if found.config is None and named is not None and named is not True:
        found.config = named if isinstance(named, Mapping) else _read_beside(str(named), options.config)
    if "use_peft" in arguments and not _is_on(arguments["use_peft"]):
        arguments = {name: value for name, value in arguments.items() if not name.startswith("lora_")}
    named_model = arguments.get("model_name_or_path") or arguments.get("model")
    options.model = options.model or (str(named_model) if named_model else None)
    _fill_counts(options, found, arguments)
    _fill_flags(options, found, arguments)
    if found.config is not None:
        _fill_from_config(options, found, arguments)
    elif arguments:
        _fill_without_deepspeed(options, found, arguments)
    for name, default in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return found


def parse_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command line, ``--name value``, ``--name=value`` or ``--flag``, as (name, value)."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--") or len(word) < 3:
            continue
        name, separator, value = word[2:].partition("=")
        values = [value] if separator else []
        while not separator and index < len(words) and not words[index].startswith("--"):
            values.append(words[index])
            index += 1
        name = name.replace("-", "_")
        # A launcher's last option may have the script as further words.
        yield name, values if name in _LISTS else values[0] if values else True


def _read_beside(path: str, file: str | None) -> Mapping[str, Any]:
    """Read a config whose path is relative to the current folder, or to that of the file that names it."""
    if file is not None and not Path(path).exists() and (Path(file).parent / path).exists():
        path = str(Path(file).parent / path)
    return read_deepspeed_config(path)


def _set(options: argparse.Namespace, found: TrainingSettings, name: str, value: Any) -> None:
    if value not in (None, False) and getattr(options, name) in (None, False):
        setattr(options, name, value)
        found.read.append(name.replace("_", "-") + ("" if value is True else f" {value}"))


def _fill_counts(options: argparse.Namespace, found: TrainingSettings, arguments: Mapping[str, Any]) -> None:
    for name, keys in _COUNTS.items():
        value = next((number for key in keys if (number := _read_count(arguments, key)) is not None), None)
        _set(options, found, name, value)
    if arguments.get("num_processes") is not None and options.gpus is None:  # of accelerate: of all nodes
        ranks, nodes = _read_count(arguments, "num_processes") or 1, options.nodes or 1
        _set(options, found, "gpus", max(1, ranks // nodes))


def _read_count(content: Mapping[str, Any], key: str) -> int | None:
    """Return a positive whole number; None where there is none, or ``auto``. Raises Problem for another value."""
    value = content.get(key)
    if value is None or str(value) in ("auto", "-1", "None", "gpu"):
        return None
    if isinstance(value, bool) or not str(value).isdecimal() or int(str(value)) < 1:
        raise Problem(f"{key} is {value!r}, which is not a positive whole number")
    return int(str(value))


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _fill_flags(options: argparse.Namespace, found: TrainingSettings, arguments: Mapping[str, Any]) -> None:
    _set(options, found, "gradient_checkpointing", _is_on(arguments.get("gradient_checkpointing")))
    _set(options, found, "eager_attention", arguments.get("attn_implementation") == "eager")
    _set(
        options, found, "loss", "liger" if _is_on(arguments.get("use_liger_kernel") or arguments.get("use_liger")) else None
    )
    targets = arguments.get("lora_target_modules")
    if targets and options.lora_targets == "all-linear":
        options.lora_targets = targets if isinstance(targets, str) else ",".join(map(str, targets))
    if _is_on(arguments.get("load_in_4bit")):
        doubled = arguments.get("bnb_4bit_use_double_quant") or arguments.get("use_bnb_nested_quant")
        _set(options, found, "quantization", "nf4-dq" if _is_on(doubled) else "nf4")
    optimizer = arguments.get("optim")
    if optimizer is not None and options.optimizer is None:
        _set_optimizer(options, found, str(optimizer), _TRAINER_OPTIMIZERS)


def _set_optimizer(
    options: argparse.Namespace, found: TrainingSettings, name: str, known: Mapping[str, tuple[str, bool]]
) -> None:
    if name.lower() not in known:
        raise Problem(f"The optimizer {name} has no formula: say with --optimizer which one is nearest to it")
    optimizer, is_fused = known[name.lower()]
    _set(options, found, "optimizer", optimizer)
    _set(options, found, "fused", is_fused)


def _fill_without_deepspeed(options: argparse.Namespace, found: TrainingSettings, arguments: Mapping[str, Any]) -> None:
    sharded = str(arguments.get("fsdp") or "").lower() not in ("", "false", "no_shard", "[]")
    ranks = (options.gpus or 1) * (options.nodes or 1)
    _set(options, found, "framework", "fsdp" if sharded else "ddp" if ranks > 1 else "none")
    weights = str(arguments.get("torch_dtype") or arguments.get("dtype") or "")
    mixed = _is_on(arguments.get("bf16")) or _is_on(arguments.get("fp16"))
    narrow = weights.removeprefix("torch.") in ("bfloat16", "float16", "bf16", "fp16")
    _set(options, found, "dtype", "pure" if narrow else "fp32_weights" if mixed else "fp32")


def _fill_from_config(options: argparse.Namespace, found: TrainingSettings, arguments: Mapping[str, Any]) -> None:
    config = found.config or {}
    if options.framework not in (None, "deepspeed"):
        raise Problem(f"--config is DeepSpeed's, which --framework {options.framework} does not use: give one of them")
    _set(options, found, "dtype", _find_dtype(config, arguments))
    optimizer = config.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("type"), str) and options.optimizer is None:
        _set_optimizer(options, found, optimizer["type"], _DEEPSPEED_OPTIMIZERS)
        parameters = optimizer.get("params")
        if isinstance(parameters, Mapping) and parameters.get("torch_adam") is True:
            options.fused = False
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    _set(options, found, "micro_batch", _read_count(config, "train_micro_batch_size_per_gpu"))
    _set(options, found, "gradient_accumulation", _read_count(config, "gradient_accumulation_steps"))
    bucket = zero.get("reduce_bucket_size")
    if isinstance(bucket, float) and bucket.is_integer():  # 5e8
        bucket = int(bucket)
    if isinstance(bucket, int) and bucket < 1:
        raise Problem(f"reduce_bucket_size is {bucket}, which is not a positive whole number")
    _set(options, found, "bucket", _read_count({"reduce_bucket_size": bucket}, "reduce_bucket_size"))
    offload = zero.get("offload_optimizer")
    share = offload.get("ratio", 1.0) if isinstance(offload, Mapping) else 1.0
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise Problem(f"The ratio of offload_optimizer is {share!r}, which is not between 0 and 1")
    found.offloaded_share = float(share)


def _find_dtype(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return the regime of dtypes. DeepSpeed computes in fp32 unless bf16 or fp16 is enabled."""
    for name in ("bf16", "bfloat16", "fp16"):
        section = config.get(name)
        section = section if isinstance(section, Mapping) else {}
        enabled = section.get("enabled", False)
        if enabled == "auto":  # of the Trainer's arguments; without them mixed precision is usual
            enabled = _is_on(arguments.get(name)) if arguments.keys() & {"bf16", "fp16"} else name == "bf16"
        if enabled is True:
            narrow = section.get("bf16_master_weights_and_grads") or section.get("fp16_master_weights_and_grads")
            return "bf16_master" if narrow is True else "mixed"
    return "fp32"


def resolve_batch(config: Mapping[str, Any] | None, options: argparse.Namespace, ranks: int) -> None:
    """Set micro-batch and accumulation by DeepSpeed's rule: the product of both and the ranks is ``train_batch_size``.

    Raises Problem for numbers that contradict each other.
    """
    total = _read_count(config or {}, "train_batch_size")
    if total is None:
        return
    rows, steps = options.micro_batch, options.gradient_accumulation
    steps = steps or (max(1, total // (rows * ranks)) if rows else 1)
    rows = rows or max(1, total // (steps * ranks))
    if rows * steps * ranks != total:
        raise Problem(
            f"train_batch_size {total:,} is not micro-batch {rows:,} x accumulation {steps:,} x {ranks:,} ranks:"
            " DeepSpeed refuses it. Give the GPUs of each node with --gpus"
        )
    options.micro_batch, options.gradient_accumulation = rows, steps
