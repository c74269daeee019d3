"""The demo's files: training scripts, which import nothing from zerotop, DeepSpeed configs and a recording."""

from __future__ import annotations

from pathlib import Path

SCRIPT_PATH = Path(__file__).with_name("finetune.py")
FAULTY_SCRIPT_PATH = Path(__file__).with_name("slow_data.py")
RECORDING_PATH = Path(__file__).with_name("story.zerotop")
"""A packed recording: 8 B parameters on four H200s, fp16, optimizer on the CPU. Ten steps are skipped; the first real step
takes five times as long as those."""


def find_config_folder() -> Path:
    """Return the folder of DeepSpeed configs: inside an installed package, or at the top of a checkout."""
    installed = Path(__file__).with_name("ds_configs")
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "ds_configs"


def find_config(name: str) -> Path:
    """Return the path of a config such as ``zero2_offload_optimizer_bf16``, with or without ``.json``.

    Raises FileNotFoundError, whose message lists all names.
    """
    path = find_config_folder() / f"{name.removesuffix('.json')}.json"
    if not path.is_file():
        names = ", ".join(sorted(config.stem for config in find_config_folder().glob("*.json")))
        raise FileNotFoundError(f"unknown DeepSpeed config {name}. Choose one of: {names}")
    return path
