"""PyTorch's allocator had to give its cache back to get what was asked for: slow, and the last thing before an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process, Samples
from zerotop.analysis.formatting import format_bytes, format_count
from zerotop.session.reader import Source
from zerotop_probe.recording.tables import PHASES


@dataclass
class _State:
    """How far a process's allocator was read: its last reading, and how many retries are worth a word next."""

    counts: dict[Source, int] = field(default_factory=dict)
    last_reading: tuple[int, Any] | None = None
    next_retries: int = 0


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """For each rank at its first, and then at each tenfold of it."""
    for process in facts.processes:
        yield PAUSE
        seen = process.get_state(_State)
        samples = process.allocator.read_new(seen.counts)
        if not len(samples):
            continue
        retries = samples.rows["retries"]
        if seen.last_reading is None:
            seen.last_reading, seen.next_retries = (int(samples.times[0]), samples.rows[0]), int(retries[0]) + 1
        while retries[-1] >= seen.next_retries and len(over := np.flatnonzero(retries >= seen.next_retries)):
            yield _build_finding(process, samples, int(over[0]), seen.last_reading)
            seen.next_retries = 10 ** len(str(int(retries[over[0]])))
        seen.last_reading = int(samples.times[-1]), samples.rows[-1].copy()


def _build_finding(process: Process, samples: Samples, index: int, last: tuple[int, Any]) -> Annotation:
    begin_ns, before = (int(samples.times[index - 1]), samples.rows[index - 1]) if index else last
    row, expandable, known_ns = samples.rows[index], process.has_expandable_segments, int(samples.times[index])
    evidence = {
        "retries": float(row["retries"]),
        "reserved_bytes": float(row["reserved_bytes"]),
        "reserved_peak_bytes": float(max(row["reserved_peak_bytes"], before["reserved_bytes"])),
        "allocated_peak_bytes": float(row["allocated_peak_bytes"]),
    }
    if process.device_bytes:
        evidence["device_bytes"] = float(process.device_bytes)
    phase = PHASES[row["phase"]] if row["phase"] < len(PHASES) else "a phase"
    text = f"In {phase} rank {process.rank}'s allocator gave its cache back to the device to get memory"
    text += f" ({format_count(int(row['retries']), 'time')} so far)"
    if "device_bytes" in evidence:
        text += (
            f": it held up to {format_bytes(evidence['reserved_peak_bytes'])} of {format_bytes(evidence['device_bytes'])}"
        )
    return Annotation(
        name="allocator_retries",
        begin_ns=begin_ns,
        end_ns=known_ns,
        known_ns=known_ns,
        step=int(row["step"]) if row["step"] >= 0 else None,
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.95,
        sentence=f"{text}; expandable segments are {'on' if expandable else 'off'}.",
        advice="Lower Trainer's per_device_train_batch_size: it runs at the device's edge."
        if expandable
        else "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; if it goes on, lower the batch size.",
        evidence=evidence,
    )
