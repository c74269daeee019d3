"""A variable of the environment slows down each step: launches wait for their kernels, or freed memory is not kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zerotop.analysis.findings.support import Finding, FindingKind, Group, SearchWindow, Severity, in_each_attempt
from zerotop.analysis.findings.support.gpu_use import BUSY_SHARE, measure_gpu_use
from zerotop.analysis.findings.support.mode_uses import lacks_cache, launches_block
from zerotop.analysis.stats.change_points import SETTLED_STEPS

_BLOCKING = FindingKind(
    name="launches_block",
    confidence=0.95,
    headline="Each launch waits for its kernel: CUDA_LAUNCH_BLOCKING is set",
    details="The CPU cannot prepare the next kernel while one runs, and the GPU waits for each."
    "[ The GPU is busy in {use:percent} of the time; without it, launches and kernels would overlap.]",
    advice="Unset it. It helps only to find the call whose kernel fails.",
    fix="unset CUDA_LAUNCH_BLOCKING",
)
_UNCACHED = FindingKind(
    name="caching_off",
    confidence=0.95,
    headline="PyTorch keeps no freed GPU memory: PYTORCH_NO_CUDA_MEMORY_CACHING is set",
    details="Each new tensor requests its memory from the driver, and each freed one returns it."
    "[ The GPU is busy in {use:percent} of the time.]",
    advice="Unset it. It helps only tools that check each access to memory.",
    fix="unset PYTORCH_NO_CUDA_MEMORY_CACHING",
)
# Seconds of training that show how busy the GPU is.
_LEAST_S = 3.0
# Share of the time from which a variable is worth a warning.
_LEAST_COST = 0.05


@in_each_attempt(kinds=2)
def detect(window: SearchWindow[Group]) -> Iterator[Finding]:
    """Report each variable once for each attempt, and as no trouble where the GPU is busy all the same."""
    group, steps = window.subject, window.subject.lead.steps
    if len(steps) <= SETTLED_STEPS:
        return
    begin_ns, ends = int(steps["begin_unix_ns"][SETTLED_STEPS]), steps["end_unix_ns"]
    last = int(np.searchsorted(ends, begin_ns + round(_LEAST_S * 1e9)))
    if last >= len(steps):
        return
    for kind, is_set in ((_BLOCKING, launches_block), (_UNCACHED, lacks_cache)):
        processes = [one for one in group.processes if is_set(one)]
        if not processes:
            continue
        use = float(np.mean([measure_gpu_use(one, begin_ns, int(ends[last])) for one in processes]))
        idle = 0.0 if np.isnan(use) else 1 - use
        cost = min(use, idle) if kind is _BLOCKING else idle  # what overlaps without it is the shorter of both
        is_costly = use < BUSY_SHARE and cost >= _LEAST_COST
        chosen = kind if is_costly else kind.with_changes(severity=Severity.INFO)
        ranks = sorted(one.rank for one in processes)
        evidence = {} if np.isnan(use) else {"use": use}
        yield chosen.at_steps(group, steps[: last + 1], evidence, ranks=ranks, cost=cost, use=evidence.get("use"))
