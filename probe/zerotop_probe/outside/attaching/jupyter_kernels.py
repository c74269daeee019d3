"""The Jupyter kernels of this node. A kernel runs Python code only while it executes a cell."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence

from zerotop_probe.outside import procfs
from zerotop_probe.outside.sampling.ranks import silent_ranks

JUPYTER = "jupyter"

_MODULES = ("ipykernel_launcher", "ipykernel")
_GPU_DRIVER = "/dev/nvidiactl"
_MAX_MAPS_BYTES = 1 << 22


def is_kernel(arguments: Sequence[str]) -> bool:
    """Return whether a command line runs a Python kernel of Jupyter."""
    modules = {after for option, after in itertools.pairwise(arguments) if option == "-m"}
    names = {os.path.basename(argument).removesuffix(".py") for argument in arguments[1:2]}
    return silent_ranks.is_python(arguments) and bool((modules | names) & set(_MODULES))


def find_kernels() -> list[int]:
    """Return the pids of the kernels that use a GPU; without a GPU here, of those that have imported PyTorch."""
    lines = procfs.iter_processes("cmdline")
    return [pid for pid, attributes in lines if is_kernel(attributes["cmdline"] or []) and _may_train(pid)]


def _may_train(pid: int) -> bool:
    needed = b"/dev/nvidia" if os.path.exists(_GPU_DRIVER) else b"libtorch"
    return needed in procfs.read_file(f"/proc/{pid}/maps", _MAX_MAPS_BYTES)


def find_notebook(environment: Mapping[str, str]) -> str:
    """Return the notebook of a kernel, as its Jupyter server names it to the kernel; "" if unknown."""
    return environment.get("JPY_SESSION_NAME", "")
