"""Limits and sandboxes of a process under which the probe would end it, or could not work in it. Read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Mapping

from zerotop_probe.outside import procfs

_LIMIT_PATTERN = re.compile(r"^(Max [a-z ]+?) {2,}(\d+) ", re.MULTILINE)  # unlimited ones do not match
METRICS_ONLY = "Only its system metrics are recorded."
# What the probe needs: files that grow, its rings and threads, and a few descriptors.
_LEAST_FILE_BYTES = 1 << 30
_LEAST_ADDRESS_BYTES = 256 << 20
_LEAST_DESCRIPTORS = 16
_KIB, _MIB = 1 << 10, 1 << 20


def describe_danger(pid: int, status: Mapping[str, str]) -> str:
    """Return a sentence that says why a process must not be entered; "" if nothing is known against it.

    ``status``: the fields of its ``/proc/PID/status``.
    """
    return _describe_sandbox(pid, status) or _describe_limits(pid, status)


def _describe_sandbox(pid: int, status: Mapping[str, str]) -> str:
    # A filter that we have, too, such as a container's, allows what we do.
    if _count_filters(status) > _count_filters(read_status(os.getpid())):
        return f"Process {pid} restricts its system calls (seccomp), which may end it for one of the probe's. {METRICS_ONLY}"
    if "shstk" in status.get("x86_Thread_features", "").split():
        return f"Process {pid} has a shadow stack, which ends it for a call from outside. Start the job with zerotop run."
    return ""


def _describe_limits(pid: int, status: Mapping[str, str]) -> str:
    text = procfs.read_file(f"/proc/{pid}/limits").decode(errors="replace")
    limits = {name: int(value) for name, value in _LIMIT_PATTERN.findall(text)}
    file_bytes = limits.get("Max file size", _LEAST_FILE_BYTES)
    if file_bytes < _LEAST_FILE_BYTES and not _handles(status, signal.SIGXFSZ):
        return (
            f"Process {pid} may write files of at most {file_bytes // _KIB} KiB (ulimit -f), and a longer one ends it with "
            f"SIGXFSZ. {METRICS_ONLY}"
        )
    if (address_bytes := limits.get("Max address space")) is not None:
        free_bytes = address_bytes - _KIB * int(status.get("VmSize", "0").split()[0])
        if free_bytes < _LEAST_ADDRESS_BYTES:
            return f"Process {pid} may map only {max(0, free_bytes) // _MIB} MiB more memory (ulimit -v). {METRICS_ONLY}"
    if (most := limits.get("Max open files")) is not None:
        with contextlib.suppress(OSError):
            used = len(os.listdir(f"/proc/{pid}/fd"))
            if most - used < _LEAST_DESCRIPTORS:
                return f"Process {pid} has {used} of at most {most} files open (ulimit -n). {METRICS_ONLY}"
    return ""


def _handles(status: Mapping[str, str], number: int) -> bool:
    """Whether a process ignores, handles or blocks a signal."""
    masks = (int(status.get(name, "0"), 16) for name in ("SigIgn", "SigCgt", "SigBlk"))
    return any(mask >> (number - 1) & 1 for mask in masks)


def _count_filters(status: Mapping[str, str]) -> int:
    """Return how many seccomp filters a process has; a kernel before 5.9 says only whether it has any."""
    mode = int(status.get("Seccomp", "0"))
    return int(status.get("Seccomp_filters", "1")) + (mode == 1) if mode else 0


def read_status(pid: int) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``."""
    lines = procfs.read_file(f"/proc/{pid}/status", 1 << 13).decode(errors="replace").splitlines()
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
