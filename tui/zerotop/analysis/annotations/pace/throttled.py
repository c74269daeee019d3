"""A GPU slows its clocks down against its will while it trains: heat, or power that the machine cannot give.

Read from NVML's reasons. The power limit of the card itself is none of them: large jobs run at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from zerotop.analysis.annotations.support.annotation import PAUSE, Annotation, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process, Samples
from zerotop.analysis.annotations.support.thresholds import THROTTLED_SECONDS
from zerotop.analysis.formatting import format_seconds
from zerotop.session.reader import Source

REASONS = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "hardware power brake"}
SLOWED_MASK = sum(REASONS)
# Moments without it (ns) that count as the same stretch.
_PAUSE_NS = 1_000_000_000


@dataclass
class _State:
    """How far NVML's samples were read; the stretch in which the GPU was slowed, and its reasons."""

    counts: dict[Source, int] = field(default_factory=dict)
    since_ns: int = 0
    last_ns: int = 0
    reasons: int = 0
    is_reported: bool = False


def detect(facts: Evidence) -> Iterator[Annotation | None]:
    """One finding for each rank."""
    for process in facts.processes:
        yield PAUSE
        seen = process.get_state(_State)
        if seen.is_reported or process.gpu_key is None or not len(process.steps):
            continue
        samples = process.gpu_samples.read_new(seen.counts)
        if not len(samples):
            continue
        reasons = np.maximum(samples.rows["throttle_reasons"], 0) & SLOWED_MASK
        for at in np.flatnonzero(reasons).tolist():
            time_ns = int(samples.times[at])
            if time_ns - seen.last_ns > _PAUSE_NS:
                seen.since_ns, seen.reasons = time_ns, 0
            seen.last_ns, seen.reasons = time_ns, seen.reasons | int(reasons[at])
            if time_ns - seen.since_ns >= THROTTLED_SECONDS * 1e9:
                seen.is_reported = True
                yield _build_finding(process, seen, samples, at)
                break


def _build_finding(process: Process, state: _State, samples: Samples, index: int) -> Annotation:
    row, host_gpu = samples.rows[index], process.gpu_key or ("", -1)
    names = " and ".join(name for bit, name in REASONS.items() if state.reasons & bit)
    evidence = {"throttled_s": (state.last_ns - state.since_ns) / 1e9, "reasons": float(state.reasons)}
    text = f"GPU {host_gpu[1]} of rank {process.rank} has slowed its clocks for {format_seconds(evidence['throttled_s'])} ({names})"
    for column, words in (("sm_clock_mhz", "the SM clock is {:.0f} MHz"), ("temperature_c", "it is {:.0f} °C warm")):
        if not np.isnan(row[column]):
            evidence[column] = float(row[column])
            text += f", {words.format(row[column])}"
    return Annotation(
        name="throttled",
        begin_ns=state.since_ns,
        end_ns=state.last_ns,
        known_ns=state.last_ns,
        step=process.step_at(state.since_ns),
        ranks=(process.rank,),
        severity=Severity.WARNING,
        confidence=0.95,
        sentence=text + ".",
        advice="Look at nvidia-smi -q -d PERFORMANCE and at the node's cooling; no setting of DeepSpeed mends it.",
        evidence=evidence,
    )
