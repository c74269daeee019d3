"""A call of NVML did not return: a sick GPU, or a driver that is stuck. Samples of the GPU are missing meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, in_job
from zerotop.analysis.findings.support.gpu_faults import find_rank_processes
from zerotop_probe.recording.events import GpuSilent

_KIND = FindingKind(
    name="nvml_silent",
    confidence=0.9,
    headline="NVML does not answer[ about GPU {gpu}][ of {concerned:ranks}]",
    details=(
        "A call had not returned after {silent_s:seconds}. The GPU or its driver may be stuck; until it returns,"
        " values of this GPU are missing. zerotop goes on with everything else."
    ),
    advice="If nvidia-smi hangs too, the node needs its operator.",
    fix="timeout 10 nvidia-smi[ -i {gpu}]",
)
_BACK = _KIND.with_changes(
    headline="NVML did not answer[ about GPU {gpu}][ of {concerned:ranks}] for {silent_s:seconds}",
    details="The GPU or its driver was stuck; values of this GPU are missing for that time.",
)
# A call without a GPU that does not return at about the same time is no news.
_TOGETHER_NS = 60 * 10**9


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report a call when it has not returned for some seconds, and again when it has. Once for each GPU."""
    told: dict[tuple[str, int | None], tuple[int, tuple[int, ...], int | None]] = {}
    for event in window.results(window.items(window.recording.events_of(GpuSilent)), None):
        host, seconds = event.writer.host, min(event.seconds or 0.0, event.unix_ns / 1e9)  # a damaged file may say more
        begin_ns, key = event.unix_ns - int(seconds * 1e9), (host, event.gpu)
        others = [first for (other, _), first in told.items() if other == host]
        if event.gpu is None and any(begin_ns - first[0] < _TOGETHER_NS for first in others):
            continue
        if key not in told:
            gpus = event.gpus or ([event.gpu] if event.gpu is not None else [])
            users, is_ours = find_rank_processes(window.recording, host, gpus, event.unix_ns)
            if event.gpu is not None and not is_ours:
                continue
            step = users[0].step_at(begin_ns) if users else None
            told[key] = begin_ns, tuple(sorted({process.rank for process in users})), step
        elif not event.back:
            continue
        begin_ns, ranks, step = told[key]
        yield (_BACK if event.back else _KIND).at(
            None,
            begin_ns,
            event.unix_ns,
            {"silent_s": seconds},
            ranks=ranks,
            step=step,
            gpu=event.gpu,
            concerned=list(ranks) or None,
        )
