"""The memory or the links of a GPU became worse during the job, or were bad when it began, as NVML counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from zerotop.analysis.findings.support.evidence import Evidence, Process
from zerotop.analysis.findings.support.finding import Finding, FindingKind, Severity
from zerotop.analysis.findings.support.gpu_faults import find_rank_processes
from zerotop.analysis.findings.support.nccl_figures import LATEST_NS, find_bandwidths
from zerotop.analysis.formatting import Text
from zerotop.analysis.hardware.gpu_faults import list_gpus
from zerotop_probe.recording.events import GpuFault

_MEMORY = FindingKind(
    name="gpu_memory_faults",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="GPU {gpu}[ of {concerned:ranks}] could not correct {grown:count memory error}",
    details="NVML counts {value}, {before} when the recording began. It is not your code.",
    advice="Restart from the last checkpoint before it; the GPU needs a reset before it is used again.",
    fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT -i {gpu}",
)
_NVLINK = FindingKind(
    name="nvlink_faults",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="GPU {gpu}[ of {concerned:ranks}] has {value} of {before} NVLinks",
    details="The others are down: collectives that use them are slower, or fail. It is not your code.",
    advice="Use another node, and have the links of this GPU checked: the fault may be at either end.",
    fix="nvidia-smi nvlink -s -i {gpu}; nvidia-smi nvlink -e -i {gpu}",
)
_PCIE = FindingKind(
    name="pcie_link",
    severity=Severity.WARNING,
    confidence=0.95,
    headline="GPU {gpu}[ of {concerned:ranks}] has {value} of {before} PCIe lanes",
    details="Copies between host and GPU have {share:percent} of the bandwidth that the slot allows. It is not your code.",
    advice="Use another node if copies matter, as with offload, and have the seating and the slot of this GPU checked.",
    fix="nvidia-smi -q -d PCIE -i {gpu}",
)
_RECOVERY = FindingKind(
    name="gpu_recovery",
    severity=Severity.WARNING,
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


class _Told(NamedTuple):
    """A finding that was reported: its begin, and by how much the counter had grown."""

    begin_ns: int
    ranks: tuple[int, ...]
    step: int | None
    grown: int


class _State:
    def __init__(self) -> None:
        self.waiting: list[GpuFault] = []
        self.told: dict[tuple[str, int | None, str], _Told] = {}
        self.without_price: list[tuple[GpuFault, Finding, Process]] = []


def detect(recording: Evidence) -> Iterator[Finding]:
    """Report each kind of fault of a GPU once, and again with the new number when its counter has doubled."""
    faults = recording.events_of(GpuFault)
    if not faults:
        return
    state = recording.get_state(_State, _MEMORY.name)
    waiting = [*state.waiting, *recording.read_new_items(faults, _MEMORY.name)]
    state.waiting = []
    for fault in waiting:
        if fault.kind not in _KINDS or _is_part(waiting, fault):
            continue
        if (known_ns := _find_known(recording, fault)) is not None:
            for finding in _check_fault(recording, state, fault, known_ns):
                yield finding
                if _KINDS[fault.kind].name in _LINKS and finding.begin_ns == fault.unix_ns:
                    users, _ = find_rank_processes(recording, fault.writer.host, list_gpus(fault), known_ns)
                    state.without_price += [(fault, finding, process) for process in users[:1]]
        else:
            state.waiting.append(fault)
    yield from _price_links(recording, state)


def _price_links(recording: Evidence, state: _State) -> Iterator[Finding]:
    """Report faults of links again when NCCL's figures show what they cost."""
    waiting, state.without_price = state.without_price, []
    for fault, finding, process in waiting:
        if (found := find_bandwidths(process, fault.unix_ns)) is not None:
            speeds = {"bus_gbs_before": found.before_gbs, "bus_gbs": found.after_gbs}
            details, known_ns = f"{finding.details} {_PRICE}", max(finding.known_ns, found.known_ns)
            text = Text(details, {"collective": found.collective, **speeds})
            yield replace(finding, known_ns=known_ns, details=text, evidence=finding.evidence | speeds)
        elif recording.cursor_ns < fault.unix_ns + LATEST_NS:
            state.without_price.append((fault, finding, process))


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


def _check_fault(recording: Evidence, state: _State, fault: GpuFault, known_ns: int) -> Iterator[Finding]:
    key = fault.writer.host, fault.gpu, fault.kind
    told = state.told.get(key)
    grown = fault.value - fault.before if fault.value is not None and fault.before is not None else 0
    if not _is_news(fault, told, grown):
        return
    if told is None:
        users, is_ours = find_rank_processes(recording, fault.writer.host, list_gpus(fault), known_ns)
        if not is_ours:
            return
        step = users[0].step_at(fault.unix_ns) if users else None
        told = _Told(fault.unix_ns, tuple(sorted({process.rank for process in users})), step, grown)
    state.told[key] = told._replace(grown=grown)
    evidence = {"count": fault.value, "count_before": fault.before}
    lanes = fault.value / fault.before if fault.kind == "pcie_width" and fault.value and fault.before else None
    kind = _KINDS[fault.kind]
    if fault.kind == "pcie_generation" and fault.value is not None and fault.before is not None:
        lanes = 0.5 ** max(0, fault.before - fault.value)  # each generation has twice the rate of the one before
    yield kind.at(
        None,
        told.begin_ns,
        known_ns,
        evidence,
        ranks=told.ranks,
        step=told.step,
        gpu=fault.gpu,
        value=fault.value,
        before=fault.before,
        concerned=list(told.ranks) or None,
        grown=grown,
        share=lanes,
        called=_ACTIONS.get(fault.value or 0, "see nvidia-smi -q"),
    )


def _is_news(fault: GpuFault, told: _Told | None, grown: int) -> bool:
    if told is not None:
        return fault.rise is not None and grown >= _NEWS * told.grown
    usual = _USUAL_PER_MINUTE.get(fault.kind)
    return usual is None or (fault.rise or 0) > usual * max(1.0, (fault.seconds or 0.0) / 60)
