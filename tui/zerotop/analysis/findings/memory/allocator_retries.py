"""PyTorch's allocator had to flush its cache to get memory: this is slow, and often precedes an out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, in_each_rank
from zerotop.analysis.findings.support.links import (
    Kinds,
    begins_before,
    filled_by_leak,
    flushed_before_it,
    flushed_for_growth,
)
from zerotop.analysis.findings.support.thresholds import USED_SHARE
from zerotop.analysis.formatting import format_count
from zerotop.recording.samples import Ints, Samples
from zerotop_probe.recording.tables import BEGIN, PHASE_CODE, PHASES, TICK

_KIND = FindingKind(
    name="allocator_retries",
    confidence=0.95,
    headline="Rank {rank}'s allocator flushed its cache to get memory {so_often}[ {by} step {step}]",
    details=(
        "[This happened {where}. ][It held up to {reserved_peak_bytes:bytes} of {device_bytes:bytes}. ]Expandable segments"
        " are off."
    ),
    advice="Start with expandable segments. If the flushes go on, lower {batch_size}.",
    fix="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    explained_by=(Kinds(begins_before, "fragmentation"),),
    superseded_by=(
        Kinds(flushed_before_it, "out_of_memory"),
        Kinds(filled_by_leak, "memory_creep"),
        Kinds(flushed_for_growth, "batch_growth"),
    ),
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


@in_each_rank(kinds=None)
def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
    """Report each rank's first retry, and again when their number is ten times as high."""
    records = window.subject.records("allocator")
    samples = window.records(records, look_back=1)
    retries = samples.rows["retries"].astype(np.int64) if len(samples) else np.empty(0, np.int64)
    # Usually from 0: the probe may have entered later.
    is_first = retries[:-1] == (records.read_first().rows["retries"][0] if len(samples) else 0)
    is_reported = (np.diff(retries) > 0) & (is_first | (_count_digits(retries[1:]) > _count_digits(retries[:-1])))
    for index in np.flatnonzero(is_reported).tolist():
        yield _build_finding(window.subject, samples, index + 1)


def _count_digits(numbers: Ints) -> Ints:
    return np.floor(np.log10(np.maximum(numbers, 1))).astype(np.int64)


def _build_finding(process: Process, samples: Samples, index: int) -> Finding:
    before = samples.rows[index - 1]
    row = samples.rows[index]
    evidence = {
        "retries": row["retries"],
        "reserved_bytes": row["reserved_bytes"],
        "reserved_peak_bytes": max(row["reserved_peak_bytes"], before["reserved_bytes"]),
        "allocated_peak_bytes": row["allocated_peak_bytes"],
        "device_bytes": process.device_bytes,
    }
    kind, step = _EXPANDABLE if process.has_expandable_segments else _KIND, _find_step(process, samples, index)
    size = process.device_bytes
    if size and (process.limit_bytes is not None or evidence["reserved_peak_bytes"] < USED_SHARE * size):
        kind = kind.with_changes(advice=_LIMITED_ADVICE, fix="")
    # The count up to then; the Memory screen keeps counting.
    is_first = row["retries"] == 1
    so_often, by = ("for the first time", "in") if is_first else (format_count(int(row["retries"]), "time"), "by")
    begin_ns, end_ns = samples.times[index - 1 : index + 1].tolist()
    return kind.at(
        process,
        begin_ns,
        end_ns,
        evidence,
        step=step,
        where=_describe_place(process, samples, index),
        so_often=so_often,
        by=by,
    )


def _describe_place(process: Process, samples: Samples, index: int) -> str | None:
    """Return in which phase the retries of a reading were; None where the reading before it was in another step."""
    before, row = samples.rows[index - 1 : index + 1]
    if before["step"] != row["step"] or row["edge"] == BEGIN or row["phase"] >= len(PHASES):
        return None
    if row["phase"] != PHASE_CODE["other"]:
        return f"in {PHASES[row['phase']]}"
    # The phases of a counted step are unknown.
    steps = process.steps
    place = int(np.searchsorted(steps["end_unix_ns"], samples.times[index]))
    return "outside forward, backward and step" if place < len(steps) and not steps["counted"][place] else None


def _find_step(process: Process, samples: Samples, index: int) -> int | None:
    """Return the step of a reading: of counted steps, those between boundaries do not know the number."""
    if samples.rows["edge"][index] == TICK:
        ends_ns, numbers = process.steps["end_unix_ns"], process.steps["step"]
        place = int(np.searchsorted(ends_ns, samples.times[index]))
        if place:
            return int(numbers[place]) if place < len(numbers) else int(numbers[-1]) + 1
    step = int(samples.rows["step"][index])
    return step if step >= 0 else None
