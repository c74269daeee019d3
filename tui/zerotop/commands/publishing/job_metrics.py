"""The metrics of a job, in base units, for systems that collect them.

Their labels join with those of NVIDIA's DCGM exporter, and what it has of a device (utilization, power, used memory) is not
repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zerotop.analysis.live_view import Gpu, LiveView
from zerotop.analysis.steps.job_pace import estimate_tokens
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.keys import GpuKey
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

JOB_LABEL, HOST_LABEL, UUID_LABEL = "job", "Hostname", "UUID"


class MetricSample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class JobMetric:
    """A metric with its values; those that are not known are left out."""

    name: str  # of a counter without the suffix "_total"
    help: str
    is_counter: bool
    labels: tuple[str, ...]
    samples: tuple[MetricSample, ...]


def read_job_metrics(source: RecordingSource) -> list[JobMetric]:
    """Return the metrics of a recording at its end."""
    view = source.view_at(None)
    job = {JOB_LABEL: view.job.name}
    return [*_measure_job(source, view, job), *_measure_phases(source, view, job), *_measure_devices(source, view, job)]


def _make_metric(
    name: str, text: str, labels: Iterable[str], samples: Iterable[MetricSample], *, is_counter: bool = False
) -> JobMetric:
    known = tuple(sample for sample in samples if not math.isnan(sample.value))
    return JobMetric(f"zerotop_{name}", text, is_counter, tuple(labels), known)


def _measure_job(source: RecordingSource, view: LiveView, job: dict[str, str]) -> Iterator[JobMetric]:
    rows, progress, findings = source.job_steps, view.progress, source.findings_at(None)
    last_ns = source.find_step_end(source.last_step) if source.last_step is not None else None
    gauges = {
        "job_running": ("1 while the job runs.", float(not view.job.state.is_over)),
        "job_start_time_seconds": ("Unix time at which the recording began.", source.begin_ns / 1e9),
        "last_step_time_seconds": ("Unix time at which all ranks had finished the last step.", _divide(last_ns, 1e9)),
        "planned_steps": ("Optimizer steps that are planned.", _to_float(progress.total_steps)),
        "iteration_seconds": (
            "Mean of the last ten iterations, never including the job's first; once a job has ended, the median of all.",
            progress.iteration_s,
        ),
        "loss": ("The loss that was logged last.", view.loss.value if view.loss is not None else math.nan),
        "watching_ratio": ("Share of the time that watching takes, by its own measurement.", view.cost.probe_share),
    }
    for name, (text, value) in gauges.items():
        yield _make_metric(name, text, job, [MetricSample(job, value)])
    counters = {
        "steps": ("Optimizer steps that all ranks have finished and that were recorded.", float(rows["steps"].sum())),
        "skipped_steps": ("Steps whose update was skipped.", float(progress.skipped_steps)),
        "tokens": ("Tokens of all ranks in those steps.", float(estimate_tokens(rows, source.job_tokens)) or math.nan),
    }
    for name, (text, value) in counters.items():
        yield _make_metric(name, text, job, [MetricSample(job, value)], is_counter=True)
    counts = Counter((finding.name, finding.severity.value) for finding in findings)
    yield _make_metric(
        "findings",
        "Findings so far.",
        (*job, "finding", "severity"),
        [MetricSample(job | {"finding": name, "severity": severity}, count) for (name, severity), count in counts.items()],
        is_counter=True,
    )


def _measure_phases(source: RecordingSource, view: LiveView, job: dict[str, str]) -> Iterator[JobMetric]:
    """Yield the seconds of each phase on the slowest rank of each step, which add up to those of the iterations."""
    counts = source.job_steps["steps"][: len(view.iterations.step)]
    sums = {name: float(np.nansum(seconds * counts)) for name, seconds in view.iterations.phase_s.items()}
    yield _make_metric(
        "phase_seconds",
        'Seconds of each phase in finished steps, on the slowest rank of each; "unknown": steps recorded without phases.',
        (*job, "phase"),
        [MetricSample(job | {"phase": name}, seconds) for name, seconds in sums.items()],
        is_counter=True,
    )


def _measure_devices(source: RecordingSource, view: LiveView, job: dict[str, str]) -> Iterator[JobMetric]:
    uuids = list_gpu_uuids(source.recording)
    memory = {
        "allocated_bytes": "Memory of tensors in PyTorch's allocators, of all ranks on the GPU.",
        "allocated_peak_bytes": "The most memory that tensors have had so far.",
        "reserved_bytes": "Memory that PyTorch's allocators hold, of all ranks on the GPU.",
        "reserved_peak_bytes": "The most memory that PyTorch's allocators have held so far.",
    }
    for name, text in memory.items():
        samples = [
            MetricSample(job | _label_gpu((gpu.host, gpu.index), uuids), _to_float(getattr(gpu, name)))
            for gpu in view.gpus
            if gpu.ranks
        ]
        yield _make_metric(f"gpu_{name}", text, (*job, HOST_LABEL, UUID_LABEL), samples)
    places = {rank: gpu for gpu in view.gpus for rank in gpu.ranks}
    ranks = {
        rank.rank: job
        | {"rank": str(rank.rank) if rank.rank >= 0 else ""}
        | _label_rank(rank.host, places.get(rank.rank), uuids)
        for rank in view.ranks
    }
    labels = (*job, "rank", HOST_LABEL, UUID_LABEL)
    yield _make_metric(
        "rank_alive",
        "1 while the process lives.",
        labels,
        [MetricSample(ranks[one.rank], float(one.alive)) for one in view.ranks],
    )
    yield _make_metric(
        "rank_resident_bytes",
        "Resident host memory of the process.",
        labels,
        [MetricSample(ranks[one.rank], float(one.rss_bytes)) for one in view.ranks],
    )
    yield _make_metric(
        "rank_step",
        "The optimizer step that the rank is in, from 0.",
        labels,
        [MetricSample(ranks[one.rank], _to_float(one.step)) for one in view.ranks],
    )


def list_gpu_uuids(recording: Recording) -> dict[GpuKey, str]:
    """Return the UUID of each GPU, "" where NVML had none."""
    nodes = recording.events_of(events.Node)
    return {(node.writer.host, gpu.index): gpu.uuid or "" for node in nodes for gpu in node.gpus or ()}


def _label_gpu(key: GpuKey, uuids: Mapping[GpuKey, str]) -> dict[str, str]:
    return {HOST_LABEL: key[0], UUID_LABEL: uuids.get(key, "")}


def _label_rank(host: str, gpu: Gpu | None, uuids: Mapping[GpuKey, str]) -> dict[str, str]:
    """Return the host and GPU of a rank; no UUID without a GPU."""
    return {HOST_LABEL: host, UUID_LABEL: ""} if gpu is None else _label_gpu((gpu.host, gpu.index), uuids)


def _to_float(value: int | None) -> float:
    return math.nan if value is None else float(value)


def _divide(value: int | None, by: float) -> float:
    return math.nan if value is None else value / by
