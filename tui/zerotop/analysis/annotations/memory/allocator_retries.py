"""PyTorch's allocator had to flush its cache to get memory: this is slow, and often precedes an out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process, Samples
from zerotop.analysis.annotations.support.thresholds import USED_SHARE
from zerotop.analysis.formatting import format_count
from zerotop_probe.recording.tables import PHASES

_KIND = FindingKind(
    name="allocator_retries",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="Rank {rank}'s allocator flushed its cache to get memory {so_often}[ {by} step {step}]",
    details=(
        "This happened in {phase}[: it held up to {reserved_peak_bytes:bytes} of {device_bytes:bytes}]. Expandable segments"
        " are off."
    ),
    advice="Start with expandable segments. If the flushes go on, lower {batch_size}.",
    fix="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)
_LIMITED_ADVICE = (
    "The device has more memory: see whether torch.cuda.set_per_process_memory_fraction, or another process, keeps it from"
    " this one."
)
_EXPANDABLE = _KIND.with_changes(
    details=_KIND.details.replace("are off", "are on"),
    advice="Lower {batch_size}: the job runs at the limit of the device's memory.",
    fix="{smaller_batch_fix}",
)


@dataclass
class _State:
    last_reading: tuple[int, Any] | None = None  # time, row
    next_retries: int = 0  # the count that is reported next


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report each rank's first retry, and again when their number is ten times as high."""
    for process in recording.processes:
        samples, state = process.read_new(process.records("allocator"), _KIND.name), process.get_state(_State)
        if not len(samples):
            continue
        retries = samples.rows["retries"]
        if state.last_reading is None:
            state.last_reading, state.next_retries = (int(samples.times[0]), samples.rows[0]), int(retries[0]) + 1
        while retries[-1] >= state.next_retries and len(over := np.flatnonzero(retries >= state.next_retries)):
            yield _build_finding(process, samples, int(over[0]), state.last_reading)
            state.next_retries = 10 ** len(str(int(retries[over[0]])))
        state.last_reading = int(samples.times[-1]), samples.rows[-1].copy()


def _build_finding(process: Process, samples: Samples, index: int, last: tuple[int, Any]) -> Annotation:
    begin_ns, before = (int(samples.times[index - 1]), samples.rows[index - 1]) if index else last
    row = samples.rows[index]
    evidence = {
        "retries": row["retries"],
        "reserved_bytes": row["reserved_bytes"],
        "reserved_peak_bytes": max(row["reserved_peak_bytes"], before["reserved_bytes"]),
        "allocated_peak_bytes": row["allocated_peak_bytes"],
        "device_bytes": process.device_bytes,
    }
    kind, step = _EXPANDABLE if process.has_expandable_segments else _KIND, int(row["step"]) if row["step"] >= 0 else None
    if process.device_bytes and evidence["reserved_peak_bytes"] < USED_SHARE * process.device_bytes:
        kind = kind.with_changes(advice=_LIMITED_ADVICE, fix="")
    phase = PHASES[row["phase"]] if row["phase"] < len(PHASES) else "a phase"
    # The count up to then; the Memory screen keeps counting.
    is_first = row["retries"] == 1
    so_often, by = ("for the first time", "in") if is_first else (format_count(int(row["retries"]), "time"), "by")
    return kind.at(process, begin_ns, int(samples.times[index]), evidence, step=step, phase=phase, so_often=so_often, by=by)
