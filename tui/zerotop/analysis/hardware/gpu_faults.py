"""The hardware faults of GPUs, the ranks that use these, and the fault that explains what happened to ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from zerotop.analysis.formatting import format_seconds
from zerotop.analysis.hardware import operational_events
from zerotop.analysis.hardware.xids import Origin, describe_xid
from zerotop.recording.events.event_files import select_events
from zerotop.recording.keys import RankProcess
from zerotop.recording.moments.at import At
from zerotop.recording.moments.devices import locate_processes
from zerotop_probe.recording.events import GpuFault

# A fault of a GPU explains that ranks end or stand still within this time (ns): NCCL gives up late. It may be seen a little
# later than the end of the process that it ended.
FOLLOWS_NS, SEEN_LATE_NS = 60 * 10**9, 2 * 10**9

LEAVE = "Restart from the last checkpoint on another node, and have this GPU checked."
_NOT_CODE = (Origin.HARDWARE, Origin.DRIVER)
# Kinds of faults after which a GPU cannot go on, beside Xids.
_FATAL = {
    "lost": "NVML lost GPU {gpu}",
    "unavailable": "the driver gave up GPU {gpu}",
    "poison_fatal": "GPU {gpu} met data that it could not repair",
    "ecc_uncorrected": "GPU {gpu} had a memory error that it could not correct",
}


class GpuUsers(NamedTuple):
    """The ranks that use a GPU. ``is_ours`` is false if all ranks of the node are known to use others."""

    processes: list[RankProcess]
    is_ours: bool

    @property
    def ranks(self) -> list[int]:
        """Their numbers."""
        return sorted({process.rank for process in self.processes})


def find_users(at: At, processes: Iterable[RankProcess], host: str, gpus: Collection[int], time_ns: int) -> GpuUsers:
    """Return those of some ranks that use a GPU, given by its numbers on its node, at a time."""
    here = [process for process in processes if process.host == host]
    # NVML's list has processes that do not allocate through PyTorch. In a container it has the host's numbers.
    listed, located = _list_pids(at, host, time_ns), locate_processes(at)
    used = {one: {located[one][1]} if one in located else listed.get(one.pid, set()) for one in here}
    own = [process for process in here if used[process] & set(gpus)]
    return GpuUsers(own, bool(own) or not here or not all(used.values()))


def list_gpus(fault: GpuFault) -> list[int]:
    """Return the numbers of a fault's GPU: its own, or those of its MIG instances."""
    return fault.gpus or [fault.gpu if fault.gpu is not None else -1]


def name_fault(fault: GpuFault) -> str:
    """Return ``Xid 79 on GPU 1``, ``fatal GPU-RAS 0x0017 on GPU 1`` or ``nvlinks 17 on GPU 0``."""
    words = "Xid" if operational_events.find_xid(fault) is not None else fault.kind.replace("_", " ")
    value = f" {fault.value}" if fault.value is not None else ""
    if fault.report is not None:
        known = f"{words}{value}: " if value and words == "Xid" else ""
        tested = ", simulated" if "simulated" in (fault.report.traits or ()) else ""
        words, value = (
            f"{known}{operational_events.name_severity(fault.report)} {operational_events.name_code(fault.report)}{tested}",
            "",
        )
    return f"{words}{value}" + (f" on GPU {fault.gpu}" if fault.gpu is not None else "")


def _list_pids(at: At, host: str, time_ns: int) -> dict[int, set[int]]:
    """Return the GPUs on which NVML lists processes of a node, by pid."""
    listed: dict[int, set[int]] = {}
    for row in at.records("gpu_processes", host).read_window(time_ns - FOLLOWS_NS, time_ns).rows:
        listed.setdefault(int(row["pid"]), set()).add(int(row["gpu"]))
    return listed


class FaultExplanation(NamedTuple):
    """A fault before the end or the silence of ranks."""

    fault: GpuFault
    ranks: list[int]  # that use its GPU
    is_hardware: bool  # neither the job's code nor, as far as NVIDIA's document goes, anything that it does
    sentence: str
    action: str

    @property
    def fix(self) -> str:
        """The command that shows the state of the GPU."""
        return f"nvidia-smi -q -i {self.fault.gpu}"

    def change_texts(self, details: str) -> dict[str, Any]:
        """Return the texts of what it explains: it is told first, and gives the advice unless the code is to blame."""
        advice = {"advice": self.action, "fix": self.fix} if self.is_hardware else {}
        return {"details": f"{self.sentence} {details}", **advice}


def explain_by_fault(
    at: At, processes: Iterable[RankProcess], ranks: Collection[int], time_ns: int, known_ns: int
) -> FaultExplanation | None:
    """Return the fault of a GPU of some processes that explains what began at a time, as known at another.

    Faults of the hardware come first, and of those the ones of the GPUs of the ranks that it is about.
    """
    faults = select_events(at.events_of(GpuFault), time_ns - FOLLOWS_NS, min(time_ns + SEEN_LATE_NS, known_ns))
    own = list(processes) if faults else []
    found = [one for fault in faults if (one := _explain(at, own, fault, time_ns)) is not None]
    return min(
        found,
        key=lambda one: (not one.is_hardware, not set(one.ranks) & set(ranks), one.fault.unix_ns),
        default=None,
    )


def _explain(at: At, processes: list[RankProcess], fault: GpuFault, time_ns: int) -> FaultExplanation | None:
    users = find_users(at, processes, fault.writer.host, list_gpus(fault), fault.unix_ns)
    if not users.processes:
        return None
    whose = f" of rank {users.ranks[0]}" if len(users.ranks) == 1 else ""
    apart_ns = time_ns - fault.unix_ns
    when = f"{format_seconds(apart_ns / 1e9)} before" if apart_ns > 0 else "just then"
    if (number := operational_events.find_xid(fault)) is not None:
        xid = describe_xid(number)
        if xid.origin in (Origin.CLEANUP, Origin.NOTE):
            return None
        is_hardware = xid.origin in _NOT_CODE
        why = "it is not your code" if is_hardware else f"its cause is {xid.origin.value}"
        said = f"GPU {fault.gpu}{whose} reported Xid {xid.number} ({xid.name}) {when}: {why}."
        return FaultExplanation(fault, users.ranks, is_hardware, said, xid.action)
    if fault.report is not None and operational_events.read_severity(fault) >= operational_events.FATAL:
        is_hardware = operational_events.is_of_memory(fault.report)
        why = ": it is not your code" if is_hardware else ""
        what = f"{operational_events.name_category(fault.report)} (fatal, {operational_events.name_code(fault.report)})"
        said = f"GPU {fault.gpu}{whose} reported {what} {when}{why}."
        return FaultExplanation(fault, users.ranks, is_hardware, said, LEAVE)
    if fault.kind not in _FATAL:
        return None
    said = _FATAL[fault.kind].format(gpu=f"{fault.gpu}{whose}")
    return FaultExplanation(fault, users.ranks, True, f"{said[0].upper()}{said[1:]} {when}: it is not your code.", LEAVE)


def find_earlier(
    faults: Iterable[GpuFault], fault: GpuFault, within_ns: int, is_cause: Callable[[GpuFault], bool]
) -> GpuFault | None:
    """Return a fault of the same GPU, of those that may be a cause, that came within a time before another one."""
    for other in faults:
        is_same = (other.writer.host, other.gpu) == (fault.writer.host, fault.gpu)
        if other is fault:  # in order of time: an earlier one is in front of it
            break
        if is_same and is_cause(other) and fault.unix_ns - other.unix_ns <= within_ns:
            return other
    return None
