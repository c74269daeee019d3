"""Memory that PyTorch reserves and training cannot use: cached for an idle stream, a CUDA graph or a MemPool, or never used.

PyTorch hands out a block only to the stream, and the private pool, that its segment was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Process, SearchWindow, Severity, in_each_rank
from zerotop.analysis.findings.support.thresholds import PLATEAU_STEPS
from zerotop.analysis.formatting import GIB
from zerotop.analysis.memory.tensor_inventory import GRADIENTS, Pool, read_pools
from zerotop_probe.recording import events

_KIND = FindingKind(
    name="unusable_memory",
    severity=Severity.INFO,
    confidence=0.95,
    headline="{unused_bytes:bytes} of GPU memory on rank {rank} can only be used by {owner}",
    details=(
        "Rank {rank} reserves {reserved_bytes:bytes} there and {allocated_bytes:bytes} are in use, counted after step"
        " {counted_step}. {reason}"
    ),
    gpu_bytes="unused_bytes",
)
_STREAM = _KIND.with_changes(
    advice="Return it to the driver once that stream's work is done.",
    fix="torch.cuda.synchronize(); torch.cuda.empty_cache()",
)
_POOL = _KIND.with_changes(
    advice="Delete graphs and pools that are no longer used: they keep their memory while they exist."
)
_UNUSED = FindingKind(
    name="unusable_memory",
    severity=Severity.INFO,
    confidence=0.7,
    headline="PyTorch reserves {unused_bytes:bytes} on rank {rank} that no step uses",
    details=(
        "Steps allocate up to {allocated_bytes:bytes}, and {reserved_bytes:bytes} are reserved: the rest is cached for"
        " another stream or a CUDA graph, or left from work before the training."
    ),
    advice="Return it to the driver once, after the work that needed it.",
    fix="torch.cuda.empty_cache()",
    gpu_bytes="unused_bytes",
)
# Worth a finding: these bytes, and this share of the device. A pool counts as unused if at most this part of it is in use.
_LEAST_BYTES, _LEAST_SHARE, _USED_PART = 1 * GIB, 0.02, 0.1
# The device is nearly full from this share on; before, only this share of it is worth advice.
_SHORT_SHARE, _WORTH_SHARE = 0.9, 0.1
# Steps whose peaks are compared where pools are unknown: the probe counts again within them.
_STEPS = 16


@in_each_rank()
def detect(window: SearchWindow[Process]) -> Iterator[Finding | None]:
    """Report at most once for each rank."""
    if window.subject.device_bytes:
        yield _check_pools(window.subject) or _check_peaks(window.subject)


def _check_pools(process: Process) -> Finding | None:
    """Look for pools that are unused in two counts after steps.

    Of an idle stream that is what it cannot have used in the steps between them either: a stream that gathers parameters, or
    copies batches, has given its blocks back by the end of each step.
    """
    counts = [event for event in process.events_of(events.Tensors) if event.pools and event.step]
    for before, event in pairwise(counts):
        for is_private in (False, True):
            unused = [_sum_unused(one, is_private=is_private) for one in (before, event)]
            reserved, allocated = unused[1]
            most = 0 if is_private else _measure_between(process, before, event)
            if most is None or min(size - used for size, used in unused) - most < _find_least(process):
                continue
            evidence = {"unused_bytes": reserved - allocated, "reserved_bytes": reserved, "allocated_bytes": allocated}
            owner = "CUDA graphs or pools" if is_private else "an idle stream"
            reason = "A block goes to no other pool." if is_private else "A block goes to no other stream."
            # It is no harm while memory is not short.
            kind = _POOL if is_private else _STREAM
            if _is_short(process, event.unix_ns):
                kind = kind.with_changes(severity=Severity.WARNING)
            elif reserved - allocated < _WORTH_SHARE * (process.device_bytes or 0):
                kind = kind.with_changes(advice="", fix="")
            return kind.at(
                process,
                before.unix_ns,
                event.unix_ns,
                evidence,
                step=before.step,
                owner=owner,
                reason=reason,
                counted_step=event.step,
            )
    return None


def _sum_unused(event: events.Tensors, *, is_private: bool) -> tuple[int, int]:
    """Return reserved and allocated bytes of the pools that nobody uses."""
    pools = [pool for pool in read_pools(event) if pool.is_private is is_private and _is_unused(pool)]
    return sum(pool.reserved for pool in pools), sum(pool.allocated for pool in pools)


def _measure_between(process: Process, before: events.Tensors, event: events.Tensors) -> int | None:
    """Return the most that steps between two counts allocated beside what lasts; None if no peak of them is known."""
    steps = process.phased_steps_until(event.unix_ns)
    peaks = steps["allocated_peak_bytes"][np.searchsorted(steps["step"], before.step or 0, "right") :]
    if not len(peaks) or peaks.min() < 0:
        return None
    lasting = min(_sum_lasting(one) for one in (before, event))
    return max(0, int(peaks.max()) - lasting)


def _sum_lasting(event: events.Tensors) -> int:
    """Return what is allocated from step to step, in all pools: gradients may be freed in between."""
    allocated = sum(pool.allocated for pool in read_pools(event))
    return allocated - (event.device or {}).get(GRADIENTS, 0)


def _is_unused(pool: Pool) -> bool:
    return (pool.is_private or not pool.is_current) and pool.allocated <= _USED_PART * pool.reserved


def _check_peaks(process: Process) -> Finding | None:
    """Look at the peaks of many steps, where the probe has not recorded pools."""
    steps = process.phased_steps
    if len(steps) < _STEPS or any(event.pools for event in process.events_of(events.Tensors)):
        return None
    rows = steps[PLATEAU_STEPS:_STEPS]
    reserved, used = int(rows["reserved_peak_bytes"].min()), int(rows["allocated_peak_bytes"].max())
    if used <= 0 or reserved - used < _find_least(process) or used > reserved / 2:
        return None
    evidence = {"unused_bytes": reserved - used, "reserved_bytes": reserved, "allocated_bytes": used}
    is_worth = reserved - used >= _WORTH_SHARE * (process.device_bytes or 0)
    return (_UNUSED if is_worth else _UNUSED.with_changes(advice="", fix="")).at_steps(process, rows, evidence)


def _find_least(process: Process) -> float:
    return max(_LEAST_BYTES, _LEAST_SHARE * (process.device_bytes or 0))


def _is_short(process: Process, time_ns: int) -> bool:
    reserved = int(process.steps_until(time_ns)["reserved_peak_bytes"].max(initial=-1))
    return reserved >= _SHORT_SHARE * (process.device_bytes or 1)
