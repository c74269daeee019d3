"""The time for which a job held its GPUs, and for how much of it no kernel ran."""

from __future__ import annotations

import math

import numpy as np

from zerotop.recording.moments.devices import locate_allocators
from zerotop.recording.reader import Recording


def measure_gpu_time(recording: Recording, seconds: float) -> tuple[float, float]:
    """Return the seconds of all GPUs on which ranks allocated, and for how many of them no kernel ran; NaN: unknown.

    ``seconds`` is how long the job held each of them. A sample of NVML's utilization counts until the next one.
    """
    used = set(locate_allocators(recording.at()).values())
    idle_shares = []
    for source in recording.sources["gpus"]:
        times = source.unix_times(source.array)
        for host, index in used:
            if host != source.host:
                continue
            mine = source.array["gpu"] == index
            percent, lasting = source.array["utilization_percent"][mine][:-1], np.diff(times[mine])
            known = np.isfinite(percent) & (lasting > 0)
            if known.any():
                idle_shares.append(1 - float(np.average(percent[known], weights=lasting[known])) / 100)
    recording.release_memory()
    if not used or math.isnan(seconds):
        return math.nan, math.nan
    if len(idle_shares) != len(used):
        return seconds * len(used), math.nan
    return seconds * len(used), seconds * sum(max(0.0, share) for share in idle_shares)
