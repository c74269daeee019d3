"""What ties a record's time and process to the world: the clock pair, the boot, the process's start."""

from __future__ import annotations

import os
import time


def read_clock_pair() -> dict[str, int]:
    """CLOCK_MONOTONIC and unix time of one instant, in nanoseconds.

    Of three tries the tightest is taken, so that a thread switch between the two readings does not shift a recording.
    """
    best = None
    for _ in range(3):
        before = time.monotonic_ns()
        unix = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, unix)
    assert best is not None
    return {"monotonic_ns": best[1], "unix_ns": best[2]}


def read_boot_id() -> str:
    """Names this boot of this machine: processes that share it share CLOCK_MONOTONIC. Empty where the kernel hides it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; with the pid it names a process for good. 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may hold spaces and parentheses, so count fields from the last one.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def read_hostname() -> str:
    """This machine's short name, fit for a file name."""
    name = os.uname().nodename.split(".")[0]
    return "".join(c if c.isalnum() or c in "_" else "_" for c in name) or "host"
