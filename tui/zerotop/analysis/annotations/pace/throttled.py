"""A GPU lowers its clocks during training because of heat, or because the machine cannot supply enough power.

Read from NVML's throttle reasons. The card's own power limit is not counted: large jobs run at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zerotop.analysis.annotations.support.annotation import Annotation, FindingKind, Severity
from zerotop.analysis.annotations.support.evidence import Evidence, Process, Samples
from zerotop.analysis.annotations.support.thresholds import SLOWED_MASK, THROTTLE_REASONS

_KIND = FindingKind(
    name="throttled",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="GPU {gpu} of rank {rank} has lowered its clocks for {throttled_s:seconds} ({names})",
    details="[The SM clock is {sm_clock_mhz:.0f} MHz. ][The temperature is {temperature_c:.0f} °C.]",
    advice="Check the node's cooling and power supply: no {tool} setting helps.",
    fix="nvidia-smi -q -d PERFORMANCE",
)
# A shorter time is a passing dip.
THROTTLED_SECONDS = 5.0
# Gaps (ns) that do not interrupt it.
_PAUSE_NS = 1_000_000_000


@dataclass
class _State:
    since_ns: int = 0
    last_ns: int = 0
    reasons: int = 0


def detect(recording: Evidence) -> Iterator[Annotation | None]:
    """Report once for each rank."""
    for process in recording.processes:
        if _KIND.name in process.reported or process.gpu_key is None or not len(process.steps):
            continue
        samples, state = process.read_new(process.gpu_samples, _KIND.name), process.get_state(_State)
        if not len(samples):
            continue
        reasons = np.maximum(samples.rows["throttle_reasons"], 0) & SLOWED_MASK
        indices = np.flatnonzero(reasons)
        if not len(indices):
            continue
        times = samples.times[indices]
        continues = np.diff(times, prepend=state.last_ns) <= _PAUSE_NS
        # Index of the sample at which each run begins; 0 stands for one that began earlier.
        begins = np.maximum.accumulate(np.where(continues, 0, np.arange(1, len(times) + 1)))
        since = np.where(begins > 0, times[begins - 1], state.since_ns)
        found = np.flatnonzero(times - since >= THROTTLED_SECONDS * 1e9)
        end = int(found[0]) if len(found) else len(times) - 1
        before = 0 if begins[end] else state.reasons
        state.reasons = before | int(np.bitwise_or.reduce(reasons[indices[max(0, begins[end] - 1) : end + 1]]))
        state.last_ns, state.since_ns = int(times[end]), int(since[end])
        if len(found):
            process.reported.add(_KIND.name)
            yield _build_finding(process, state, samples, int(indices[end]))


def _build_finding(process: Process, state: _State, samples: Samples, index: int) -> Annotation:
    row = samples.rows[index]
    readings = {name: float(row[name]) for name in ("sm_clock_mhz", "temperature_c") if not np.isnan(row[name])}
    evidence = {"throttled_s": (state.last_ns - state.since_ns) / 1e9, "reasons": state.reasons, **readings}
    gpu, names = (
        (process.gpu_key or ("", -1))[1],
        " and ".join(name for bit, name in THROTTLE_REASONS.items() if state.reasons & bit),
    )
    return _KIND.at(process, state.since_ns, state.last_ns, evidence, gpu=gpu, names=names)
