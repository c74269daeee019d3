"""What a GPU Operational Event of NVIDIA's driver says: how bad it is, what kind of fault, and its Xid.

After NVIDIA's documents "GPU Operational Events" and nvml.h. They are a preview: numbers that are unknown here are shown as
they are.
"""

from __future__ import annotations

from zerotop_probe.recording.events import GpuFault, OperationalEvent

OPERATIONAL = "operational"
RECOVERABLE, FATAL = 30, 40
_SEVERITIES = {10: "information", 20: "corrected", RECOVERABLE: "recoverable", FATAL: "fatal"}
_MEMORY = 2
_CATEGORIES = {
    1: "a timeout",
    _MEMORY: "a memory integrity error",
    3: "a link error",
    4: "corrupt state",
    5: "a security error",
}
# What a driver's test injects, and what happened before it was loaded.
_NOT_NOW = {"simulated", "previous"}


def find_xid(fault: GpuFault) -> int | None:
    """Return the Xid of a fault; None if it has none."""
    return fault.value if fault.kind in ("xid", OPERATIONAL) and not is_not_now(fault) else None


def is_not_now(fault: GpuFault) -> bool:
    """Whether an operational event is a test of the driver, or about an earlier time."""
    return fault.report is not None and bool(_NOT_NOW.intersection(fault.report.traits or ()))


def read_severity(fault: GpuFault) -> int:
    """Return how bad an operational event is, as the driver says; 0 for other faults, and those that are not about now."""
    return (fault.report.severity or 0) if fault.report is not None and not is_not_now(fault) else 0


def is_of_memory(report: OperationalEvent) -> bool:
    """Whether it reports corrupted data in memory or caches, which is never the job's own fault."""
    return report.category == _MEMORY


def name_severity(report: OperationalEvent) -> str:
    """Return a word such as ``fatal``."""
    return _SEVERITIES.get(report.severity or 0, f"severity {report.severity}")


def name_category(report: OperationalEvent) -> str:
    """Return a noun such as ``a link error``."""
    return _CATEGORIES.get(report.category or 0, "an error")


def name_code(report: OperationalEvent) -> str:
    """Return ``GPU-RAS 0x0017``."""
    return f"{report.module or '?'} {report.code if report.code is not None else 0:#06x}"
