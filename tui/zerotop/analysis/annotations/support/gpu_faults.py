"""The hardware faults of GPUs, and the ranks that use these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zerotop.analysis.annotations.support.annotation import FindingKind
from zerotop.analysis.annotations.support.evidence import Evidence, Group, Process
from zerotop.analysis.annotations.support.thresholds import FOLLOWS_NS, SEEN_LATE_NS
from zerotop.analysis.failures.xids import Origin, describe_xid
from zerotop.analysis.formatting import format_seconds
from zerotop.session.events.event_files import select_events
from zerotop_probe.recording.events import GpuFault

_NOT_CODE = (Origin.HARDWARE, Origin.DRIVER)
# Kinds of faults after which a GPU cannot go on, beside Xids.
_FATAL = {
    "lost": "NVML lost GPU {gpu}",
    "unavailable": "the driver gave up GPU {gpu}",
    "poison_fatal": "GPU {gpu} met data that it could not repair",
    "ecc_uncorrected": "GPU {gpu} had a memory error that it could not correct",
}


class GpuUsers(NamedTuple):
    """The processes that use a GPU. ``is_ours`` is false if all ranks of the node are known to use others."""

    processes: list[Process]
    is_ours: bool

    @property
    def ranks(self) -> list[int]:
        """Their ranks."""
        return sorted({process.rank for process in self.processes})


def find_users(recording: Evidence, host: str, gpus: Sequence[int], time_ns: int) -> GpuUsers:
    """Return the processes of the latest attempt at a time that use a GPU, by its numbers on its node."""
    begun = [group for group in recording.groups if group.lead.source.created_ns <= time_ns]
    here = begun[-1].processes_on(host) if begun else []
    # NVML's list has processes that do not allocate through PyTorch. In a container it has the host's numbers.
    listed = _list_pids(recording, host, time_ns)
    located = {one.rank: {one.gpu_key[1]} if one.gpu_key is not None else listed.get(one.pid, set()) for one in here}
    own = [process for process in here if located[process.rank] & set(gpus)]
    return GpuUsers(own, bool(own) or not here or not all(located.values()))


def list_gpus(fault: GpuFault) -> list[int]:
    """Return the numbers of a fault's GPU: its own, or those of its MIG instances."""
    return fault.gpus or [fault.gpu if fault.gpu is not None else -1]


def _list_pids(recording: Evidence, host: str, time_ns: int) -> dict[int, set[int]]:
    """Return the GPUs on which NVML lists processes of a node, by pid."""
    rows = recording.at.records("gpu_processes", host).read_window(time_ns - FOLLOWS_NS, time_ns).rows
    listed: dict[int, set[int]] = {}
    for row in rows:
        listed.setdefault(int(row["pid"]), set()).add(int(row["gpu"]))
    return listed


class _Explanation(NamedTuple):
    """A fault before the end or the silence of ranks."""

    fault: GpuFault
    ranks: list[int]
    is_hardware: bool  # neither the job's code nor, as far as NVIDIA's document goes, anything that it does
    sentence: str
    action: str


def change_by_fault(
    recording: Evidence, group: Group, kind: FindingKind, ranks: Sequence[int], window: tuple[int, int]
) -> tuple[FindingKind, dict[str, Any]]:
    """Return a kind of finding about ranks that tells the fault of a GPU that explains it, and the values that it needs.

    Faults of the ranks' own GPUs come first, and those of the hardware: they give the advice. ``window``: begin of what is
    explained, and when it became known.
    """
    time_ns, known_ns = window
    faults = select_events(recording.events_of(GpuFault), time_ns - FOLLOWS_NS, min(time_ns + SEEN_LATE_NS, known_ns))
    found = [one for fault in faults if (one := _explain(recording, group, fault, time_ns)) is not None]
    if not found:
        return kind, {}
    first = min(found, key=lambda one: (not one.is_hardware, not set(one.ranks) & set(ranks), one.fault.unix_ns))
    kind = kind.with_changes(details=f"{first.sentence} {kind.details}")
    if first.is_hardware:
        kind = kind.with_changes(advice=first.action, fix="nvidia-smi -q -i {fault_gpu}")
    return kind, {"fault_gpu": first.fault.gpu}


def _explain(recording: Evidence, group: Group, fault: GpuFault, time_ns: int) -> _Explanation | None:
    users = find_users(recording, fault.writer.host, list_gpus(fault), fault.unix_ns)
    users = users._replace(processes=[process for process in users.processes if process in group.processes])
    if not users.processes:
        return None
    whose = f" of rank {users.ranks[0]}" if len(users.ranks) == 1 else ""
    apart_ns = time_ns - fault.unix_ns
    when = f"{format_seconds(apart_ns / 1e9)} before" if apart_ns > 0 else "just then"
    if fault.kind == "xid" and fault.value is not None:
        xid = describe_xid(fault.value)
        if xid.origin in (Origin.CLEANUP, Origin.NOTE):
            return None
        is_hardware = xid.origin in _NOT_CODE
        why = "it is not your code" if is_hardware else f"its cause is {xid.origin.value}"
        said = f"GPU {fault.gpu}{whose} reported Xid {xid.number} ({xid.name}) {when}: {why}."
        return _Explanation(fault, users.ranks, is_hardware, said, xid.action)
    if fault.kind not in _FATAL:
        return None
    said = _FATAL[fault.kind].format(gpu=f"{fault.gpu}{whose}")
    action = "Restart from the last checkpoint on another node, and have this GPU checked."
    return _Explanation(fault, users.ranks, True, f"{said[0].upper()}{said[1:]} {when}: it is not your code.", action)


def find_earlier(faults: Iterable[GpuFault], fault: GpuFault, within_ns: int, *kinds: str) -> GpuFault | None:
    """Return a fault of the same GPU and of one of some kinds that came within a time before another one."""
    for other in faults:
        is_same = (other.writer.host, other.gpu) == (fault.writer.host, fault.gpu)
        if other is fault:  # in order of time: an earlier one is in front of it
            break
        if is_same and other.kind in kinds and fault.unix_ns - other.unix_ns <= within_ns:
            return other
    return None
