"""Measure this machine: a program that prints one figure a line, as JSON, as soon as it is known.

It runs in a process of its own, so that the parent can end it at its limit and keep what was printed. What cannot be
measured is printed with the reason, as a sentence.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

_COPIED = 256 << 20
_ELEMENTS = 16 << 20  # of the optimizer: its states are larger than caches
_MATRIX = 8192
_REPEATS = 5
_BUSY_PERCENT = 10

Figures = Iterator[tuple[str, float]]


class NotMeasuredError(Exception):
    """A measurement is not possible here; the text is the reason, as a sentence."""


def print_figures() -> None:
    """Run all measurements, the shortest first."""
    torch = _import_torch()
    _report(("memory_copy",), _copy_memory)
    _report(("adam_per_core", "adam"), lambda: _run_adam(torch))
    _report(("context", "workspace", "matrix_product", "process"), lambda: _use_gpu(torch))
    _report(("to_gpu", "from_gpu"), lambda: _copy_to_gpu(torch))
    _report(("nccl", "all_reduce"), lambda: _reduce(torch))


def _report(names: tuple[str, ...], measure: Callable[[], Figures]) -> None:
    """Print the figures of one measurement, or why there are none."""
    missing = list(names)
    try:
        for name, value in measure():
            missing.remove(name)
            _print(name=name, value=value)
    except NotMeasuredError as error:
        reason = str(error)
    except Exception as error:  # a library's or driver's own: the other figures are still of use
        reason = f"It failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}."
    else:
        return
    for name in missing:
        _print(name=name, reason=reason)


def _print(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def _import_torch() -> Any:
    try:
        import torch
    except Exception as error:  # a broken installation raises more than ImportError
        _print(name="torch", reason=f"{type(error).__name__}: {error}"[:200])
        return None
    _print(name="torch", version=torch.__version__)
    return torch


def _need(torch: Any) -> Any:
    if torch is None:
        raise NotMeasuredError("This Python has no PyTorch: run it in the training's environment.")
    return torch


def _need_gpu(torch: Any) -> Any:
    if not _need(torch).cuda.is_available():
        raise NotMeasuredError("PyTorch sees no GPU here.")
    busy = _read_utilization(torch)
    if busy > _BUSY_PERCENT:
        raise NotMeasuredError(f"The GPU is {busy} % busy with another program: measure again when it is idle.")
    return torch.cuda


def _read_utilization(torch: Any) -> int:
    try:
        return int(torch.cuda.utilization())
    except Exception:  # without NVML's bindings, or a driver that does not tell
        return 0


_checked: list[Any] = []


def _find_gpu(torch: Any) -> Any:
    """Return ``torch.cuda`` after a look whether the GPU is idle, before this program itself makes it busy."""
    if not _checked:
        _checked.append(_need_gpu(torch))
    return _checked[0]


# --- host ------------------------------------------------------------------------------------------------------------------


def _time_best(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def _copy_memory() -> Figures:
    source, target = np.ones(_COPIED, np.uint8), np.empty(_COPIED, np.uint8)
    yield "memory_copy", _COPIED / _time_best(lambda: np.copyto(target, source))


def _run_adam(torch: Any) -> Figures:
    """Yield the elements each second that PyTorch's fused AdamW updates on one core, and on all that are allowed."""
    _need(torch)
    for name, cores in (("adam_per_core", 1), ("adam", len(os.sched_getaffinity(0)))):
        torch.set_num_threads(cores)
        weight = torch.zeros(_ELEMENTS, requires_grad=True)
        weight.grad = torch.full_like(weight, 0.01)
        try:
            optimizer = torch.optim.AdamW([weight], fused=True)
        except (TypeError, RuntimeError) as error:
            raise NotMeasuredError("This PyTorch has no fused AdamW for the CPU: version 2.4 has one.") from error
        optimizer.step()
        yield name, _ELEMENTS / _time_best(optimizer.step, 3)


# --- GPU -------------------------------------------------------------------------------------------------------------------


def _read_device(torch: Any) -> int:
    """Return the bytes of this process on the GPU by NVML."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    raise NotMeasuredError("The driver does not tell this process's memory, as in containers with their own PIDs.")


def _use_gpu(torch: Any) -> Figures:
    cuda = _find_gpu(torch)
    one = torch.ones(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(one)
    before = cuda.memory_allocated()
    torch.matmul(one, one, out=out)
    cuda.synchronize()
    yield "workspace", cuda.memory_allocated() - before

    def multiply() -> None:
        torch.matmul(one, one, out=out)
        cuda.synchronize()

    yield "matrix_product", 2 * _MATRIX**3 / _time_best(multiply)
    yield "process", _read_resident()
    yield "context", _read_device(torch) - cuda.memory_reserved()


def _read_resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _copy_to_gpu(torch: Any) -> Figures:
    cuda = _find_gpu(torch)
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    for name, target, source in (("to_gpu", device, host), ("from_gpu", host, device)):

        def copy(target: Any = target, source: Any = source) -> None:
            target.copy_(source, non_blocking=True)
            cuda.synchronize()

        yield name, _COPIED / _time_best(copy)


def _reduce(torch: Any) -> Figures:
    """Yield NCCL's memory in one process, and the bytes that an all-reduce of all GPUs moves each second."""
    cuda = _find_gpu(torch)
    count = cuda.device_count()
    if count < 2:
        raise NotMeasuredError("One GPU has no other to communicate with.")
    import tempfile

    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes.spawn(_reduce_in_rank, args=(count, store, folder), nprocs=count)
        with open(os.path.join(folder, "figures.json")) as file:
            yield from json.load(file).items()


def _reduce_in_rank(rank: int, count: int, store: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    data = torch.ones(_COPIED // 4, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=count)
    dist.all_reduce(data)
    torch.cuda.synchronize()
    used = before - torch.cuda.mem_get_info()[0]

    def reduce() -> None:
        dist.all_reduce(data)
        torch.cuda.synchronize()

    seconds = _time_best(reduce)
    if rank == 0:
        # Of a ring: each rank sends and receives 2 (N - 1) / N of the bytes.
        moved = 2 * (count - 1) / count * _COPIED
        with open(os.path.join(folder, "figures.json"), "w") as file:
            json.dump({"nccl": used, "all_reduce": moved / seconds}, file)
    with suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    print_figures()
