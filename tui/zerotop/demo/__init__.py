"""What make demo runs: a real user's training script, and the DeepSpeed configs it can be given.

The script imports nothing of zerotop.
"""

from __future__ import annotations

from pathlib import Path

SCRIPT_PATH = Path(__file__).with_name("finetune.py")
RECORDING_PATH = Path(__file__).with_name("story.zerotop")
"""A packed recording: 8 B parameters on four H200s, fp16, the optimizer offloaded. Ten steps are skipped before the first
real one, which takes five times as long."""


def find_config_folder() -> Path:
    """The folder of DeepSpeed configs: inside an installed package, or at the top of a checkout."""
    installed = Path(__file__).with_name("ds_configs")
    return installed if installed.is_dir() else Path(__file__).resolve().parents[3] / "ds_configs"


def find_config(name: str) -> Path:
    """The config file of that name, such as ``zero2_offload_optimizer_bf16`` (``.json`` may follow).

    Raises FileNotFoundError, which lists the names there are.
    """
    path = find_config_folder() / f"{name.removesuffix('.json')}.json"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in find_config_folder().glob("*.json")))
        raise FileNotFoundError(f"there is no DeepSpeed config named {name}; there are: {known}")
    return path
