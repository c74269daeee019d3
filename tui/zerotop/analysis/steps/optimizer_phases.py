"""The parts of ``step()``: moving gradients and parameters, computing, gathering, and GPU idle time.

Times are the device's if recorded, else the host's, which miss kernels that are only launched. The two are not mixed: on a
rank with a GPU, updates in light detail are left out, and on all ranks those of counted steps. The GPU is idle while the
optimizer computes on the CPU, and between parts if transfers both ways are recorded (stage 3 does some transfers outside any
part). If the GPU computes the update, gaps between its kernels are unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.recording.moments.moment import find_sibling_table
from zerotop.recording.reader import Recording, Source
from zerotop_probe.recording.tables import BOUNDARY, COUNTED, FAILED, LIGHT, PHASE_CODE, SKIPPED

PARTS = ("grads_to_cpu", "cpu_optimizer", "params_to_gpu", "optimizer", "allgather", "reduce")
_ON_CPU = "cpu_optimizer"

PARTS_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        ("begin_unix_ns", "<i8"),
        ("skipped", "?"),  # fp16 gradients overflowed: nothing was updated
        ("step_s", "<f8"),  # on the host; DeepSpeed synchronises with the device at its end
        *((f"{name}_s", "<f8") for name in PARTS),  # 0 where the update has no such part
        ("gpu_idle_s", "<f8"),  # a lower bound; NaN where the GPU computes the update
    ]
)


def read_step_parts(recording: Recording) -> NDArray[Any]:
    """Return the updates of all ranks, by rank and then in order (dtype PARTS_DTYPE)."""
    sources = sorted(recording.sources["spans"], key=lambda source: (source.rank, source.created_ns))
    return np.concatenate([np.empty(0, PARTS_DTYPE), *(_build_parts(recording, source) for source in sources)])


def _build_parts(recording: Recording, source: Source) -> NDArray[Any]:
    spans = source.array
    flags = spans["flags"] & (BOUNDARY | FAILED | LIGHT | COUNTED)
    steps = spans[(spans["phase"] == PHASE_CODE["step"]) & (flags == BOUNDARY)]
    rows = np.zeros(len(steps), PARTS_DTYPE)
    rows["rank"] = source.rank
    rows["step"] = steps["step"]
    rows["begin_unix_ns"] = steps["begin_ns"] + source.offset_ns
    rows["skipped"] = steps["flags"] & SKIPPED != 0
    rows["step_s"] = (steps["end_ns"] - steps["begin_ns"]) / 1e9
    rows["gpu_idle_s"] = np.nan
    # Nested parts are included in their outer part.
    parts = spans[np.isin(spans["phase"], [PHASE_CODE[name] for name in PARTS]) & (spans["depth"] == 1)]
    if not len(steps) or not len(parts):
        return rows
    step = np.searchsorted(steps["begin_ns"], parts["begin_ns"], "right") - 1
    inside = (step >= 0) & (parts["end_ns"] <= steps["end_ns"][step])
    seconds = _measure_seconds(parts, find_sibling_table(recording, "device_times", source))
    for name in PARTS:
        chosen = inside & (parts["phase"] == PHASE_CODE[name])
        rows[f"{name}_s"] = np.bincount(step[chosen], seconds[chosen], len(rows))
    rows["gpu_idle_s"] = _measure_idle(rows)
    return rows


def _measure_idle(rows: NDArray[Any]) -> NDArray[np.float64]:
    on_cpu = rows[f"{_ON_CPU}_s"]
    busy = np.sum([rows[f"{name}_s"] for name in PARTS if name != _ON_CPU], axis=0)
    complete = (rows["grads_to_cpu_s"] > 0) & (rows["params_to_gpu_s"] > 0)
    idle = np.where(complete, np.maximum(on_cpu, rows["step_s"] - busy), on_cpu)
    return np.where(on_cpu > 0, np.minimum(idle, rows["step_s"]), np.nan)


def _measure_seconds(parts: NDArray[Any], device_times: Source | None) -> NDArray[np.float64]:
    """Return the device's time of each span where recorded, else the host's."""
    seconds: NDArray[np.float64] = (parts["end_ns"] - parts["begin_ns"]) / 1e9
    if device_times is None or not len(rows := device_times.array[device_times.array["depth"] == 1]):
        return seconds
    rows = rows[np.argsort(rows["begin_ns"], kind="stable")]
    nearest = rows[np.minimum(np.searchsorted(rows["begin_ns"], parts["begin_ns"]), len(rows) - 1)]
    same = (nearest["begin_ns"] == parts["begin_ns"]) & (nearest["phase"] == parts["phase"])
    return np.where(same, nearest["device_ns"] / 1e9, seconds)


def compute_medians(rows: NDArray[Any]) -> dict[str, float]:
    """Return the median of each column of times over updates that were not skipped; columns of zeros are left out."""
    rows = rows[~rows["skipped"]]
    names = ("step_s", *(f"{name}_s" for name in PARTS), "gpu_idle_s")
    columns = {name: rows[name][~np.isnan(rows[name])] for name in names}
    return {name: float(np.median(values)) for name, values in columns.items() if (values > 0).any()}
