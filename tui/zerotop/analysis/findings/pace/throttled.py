"""A GPU lowers its clocks during training because of heat, or because the machine cannot supply enough power.

Read from NVML's throttle reasons. The card's own power limit is not counted: large jobs run at it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, in_each_rank
from zerotop.analysis.findings.support.steps.runs import find_run_begins
from zerotop.analysis.findings.support.thresholds import SLOWED_MASK, THROTTLE_REASONS
from zerotop.recording.samples import Ints, Rows

_KIND = FindingKind(
    name="throttled",
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


@in_each_rank()
def detect(window: SearchWindow[Process]) -> Iterator[Finding]:
    """Report once for each rank."""
    process = window.subject
    if process.gpu_key is None or not len(process.steps):
        return
    samples = window.records(process.gpu_samples, int(THROTTLED_SECONDS * 1e9) + _PAUSE_NS)
    if not len(samples):
        return
    slowed = samples.select(np.maximum(samples.rows["throttle_reasons"], 0) & SLOWED_MASK > 0)
    begins = find_run_begins(np.diff(slowed.times, prepend=0) <= _PAUSE_NS)
    begins = np.maximum(begins - 1, 0)  # with the sample from which the pauses are counted
    found = np.flatnonzero(slowed.times - slowed.times[begins] >= THROTTLED_SECONDS * 1e9)
    if len(found):
        yield _build_finding(
            process, slowed.times[[begins[found[0]], found[0]]], slowed.rows[begins[found[0]] : found[0] + 1]
        )


def _build_finding(process: Process, times: Ints, rows: Rows) -> Finding:
    """``times``: of the first and last of the samples."""
    readings = {name: float(rows[-1][name]) for name in ("sm_clock_mhz", "temperature_c") if not np.isnan(rows[-1][name])}
    reasons, (begin_ns, end_ns) = int(np.bitwise_or.reduce(rows["throttle_reasons"] & SLOWED_MASK)), times.tolist()
    names = " and ".join(name for bit, name in THROTTLE_REASONS.items() if reasons & bit)
    evidence = {"throttled_s": (end_ns - begin_ns) / 1e9, "reasons": reasons, **readings}
    return _KIND.at(process, begin_ns, end_ns, evidence, gpu=(process.gpu_key or ("", -1))[1], names=names)
