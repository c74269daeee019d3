"""The GPUs that a process uses, from NVML or else from its launcher's environment variables."""

from __future__ import annotations

from collections.abc import Mapping

import pynvml

from zerotop_probe.outside.sampling.nvml import list_processes
from zerotop_probe.recording import launchers


def read_process_gpus() -> dict[int, list[int]]:
    """Return the indexes of the GPUs on which each process computes, by pid; empty without a driver.

    In a container with its own pid namespace NVML's pids are not ours.
    """
    gpus: dict[int, list[int]] = {}
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return gpus
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in list_processes(device):
                gpus.setdefault(int(process.pid), []).append(index)
    except pynvml.NVMLError:
        return gpus
    finally:
        pynvml.nvmlShutdown()
    return gpus


def find_launcher_gpu(environment: Mapping[str, str]) -> str | None:
    """Return the GPU that a launcher assigned to a rank, from its environment; None if unknown."""
    visible, local = environment.get("CUDA_VISIBLE_DEVICES"), launchers.read_number(environment, launchers.LOCAL_RANK)
    if local is None or visible is None:
        return None
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[local] if local < len(names) else None
