"""A made-up job with known loads of GPUs, cores and links in each phase, and the samples of averaging sensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from small_recording import S, make_identity, make_record, make_span, write_table
from zerotop_probe.recording.tables import ALLOCATOR, BEGIN, BOUNDARY, GPUS, PROCESSES, SKIPPED, SPANS, TICK

# Seconds and GPU utilization, cores, watts, bytes a second to the host and to the GPU in each phase.
PLAN = {
    "forward": (0.06, 100.0, 1.0, 600.0, 0.0, 0.0),
    "backward": (0.10, 90.0, 1.0, 500.0, 5e9, 0.0),
    "grads_to_cpu": (0.02, 0.0, 2.0, 150.0, 20e9, 0.0),
    "cpu_optimizer": (0.12, 0.0, 14.0, 100.0, 0.0, 0.0),
    "params_to_gpu": (0.04, 50.0, 2.0, 200.0, 0.0, 30e9),
}
INNER = ("grads_to_cpu", "cpu_optimizer", "params_to_gpu")


class Job:
    """Iterations of a job, in which the length of each phase varies a little, and the readings of its sensors."""

    def __init__(self, count: int = 200, *, scale: float = 1.0, skip: int = 0, long: int = 0) -> None:
        random = np.random.default_rng(3)
        self.spans: list[tuple[float, float, str, int]] = []
        now = 10.0
        for step in range(count):
            for phase, (seconds, *_) in PLAN.items():
                if step < skip and phase in INNER:
                    continue
                lasts = seconds * scale * random.uniform(0.9, 1.1) * (5.0 if step < long else 1.0)
                self.spans.append((now, now + lasts, phase, step))
                now += lasts
            now += 0.004 * scale
        self.end, self.skip, self.count = now, skip, count
        self._grain = 0.0005
        begins = np.array([begin for begin, _, _, _ in self.spans])
        times = np.arange(0.0, now + 1, self._grain)
        at = np.clip(np.searchsorted(begins, times, "right") - 1, 0, None)
        ends = np.array([end for _, end, _, _ in self.spans])[at]
        inside = (times >= begins[0]) & (times < ends)
        self._sums = []
        for column in range(1, 6):
            values = np.array([PLAN[phase][column] for _, _, phase, _ in self.spans])[at]
            self._sums.append(np.concatenate(([0.0], np.cumsum(np.where(inside, values, 0.0) * self._grain))))

    def compute_mean(self, column: int, begin: float, end: float) -> float:
        """Return the true mean of a sensor's column between two moments."""
        return (self._integrate_upto(column, end) - self._integrate_upto(column, begin)) / (end - begin)

    def _integrate_upto(self, column: int, moment: float) -> float:
        sums, place = self._sums[column], moment / self._grain
        below = min(int(place), len(sums) - 2)
        return float(sums[below] + (sums[below + 1] - sums[below]) * (place - below))

    def spans_of(self) -> list[object]:
        """Return the records of SPANS."""
        found: list[object] = []
        for step in range(self.count):
            mine = [one for one in self.spans if one[3] == step]
            flags = BOUNDARY | (SKIPPED if step < self.skip else 0)
            rows = [make_span(begin, end, phase, step, depth=int(phase in INNER)) for begin, end, phase, _ in mine]
            inner = [one for one in mine if one[2] in INNER]
            begin = inner[0][0] if inner else mine[-1][1]
            end = inner[-1][1] if inner else mine[-1][1] + 0.002
            found += [*rows, make_span(begin, end, "step", step, flags)]
        return found

    def write_recording(self, folder: Path, *, ranks: int = 1, gpu: bool = True, lag: float = 0.03) -> None:
        """Write the recording; ``lag`` is the delay in seconds between NVML's reading and the sampler's."""
        for rank in range(ranks):
            write_table(folder, SPANS, make_identity(rank), *self.spans_of()).close()
            if gpu:
                write_table(folder, ALLOCATOR, make_identity(rank), *self._make_readings(rank)).close()
        node, ticks = make_identity(-1), np.arange(9.0, self.end + 0.5, 0.1).tolist()
        write_table(
            folder, PROCESSES, node, *[row for now in ticks for row in self._make_process_samples(now, ranks)]
        ).close()
        if gpu:
            rows = [row for place, now in enumerate(ticks) for row in self._make_gpu_samples(place, now, ranks, lag)]
            write_table(folder, GPUS, node, *rows).close()

    def _make_process_samples(self, now: float, ranks: int) -> list[object]:
        cores = self.compute_mean(1, now - 0.1, now)
        return [
            make_record(PROCESSES, time_ns=int(now * S), rss_bytes=10**9, cores_used=cores, pid=100 + rank, rank=rank)
            for rank in range(ranks)
        ]

    def _make_gpu_samples(self, place: int, now: float, ranks: int, lag: float) -> list[object]:
        renewed = now - 0.1 * (place % 2) - lag
        used = round(self.compute_mean(0, renewed - 0.2, renewed))
        moved = [int(self.compute_mean(column, 0.0, now) * now) for column in (3, 4)]
        values = {"pcie_tx_bytes": moved[0], "pcie_rx_bytes": moved[1], "power_w": self.compute_mean(2, now - 0.02, now)}
        return [
            make_record(GPUS, time_ns=int(now * S), utilization_percent=used, gpu=rank, used_bytes=1, **values)
            for rank in range(ranks)
        ]

    def _make_readings(self, rank: int) -> list[tuple[Any, ...]]:
        found = []
        for begin, end, phase, _ in self.spans:
            held = 2000 if phase == "backward" else 1000
            found.append(make_record(ALLOCATOR, time_ns=int(begin * S), allocated_bytes=held, edge=BEGIN, device=rank))
            middle = int((begin + end) / 2 * S)
            found.append(make_record(ALLOCATOR, time_ns=middle, allocated_bytes=held // 2, edge=TICK, device=rank))
        return found
