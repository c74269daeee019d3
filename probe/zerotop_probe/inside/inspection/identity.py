"""Identity of this process in its job: rank, node, launcher, software versions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from zerotop_probe.recording import launchers, redact
from zerotop_probe.recording.interruptions import is_interruption

# Variables that control memory, threads and devices, and hold no secrets.
_RECORDED_VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "DS_ACCELERATOR",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "NCCL_DEBUG",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_BUFFSIZE",
)


def find_rank(environment: Mapping[str, str]) -> int:
    """Return the global rank: torch.distributed's if it is initialized, else the launcher's, else 0."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    except (RuntimeError, ValueError) as error:
        if is_interruption(error):
            raise
    return launchers.read_number(environment, launchers.RANK) or 0


def read_identity(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return rank, local_rank, node_rank, world_size and launcher; None for integers that the launcher does not set."""
    number = find_rank(environment)
    local_size = launchers.read_number(environment, launchers.LOCAL_SIZE)
    node = launchers.read_number(environment, launchers.NODE_RANK)
    if node is None and local_size:
        node = number // local_size
    return {
        "rank": number,
        "local_rank": launchers.read_number(environment, launchers.LOCAL_RANK),
        "node_rank": node,
        "world_size": launchers.read_number(environment, launchers.WORLD_SIZE),
        "launcher": launchers.find_launcher(_read_start_environment() or environment),
    }


def _read_start_environment() -> dict[str, str]:
    """Return the environment at process start: the Trainer later adds variables that accelerate's launcher also sets."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().decode("utf-8", "replace").split("\0")
    except OSError as error:
        if is_interruption(error):
            raise
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def read_software() -> dict[str, Any]:
    """Return the versions of imported packages, the script's own arguments and the recorded variables."""
    names = ("torch", "deepspeed", "transformers", "accelerate")
    versions = {name: str(getattr(sys.modules[name], "__version__", "")) for name in names if name in sys.modules}
    return {
        "python": platform.python_version(),
        **versions,
        "arguments": redact.redact_command(list(sys.argv)),
        "environment": {name: redact.redact_text(os.environ[name]) for name in _RECORDED_VARIABLES if name in os.environ},
    }
