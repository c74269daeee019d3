"""This machine as the demo's training script needs it: usable GPUs, environment, ports and shared memory."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pynvml

from zerotop.analysis.formatting import format_count
from zerotop.commands.common.errors import Problem

_REQUIRED_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate")


def check_packages(what: str, required: Sequence[str] = _REQUIRED_PACKAGES) -> None:
    """Raise Problem if a package is missing that ``what`` needs for training."""
    missing = [name for name in required if importlib.util.find_spec(name) is None]
    if missing:
        raise Problem(f"{what} needs {', '.join(missing)} to train: pip install 'zerotop[train]'")


def build_environment(gpus: int) -> dict[str, str]:
    """Return the variables to set for the training script on these GPUs, or on the CPU."""
    # DeepSpeed compiles its operators with the ninja that pip installed next to this Python.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path} if gpus else {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def count_usable_gpus() -> int:
    """Return how many GPUs the training can use; print a message if torch was built without CUDA."""
    count = count_visible_gpus()
    if not count or torch_has_cuda():
        return count
    gpus = format_count(count, "GPU")
    print(f"This machine has {gpus}, but the installed torch was built without CUDA: training runs on the CPU")
    return 0


def torch_has_cuda() -> bool:
    """Return whether ``torch.version.cuda`` is set, without importing torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        text = Path(folder, "version.py").read_text()
        return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None
    return False


def count_visible_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use."""
    return len(list_visible_gpus())


def list_visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        pynvml.nvmlInit()
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return [str(index) for index in range(count)] if visible is None else parse_visible_devices(visible)[:count]


def read_gpu_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU; None without one."""
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return min((int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles), default=None)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def parse_visible_devices(text: str) -> list[str]:
    """Return the devices in ``CUDA_VISIBLE_DEVICES`` up to the first invalid one, as CUDA does."""
    devices = []
    for device in text.split(","):
        if not device.strip() or device.strip().startswith("-"):
            break
        devices.append(device.strip())
    return devices


def find_free_port() -> int:
    """Return a free port of this machine, for the ranks' rendezvous."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def remove_shared_memory(port: int) -> None:
    """Remove shared buffers, 66 MiB each, that DeepSpeed's ranks on a CPU leave behind until the next reboot."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)
