"""The memory or the links of a GPU became worse during the job, or were bad when it began, as NVML counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from zerotop.analysis.findings.support import Evidence, Finding, FindingKind, SearchWindow, Severity, in_job
from zerotop.analysis.findings.support.gpu_faults import find_rank_processes
from zerotop.analysis.findings.support.nccl_figures import LATEST_NS, Bandwidth, find_bandwidths
from zerotop.analysis.formatting import Text
from zerotop.analysis.hardware.gpu_faults import list_gpus
from zerotop_probe.recording.events import GpuFault

_MEMORY = FindingKind(
    name="gpu_memory_faults",
    confidence=0.95,
    headline="GPU {gpu}[ of {concerned:ranks}] could not correct {grown:count memory error}",
    details="NVML counts {value}, {before} when the recording began. It is not your code.",
    advice="Restart from the last checkpoint before it; the GPU needs a reset before it is used again.",
    fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT -i {gpu}",
)
_NVLINK = FindingKind(
    name="nvlink_faults",
    confidence=0.95,
    headline="GPU {gpu}[ of {concerned:ranks}] has {value} of {before} NVLinks",
    details="The others are down: collectives that use them are slower, or fail. It is not your code.",
    advice="Use another node, and have the links of this GPU checked: the fault may be at either end.",
    fix="nvidia-smi nvlink -s -i {gpu}; nvidia-smi nvlink -e -i {gpu}",
    lasts=True,
)
_PCIE = FindingKind(
    name="pcie_link",
    confidence=0.95,
    headline="GPU {gpu}[ of {concerned:ranks}] has {value} of {before} PCIe lanes",
    details="Copies between host and GPU have {share:percent} of the bandwidth that the slot allows. It is not your code.",
    advice="Use another node if copies matter, as with offload, and have the seating and the slot of this GPU checked.",
    fix="nvidia-smi -q -d PCIE -i {gpu}",
    lasts=True,
)
_RECOVERY = FindingKind(
    name="gpu_recovery",
    confidence=0.95,
    headline="The driver asks to recover GPU {gpu}[ of {concerned:ranks}]: {called}",
    details="NVML's recovery action is {value}. The Xid before it says why.",
    advice="Save a checkpoint, and let the operator of the node do that once the GPU is idle.",
    fix="nvidia-smi -q -i {gpu}",
)
_ACTIONS = {
    1: "reset the GPU",
    2: "restart the node",
    3: "stop its peer-to-peer traffic",
    4: "drain and reset it",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "restart the node",
}
# What NCCL's figures say, once they are known.
_PRICE = "NCCL moved data in {collective} at up to {bus_gbs_before:.1f} GB/s before, at {bus_gbs:.1f} GB/s since."
_LINKS = (_NVLINK.name, _PCIE.name)
# The worst first: of several that are read at the same time only that one is told.
_KINDS = {
    "ecc_uncorrected": _MEMORY.with_changes(severity=Severity.ERROR),
    "rows_failed": _MEMORY.with_changes(
        severity=Severity.ERROR,
        headline="GPU {gpu}[ of {concerned:ranks}] has bad memory that it cannot replace",
        details="No spare row is left for it. It is not your code.",
        advice="Use another GPU: this one has to be exchanged.",
    ),
    "rows_uncorrected": _MEMORY.with_changes(
        headline="GPU {gpu}[ of {concerned:ranks}] replaced {grown:count row} of bad memory",
        details="Errors in them could not be corrected. The spare rows are used after a reset. It is not your code.",
        advice="Restart from the last checkpoint on other GPUs; this one needs a reset before it is used again.",
    ),
    "rows_pending": _MEMORY.with_changes(
        headline="GPU {gpu}[ of {concerned:ranks}] has bad memory that waits for a reset",
        details="Spare rows will replace it then. It is not your code.",
        advice="The job may go on; the GPU should be reset once it is idle.",
    ),
    "pages_pending": _MEMORY.with_changes(
        headline="GPU {gpu}[ of {concerned:ranks}] has bad memory that waits for a reset",
        details="Pages of it will not be used any more then. It is not your code.",
        advice="The job may go on; the GPU should be reset once it is idle.",
    ),
    "dram_retired": _MEMORY.with_changes(
        headline="GPU {gpu}[ of {concerned:ranks}] retired bad memory",
        details="It will not be used any more after a reset. It is not your code.",
        advice="The job may go on; the GPU should be reset once it is idle.",
    ),
    "poison": _MEMORY.with_changes(
        headline="GPU {gpu}[ of {concerned:ranks}] met bad data in memory, and contained it",
        details="The process that used it is ended by the driver. It is not your code.",
    ),
    "ecc_corrected": _MEMORY.with_changes(
        severity=Severity.INFO,
        headline="GPU {gpu}[ of {concerned:ranks}] corrected {grown:count memory error}",
        details="NVML counts {value}, {before} when the recording began. Corrected errors change no result.",
        advice="Nothing now. If they go on, tell the operator of the node: this memory wears out.",
    ),
    "rows_corrected": _MEMORY.with_changes(
        severity=Severity.INFO,
        headline="GPU {gpu}[ of {concerned:ranks}] replaced {grown:count row} of its memory",
        details="Errors in them could be corrected, and changed no result. The spare rows are used after a reset.",
        advice="Nothing now; the GPU should be reset once it is idle.",
    ),
    "nvlinks": _NVLINK,
    "nvlink_crc": _NVLINK.with_changes(
        confidence=0.9,
        headline="NVLinks of GPU {gpu}[ of {concerned:ranks}] had {grown:count checksum error}",
        details="Data is sent again after each, so results are right, but links are slower.",
    ),
    "nvlink_replays": _NVLINK.with_changes(
        confidence=0.9,
        headline="NVLinks of GPU {gpu}[ of {concerned:ranks}] sent data again {grown:count time}",
        details="Results are right, but links are slower.",
    ),
    "nvlink_recoveries": _NVLINK.with_changes(
        headline="NVLinks of GPU {gpu}[ of {concerned:ranks}] recovered {grown:count time}",
        details="Traffic stops for that time. It is not your code.",
    ),
    "pcie_width": _PCIE,
    "pcie_generation": _PCIE.with_changes(
        confidence=0.9,
        headline="PCIe of GPU {gpu}[ of {concerned:ranks}] runs at generation {value} of {before}, under load",
    ),
    "pcie_replays": _PCIE.with_changes(
        confidence=0.9,
        headline="PCIe of GPU {gpu}[ of {concerned:ranks}] sent data again {grown:count time}",
        details="Results are right, but the link is bad: copies between host and GPU are slower. It is not your code.",
    ),
    "recovery": _RECOVERY,
}
# Counters that rise now and then on healthy machines: a finding if they rise faster (per minute).
_USUAL_PER_MINUTE = {"pcie_replays": 8, "nvlink_crc": 100, "nvlink_replays": 8}
# A fault that was there before the ranks is told with the rank that uses the GPU, if there is one by then.
_AWAIT_RANKS_NS = 10 * 10**9
# A finding about a counter is told again when it has grown by this factor.
_NEWS = 2


class _First(NamedTuple):
    """The first fault of its kind and GPU that was reported, with the ranks that use the GPU and their step."""

    fault: GpuFault
    ranks: tuple[int, ...]
    step: int | None


@in_job(kinds=None)
def detect(window: SearchWindow[Evidence]) -> Iterator[Finding]:
    """Report each kind of fault of a GPU once, and again with the new number when its counter has doubled."""
    recording = window.recording
    faults, links = recording.events_of(GpuFault), []
    fresh = [fault for fault in window.items(faults) if fault.kind in _KINDS and not _is_part(faults, fault)]
    for fault, known_ns in window.await_each(fresh, partial(_find_known, recording)):
        key = fault.writer.host, fault.gpu, fault.kind
        first = window.find_once(partial(_begin_report, recording, fault, known_ns), key)
        if first is not None and (fault is first.fault or fault.rise is not None):
            grown = fault.value - fault.before if fault.value is not None and fault.before is not None else 0
            if window.is_news(grown, lambda last, now: now >= _NEWS * last, key):
                finding = _build_finding(first, fault, known_ns, grown)
                if fault is first.fault and _KINDS[fault.kind].name in _LINKS:
                    links.append((fault, finding))
                yield finding
    for (_, finding), prices in window.await_each(links, lambda one: _find_prices(recording, *one), "prices"):
        yield from (_add_price(finding, found) for found in prices)


def _find_prices(recording: Evidence, fault: GpuFault, finding: Finding) -> list[Bandwidth] | None:
    """Return what NCCL's figures say of a link's fault; None while they may still come."""
    users, _ = find_rank_processes(recording, fault.writer.host, list_gpus(fault), finding.known_ns)
    found = find_bandwidths(users[0], fault.unix_ns) if users else None
    is_late = not users or recording.cursor_ns >= fault.unix_ns + LATEST_NS
    return [found] if found is not None else [] if is_late else None


def _add_price(finding: Finding, found: Bandwidth) -> Finding:
    """Return the finding with what the fault of a link costs."""
    speeds = {"bus_gbs_before": found.before_gbs, "bus_gbs": found.after_gbs}
    text = Text(f"{finding.details} {_PRICE}", {"collective": found.collective, **speeds})
    known_ns = max(finding.known_ns, found.known_ns)
    return replace(finding, known_ns=known_ns, details=text, evidence=finding.evidence | speeds)


def _is_part(faults: Sequence[GpuFault], fault: GpuFault) -> bool:
    """Whether a worse fault of the same memory or link was read at the same time: they are one event."""
    rank, name = list(_KINDS).index(fault.kind), _KINDS[fault.kind].name
    same = (
        list(_KINDS).index(other.kind)
        for other in faults
        if (other.unix_ns, other.writer.host, other.gpu) == (fault.unix_ns, fault.writer.host, fault.gpu)
        and other.kind in _KINDS
        and _KINDS[other.kind].name == name
    )
    return any(other < rank for other in same)


def _find_known(recording: Evidence, fault: GpuFault) -> int | None:
    """Return when a fault can be told: at once while ranks train on its node, else with their first step."""
    firsts = [
        int(process.steps["end_unix_ns"][0])
        for process in recording.processes
        if process.host == fault.writer.host and len(process.steps)
    ]
    if any(first <= fault.unix_ns for first in firsts):
        return fault.unix_ns
    known_ns = min([*firsts, fault.unix_ns + _AWAIT_RANKS_NS])
    return known_ns if known_ns <= recording.cursor_ns else None


def _begin_report(recording: Evidence, fault: GpuFault, known_ns: int) -> _First | None:
    """Return the fault as the first one to be reported of its kind and GPU; None if it is usual, or another job's."""
    usual = _USUAL_PER_MINUTE.get(fault.kind)
    if usual is not None and (fault.rise or 0) <= usual * max(1.0, (fault.seconds or 0.0) / 60):
        return None
    users, is_ours = find_rank_processes(recording, fault.writer.host, list_gpus(fault), known_ns)
    step = users[0].step_at(fault.unix_ns) if users else None
    return _First(fault, tuple(sorted({process.rank for process in users})), step) if is_ours else None


def _build_finding(first: _First, fault: GpuFault, known_ns: int, grown: int) -> Finding:
    lanes = fault.value / fault.before if fault.kind == "pcie_width" and fault.value and fault.before else None
    if fault.kind == "pcie_generation" and fault.value is not None and fault.before is not None:
        lanes = 0.5 ** max(0, fault.before - fault.value)  # each generation has twice the rate of the one before
    return _KINDS[fault.kind].at(
        None,
        first.fault.unix_ns,
        known_ns,
        {"count": fault.value, "count_before": fault.before},
        ranks=first.ranks,
        step=first.step,
        gpu=fault.gpu,
        value=fault.value,
        before=fault.before,
        concerned=list(first.ranks) or None,
        grown=grown,
        share=lanes,
        called=_ACTIONS.get(fault.value or 0, "see nvidia-smi -q"),
    )
