"""The inside of ``step()``: how long an update moves gradients and parameters, computes, gathers, and leaves the GPU idle.

Times of parts are the device's where it was asked, else the host's: what is only launched takes the host no time. The GPU
is idle while the optimizer computes on the CPU, and in what lies between the parts where both ways of moving data are among
them (stage 3 moves some of it in no part of its own). Where the GPU itself computes the update nothing is known of gaps
between its kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.processes.alive_ranks import find_sibling_table
from zerotop.session.reader import Session, Source
from zerotop_probe.recording.tables import BOUNDARY, FAILED, PHASE_CODE, SKIPPED

PARTS = ("grads_to_cpu", "cpu_optimizer", "params_to_gpu", "optimizer", "allgather", "reduce")
_ON_CPU = "cpu_optimizer"

PARTS_DTYPE = np.dtype(
    [
        ("rank", "<i4"),
        ("step", "<i8"),
        ("begin_unix_ns", "<i8"),
        ("skipped", "?"),  # fp16 gradients overflowed: nothing was updated
        ("step_s", "<f8"),  # on the host; DeepSpeed waits for the device at its end
        *((f"{name}_s", "<f8") for name in PARTS),  # 0 where the update has no such part
        ("gpu_idle_s", "<f8"),  # at least; NaN where the GPU computes the update
    ]
)


def read_step_parts(session: Session) -> NDArray[Any]:
    """All updates of all ranks, by rank and then in order (dtype PARTS_DTYPE)."""
    sources = sorted(session.sources["spans"], key=lambda source: (source.rank, source.created_ns))
    return np.concatenate([np.empty(0, PARTS_DTYPE), *(_build_parts(session, source) for source in sources)])


def _build_parts(session: Session, source: Source) -> NDArray[Any]:
    spans = source.array
    steps = spans[(spans["phase"] == PHASE_CODE["step"]) & (spans["flags"] & (BOUNDARY | FAILED) == BOUNDARY)]
    rows = np.zeros(len(steps), PARTS_DTYPE)
    rows["rank"] = source.rank
    rows["step"] = steps["step"]
    rows["begin_unix_ns"] = steps["begin_ns"] + source.offset_ns
    rows["skipped"] = steps["flags"] & SKIPPED != 0
    rows["step_s"] = (steps["end_ns"] - steps["begin_ns"]) / 1e9
    rows["gpu_idle_s"] = np.nan
    # Parts in parts are in the time of those.
    parts = spans[np.isin(spans["phase"], [PHASE_CODE[name] for name in PARTS]) & (spans["depth"] == 1)]
    if not len(steps) or not len(parts):
        return rows
    of = np.searchsorted(steps["begin_ns"], parts["begin_ns"], "right") - 1
    inside = (of >= 0) & (parts["end_ns"] <= steps["end_ns"][of])
    seconds = _measure_seconds(parts, find_sibling_table(session, "device_times", source))
    for name in PARTS:
        mine = inside & (parts["phase"] == PHASE_CODE[name])
        rows[f"{name}_s"] = np.bincount(of[mine], seconds[mine], len(rows))
    rows["gpu_idle_s"] = _measure_idle(rows)
    return rows


def _measure_idle(rows: NDArray[Any]) -> NDArray[np.float64]:
    on_cpu = rows[f"{_ON_CPU}_s"]
    busy = np.sum([rows[f"{name}_s"] for name in PARTS if name != _ON_CPU], axis=0)
    all_told = (rows["grads_to_cpu_s"] > 0) & (rows["params_to_gpu_s"] > 0)
    idle = np.where(all_told, np.maximum(on_cpu, rows["step_s"] - busy), on_cpu)
    return np.where(on_cpu > 0, np.minimum(idle, rows["step_s"]), np.nan)


def _measure_seconds(parts: NDArray[Any], device_times: Source | None) -> NDArray[np.float64]:
    """The device's time of each span, where it was asked for it."""
    seconds: NDArray[np.float64] = (parts["end_ns"] - parts["begin_ns"]) / 1e9
    if device_times is None or not len(device_times.array):
        return seconds
    told = device_times.array[device_times.array["depth"] == 1]
    told = told[np.argsort(told["begin_ns"], kind="stable")]
    place = np.minimum(np.searchsorted(told["begin_ns"], parts["begin_ns"]), max(0, len(told) - 1))
    known = (told["begin_ns"][place] == parts["begin_ns"]) & (told["phase"][place] == parts["phase"]) if len(told) else None
    return np.where(known, told["device_ns"][place] / 1e9, seconds) if known is not None else seconds


def compute_medians(rows: NDArray[Any]) -> dict[str, float]:
    """The median of each column of times over the updates that were not skipped; what is never there is left out."""
    rows = rows[~rows["skipped"]]
    names = ("step_s", *(f"{name}_s" for name in PARTS), "gpu_idle_s")
    found = {}
    for name in names:
        known = rows[name][~np.isnan(rows[name])]
        if len(known) and (known > 0).any():
            found[name] = float(np.median(known))
    return found
