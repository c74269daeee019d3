"""Clock pair, boot id, process start and host name, which relate the times and processes of different files."""

from __future__ import annotations

import os
import time


def read_clock_pair() -> dict[str, int]:
    """Read CLOCK_MONOTONIC and unix time at one instant, in nanoseconds.

    The tightest of three attempts counts, so that a thread switch between the two readings does not shift a recording.
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
    """Return the id of this boot: processes with the same id share CLOCK_MONOTONIC. Empty if the kernel hides it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_process_start(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; pid and start identify a process. 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may contain spaces and parentheses: count fields from the last parenthesis.
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def read_hostname() -> str:
    """Return this machine's short name, safe in a file name."""
    name = os.uname().nodename.split(".")[0]
    return "".join(c if c.isalnum() or c in "_" else "_" for c in name) or "host"
