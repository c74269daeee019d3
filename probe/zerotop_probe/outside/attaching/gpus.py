"""Which GPUs a process uses: as NVML says; where NVML cannot tell, as its launcher told it."""

from __future__ import annotations

from collections.abc import Mapping

import pynvml

from zerotop_probe.recording import launchers


def read_process_gpus() -> dict[int, list[int]]:
    """The indexes of the GPUs on which each process computes; empty without a driver.

    In a container that hides process numbers NVML knows none of ours.
    """
    found: dict[int, list[int]] = {}
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return found
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                found.setdefault(int(process.pid), []).append(index)
    except pynvml.NVMLError:
        return found
    finally:
        pynvml.nvmlShutdown()
    return found


def find_launcher_gpu(environment: Mapping[str, str]) -> str | None:
    """The GPU that a launcher meant for a rank, by its environment; None if it meant none or that is not known."""
    visible, local = environment.get("CUDA_VISIBLE_DEVICES"), launchers.read_number(environment, launchers.LOCAL_RANK)
    if local is None or visible is None:
        return None
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[local] if local < len(names) else None
