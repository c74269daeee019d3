"""The keys that the installed DeepSpeed reads from a configuration, at each level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# Sections whose keys are those of a class.
_CLASSES = {
    "zero_optimization": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "fp16": "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
}
# Sections whose keys are read one by one.
_READ = (
    "zero_optimization",
    "activation_checkpointing",
    "aio",
    "checkpoint",
    "data_types",
    "flops_profiler",
    "torch_autocast",
)


class _Watched(dict[str, Any]):
    """A dictionary that notes the keys looked for."""

    def __init__(self, values: dict[str, Any], path: str, found: dict[str, set[str]]) -> None:
        sections = {key: _Watched(value, key, found) for key, value in values.items() if isinstance(value, dict)}
        super().__init__(values | sections)
        self._found = found[path]

    def get(self, key: str, default: Any = None) -> Any:
        self._found.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._found.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._found.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return _Keys(self)


class _Keys:
    def __init__(self, watched: _Watched) -> None:
        self._watched = watched

    def __contains__(self, key: object) -> bool:
        return key in self._watched

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._watched)


def find_read_keys() -> dict[str, set[str]]:
    """Return the keys by section, "" for the top level."""
    import importlib

    from deepspeed.runtime.config import DeepSpeedConfig

    found: dict[str, set[str]] = defaultdict(set)
    for section in ("", *_READ):
        DeepSpeedConfig(_Watched({"train_batch_size": 1} | ({section: {}} if section else {}), "", found))
    for section, name in _CLASSES.items():
        module, _, class_name = name.rpartition(".")
        for field, info in getattr(importlib.import_module(module), class_name).model_fields.items():
            found[section] |= {info.alias or field, field}
    return {section: keys for section, keys in found.items() if section in ("", *_READ, *_CLASSES)}
