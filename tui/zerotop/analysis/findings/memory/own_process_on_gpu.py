"""A process that the job has started computes on a rank's GPU while the rank trains: a scorer, a dashboard, an exporter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, in_each_rank
from zerotop.analysis.findings.support.causes.gpu_causes import OWN_ADVICE
from zerotop.analysis.findings.support.gpu_use import find_own_processes, find_starter
from zerotop.analysis.findings.support.thresholds import COMPUTING_PERCENT
from zerotop.recording.moments.at import At
from zerotop.recording.samples import Rows, Samples, read_column
from zerotop_probe.recording.events import GpuProcess

_KIND = FindingKind(
    name="own_process_on_gpu",
    confidence=0.8,
    gpu_bytes="used_bytes",
    headline="The job's own process {pid} uses {own_share:percent} of GPU {gpu}, where rank {rank} trains",
    details=(
        "[It runs {program}. ][Rank {starter} started it. ]It holds {used_bytes:bytes} there. In the {seconds:seconds} up to"
        " step {last_step} rank {rank}'s kernels ran in {rank_share:percent} of the time: they wait while those of the other"
        " process run."
    ),
    advice=OWN_ADVICE,
    lasts=True,
)
# Steps before each check.
_CHECKS = tuple(sorted(first << doubled for first in (4, 5, 6, 7) for doubled in range(32)))
# A process that uses less of the GPU, in the mean of so many seconds, costs little. It may be busy for a moment only.
_LEAST_PERCENT, _LEAST_S = 20.0, 4.0
# Of the samples of both processes, the share in which both compute: else they take turns that last longer.
_TOGETHER_SHARE = 0.5
# A sample counts for at most so long (s): they are taken once a second.
_LONGEST_S = 1.5
# One that has given back so much of its memory may sleep while the rank trains, see shared_gpu.
_GIVEN_BACK_SHARE = 0.3
# Engines that generate what the ranks wait for are in turn with them.
_ENGINES = ("vllm", "sglang")


@in_each_rank(kinds=1)
def detect(window: SearchWindow[Process]) -> Iterator[Finding | None]:
    """Report each process once, from NVML's samples of it and of the rank in all steps but the first."""
    process, fresh = window.subject, window.steps(window.subject.steps)
    for count in _CHECKS:
        if fresh.start < count <= fresh.stop and process.gpu_key is not None:
            at = process.at.at(int(process.steps["end_unix_ns"][count - 1]))
            for pid, event in find_own_processes(at, process.host).items():
                if not any(name in (event.program or "").lower() for name in _ENGINES):
                    yield window.find_once(partial(_check, at, process, event, process.steps[1:count]), pid)


def _check(at: At, process: Process, event: GpuProcess, rows: Rows) -> Finding | None:
    host, gpu = process.gpu_key or ("", -1)
    records = at.records("gpu_processes", host, "gpu", gpu)
    samples = records.read_window(int(rows["begin_unix_ns"][0]), at.cursor_ns)
    if not len(samples):
        return None
    # In a container NVML may have other PIDs: those of the rank show that it has not.
    own, ranks = (_select(samples, pid) for pid in (event.pid, process.source.pid))
    times, *places = np.intersect1d(own.times, ranks.times, return_indices=True)
    if not len(times):
        return None
    uses = [read_column(part.rows, "sm_percent")[place] for part, place in zip((own, ranks), places, strict=True)]
    weights = np.minimum(np.diff(times, append=times[-1:]) / 1e9, _LONGEST_S)
    weights[np.isnan(uses[0]) | np.isnan(uses[1])] = 0.0
    weights[: np.argmax(uses[0] >= COMPUTING_PERCENT)] = 0.0  # it loads before it computes
    seconds = float(weights.sum())
    if seconds < _LEAST_S:
        return None
    means = [float(np.nansum(use * weights)) / seconds for use in uses]
    together = float(weights[(uses[0] >= COMPUTING_PERCENT) & (uses[1] >= COMPUTING_PERCENT)].sum())
    if means[0] < _LEAST_PERCENT or together < _TOGETHER_SHARE * seconds:
        return None
    held = _select(records.read_window(0, at.cursor_ns), event.pid).rows["used_bytes"]
    if (held < (1 - _GIVEN_BACK_SHARE) * np.maximum.accumulate(held)).any():
        return None
    evidence = {
        "own_share": means[0] / 100,
        "rank_share": means[1] / 100,
        "used_bytes": int(own.rows["used_bytes"].max()),
        "seconds": seconds,
    }
    return _KIND.at_steps(
        process,
        rows[np.searchsorted(rows["end_unix_ns"], times[0]) :],
        evidence,
        pid=event.pid,
        gpu=gpu,
        program=event.program,
        starter=find_starter(at, event),
        last_step=int(rows["step"][-1]),
    )


def _select(samples: Samples, pid: int) -> Samples:
    return samples.select(samples.rows["pid"] == pid)
